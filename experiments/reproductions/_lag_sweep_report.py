"""Writes tables and figures of a sweep from one small file per task, which is kept beside the page."""

from __future__ import annotations

import pathlib
from collections.abc import Collection

import numpy as np

from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import interval
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._intervals import signed
from experiments.reproductions._lag_sweep_plan import LAST
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_run import CURVES
from experiments.reproductions._lag_sweep_table import Table
from experiments.reproductions._lag_sweep_table import rate_text

RESULTS = pathlib.Path(__file__).parent / "results"

LEGEND = """Every ± is half of a 95 % interval (Student) over seeds. Differences to sync are paired by seed. A best rate
has the highest mean over the very seeds that it is shown for, which flatters every method, and most of all those that
were tried at many rates or in many variants: these tables choose, and [which_correction.md](../which_correction.md)
reports on fresh seeds. * marks a best rate at the edge of those tried."""

#: Methods of the page's table.
SHOWN = (
  "sync", "sync, OPOB exact", "no correction", "token TIS", "seq TIS", "PPO", "decoupled PPO", "A-3PO", "GSPO", "CISPO",
  "TOPR", "M2PO", "ESS", "OPOB", "VCPO", "VCPO, exact", "GAC", "seq TIS + GAC", "VCPO + GAC", "PPO + GAC", "TOPR + GAC",
  "PPO + ESS", "A-3PO + GAC + ESS", "PPO + random skips", "seq TIS, matched rate", "PPO, matched rate", "sequence PPO",
  "PPO, momentum .97", "ESS, momentum .97", "TOPR, momentum .97", "TOPR + OPOB, exact", "sequence PPO + OPOB, exact",
  "sequence PPO + ahead, momentum .97", "sequence PPO + OPOB, exact + ahead, momentum .97",
)  # fmt: skip

#: Methods of the figures' panels.
PANELS = {
  "corrections": ("no correction", "token TIS", "seq TIS", "PPO", "TOPR", "M2PO", "A-3PO", "GSPO"),
  "stabilizers": ("seq TIS", "ESS", "VCPO", "VCPO + GAC", "PPO", "PPO + GAC", "PPO + ESS", "A-3PO + GAC + ESS"),
  "candidates": (
    "seq TIS",
    "TOPR",
    "ESS + ahead, momentum .99",
    "VCPO, exact",
    "sequence PPO + ahead, momentum .97",
    "sequence PPO + OPOB, exact",
    "sequence PPO + OPOB, exact + ahead, momentum .97",
  ),
  "curves": ("no correction", "seq TIS", "PPO", "ESS", "VCPO", "PPO + GAC"),
}


def _at_best_rate(table: Table, method: str, lag: int) -> tuple[int | None, str]:
  """Returns the row of a method's best rate and its accuracy with that rate, starred at the edge; None without runs."""
  best = table.best(method, lag)
  if best is None:
    return None, ""
  edge = "*" if table.at_edge(best) else ""
  return best, f"{measure(table.accuracy[best])} ({rate_text(table.configs[best][2])}{edge})"


def best_rates(table: Table, names: Collection[str] | None = None, differences: bool = True) -> str:
  """Returns a row per method: accuracy at its best rate for every lag, and the difference to sync, paired by seed.

  Args:
    table: the results.
    names: the methods; all that have results by default.
    differences: whether to give the difference to sync.
  """
  reference = table.best("sync", 0)
  rows = []
  for method in names or table.methods():
    row = [method]
    for lag in [0, *table.lags()]:
      best, cell = (None, "") if lag and method.startswith("sync") else _at_best_rate(table, method, lag)
      if differences and lag and best is not None and reference is not None:
        cell += f", {signed(table.difference(best, reference), 2)}"
      row.append(cell)
    rows.append(row)
  return grid(["method", *(f"lag {lag}" for lag in [0, *table.lags()])], rows)


def momentum_and_lead(table: Table, lag: int) -> str:
  """Returns a row per correction at its best rate: alone, with the lead, with momentum .97, and with both."""
  suffixes = ("", " + ahead", ", momentum .97", " + ahead, momentum .97")
  names = ("no correction", "seq TIS", "ESS", "PPO", "TOPR", "sequence PPO", "sequence PPO + OPOB, exact")
  rows = [[name, *(_at_best_rate(table, name + suffix, lag)[1] for suffix in suffixes)] for name in names]
  return grid([f"lag {lag}", "alone", "lead", "momentum .97", "momentum .97, lead"], rows)


def by_rate(table: Table, lag: int, intervals: bool = True) -> str:
  """Returns a row per method: accuracy at every rate, with intervals or without."""
  cell = measure if intervals else lambda values: number(interval(values).mean)
  rates = sorted({rate for _, _, rate in table.configs})
  rows = []
  for method in table.methods():
    at = table.rates(method, lag)
    if at:
      rows.append([method, *(cell(table.accuracy[at[rate]]) if rate in at else "" for rate in rates)])
  return grid([f"lag {lag}", *(rate_text(rate) for rate in rates)], rows)


def diagnostics(table: Table, lag: int, rate: float) -> str:
  """Returns a row per method: the recorded means over the run, and the ESS and entropy of its last 50 updates."""
  names = ("ess", "scale", "cosine", "norm", "skipped", "clipped", "entropy", "kl")
  rows = []
  for method in table.methods():
    i = table.rates(method, lag).get(rate)
    if i is not None:
      curves = dict(zip(CURVES, table.curves[i].astype(np.float32), strict=True))
      late = [f"{curves[name][-LAST:].mean():.2f}" for name in ("ess", "entropy")]
      rows.append([method, *(f"{curves[name].mean():.2f}" for name in names), *late])
  return grid([f"lag {lag}, rate {rate_text(rate)}", *names, "ess, late", "entropy, late"], rows)


def draw_rates(table: Table, file: pathlib.Path) -> None:
  """Draws accuracy against learning rate: a column per lag, a row per panel."""
  import matplotlib.pyplot as plt

  panels, lags = ("corrections", "stabilizers", "candidates"), table.lags()
  size = (3.2 * len(lags) + 1.5, 3.2 * len(panels))
  figure, axes = plt.subplots(len(panels), len(lags), figsize=size, sharex=True, sharey=True, squeeze=False)
  for row, panel in zip(axes, panels, strict=True):
    for axis, lag in zip(row, lags, strict=True):
      for method in ("sync", *PANELS[panel]):
        at = table.rates(method, lag)
        if at:
          measures = [interval(table.accuracy[i])[:2] for i in at.values()]
          mean, half = np.nan_to_num(np.array(measures), posinf=0.0).T
          color = f"C{PANELS[panel].index(method)}" if method != "sync" else "black"
          style = {"color": color, "linestyle": "--" if method == "sync" else "-"}
          (line,) = axis.plot(list(at), mean, marker=".", label=method, **style)
          axis.fill_between(list(at), mean - half, mean + half, alpha=0.12, color=line.get_color(), linewidth=0)
      axis.set(xscale="log", title=f"lag {lag}")
    row[0].set_ylabel("accuracy, last 50 updates")
    lines = {line.get_label(): line for axis in row for line in axis.get_lines()}
    row[-1].legend(handles=list(lines.values()), fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
  for axis in axes[-1]:
    axis.set_xlabel("learning rate")
  _save(figure, file)


def draw_curves(table: Table, lag: int, rate: float, file: pathlib.Path) -> None:
  """Draws the recorded curves, as means over seeds."""
  import matplotlib.pyplot as plt

  names = ("accuracy", "ess", "cosine", "norm", "entropy", "kl")
  figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex=True)
  for axis, name in zip(axes.flat, names, strict=True):
    for method in ("sync", *PANELS["curves"]):
      i = table.rates(method, lag).get(rate)
      if i is not None:
        values = table.curves[i, CURVES.index(name)].astype(np.float32)
        updates = np.linspace(0, 400, len(values) + 1)[1:]
        style = {"color": "black", "linestyle": "--"} if method == "sync" else {}
        axis.plot(updates, values, label=method, linewidth=1.2, **style)
    axis.set(title=name, yscale="log" if name in ("kl", "norm") else "linear")
  for axis in axes[-1]:
    axis.set_xlabel("update")
  axes[0, -1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
  figure.suptitle(f"lag {lag}, learning rate {rate_text(rate)}")
  _save(figure, file)


def _save(figure, file: pathlib.Path) -> None:
  import matplotlib.pyplot as plt

  figure.tight_layout()
  figure.savefig(file, dpi=90)
  plt.close(figure)


def report(results: Results, folder: pathlib.Path = RESULTS) -> str:
  """Condenses the runs, then writes and returns the tables of everything ever condensed, and draws the figures.

  Raises:
    ValueError: if a file in *folder* has configurations of which there are no runs; it stays as it is.
  """
  tables = {folder / f"lag_sweep_{task}.npz": Table.of(results, task) for task in {run.task for run in results.curves}}
  for file, table in tables.items():
    lost = set(Table.load(file).configs) - set(table.configs) if file.exists() else ()
    if lost:
      raise ValueError(f"{file} has {len(lost)} configurations of which there are no runs; give another --results.")
  folder.mkdir(parents=True, exist_ok=True)
  for file, table in tables.items():
    table.save(file)
  parts = ["# Tables of the lag sweep", "", "Made by `python -m experiments.reproductions.lag_sweep --report`.", LEGEND]
  for file in sorted(folder.glob("lag_sweep_*.npz")):
    table, task = Table.load(file), file.stem.removeprefix("lag_sweep_")
    parts += [f"## {task}", f"### {task}, at each method's best rate", best_rates(table)]
    shown = min({rate for _, _, rate in table.configs}, key=lambda rate: abs(np.log(rate / 1e-4)))
    for lag in table.lags():
      parts += [f"### {task}, by learning rate, lag {lag}", by_rate(table, lag)]
      parts += [f"### {task}, diagnostics, lag {lag}", diagnostics(table, lag, shown)]
      draw_curves(table, lag, shown, folder / f"lag_sweep_{task}_lag{lag}.png")
    if table.lags():
      draw_rates(table, folder / f"lag_sweep_{task}_rates.png")
  text = "\n\n".join(part for part in parts if part) + "\n"
  (folder / "lag_sweep_tables.md").write_text(text)
  return text
