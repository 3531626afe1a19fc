"""Tables and figures of a sweep, from a small file a task that is kept beside the page."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from experiments.reproductions._lag_sweep_plan import GROUPS
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_run import CURVES

RESULTS = pathlib.Path(__file__).parent / "results"

#: Probes at the end of a run whose mean is its accuracy: 50 updates.
LAST = 5
#: 97.5 % quantile of Student's t by degrees of freedom; more than 9 count as 9.
STUDENT = (np.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

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


@dataclasses.dataclass
class Table:
  """The results of one task; a configuration is (method, lag, rate).

  Attributes:
    configs: the configurations.
    accuracy: float32 [configs, seeds], NaN where a seed was not run.
    curves: float16 [configs, len(CURVES), probes], means over seeds.
  """

  configs: list[tuple[str, int, float]]
  accuracy: np.ndarray
  curves: np.ndarray

  @classmethod
  def of(cls, results: Results, task: str) -> Table:
    """Condenses the runs of a task."""
    seeds = 1 + max(run.seed for run in results.curves if run.task == task)
    rows: dict[tuple[str, int, float], dict[int, np.ndarray]] = {}
    for run, curves in results.curves.items():
      if run.task == task:
        rows.setdefault((run.method, run.lag, round(run.rate, 10)), {})[run.seed] = curves.astype(np.float32)
    accuracy = np.full((len(rows), seeds), np.nan, np.float32)
    for i, row in enumerate(rows.values()):
      for seed, curves in row.items():
        accuracy[i, seed] = curves[CURVES.index("accuracy"), -LAST:].mean()
    means = [np.clip(np.mean(list(row.values()), axis=0), -6e4, 6e4) for row in rows.values()]
    return cls(list(rows), accuracy, np.array(means, np.float16))

  def save(self, file: pathlib.Path) -> None:
    method, lag, rate = (np.array(column) for column in zip(*self.configs, strict=True))
    np.savez_compressed(file, method=method, lag=lag, rate=rate, accuracy=self.accuracy, curves=self.curves)

  @classmethod
  def load(cls, file: pathlib.Path) -> Table:
    with np.load(file) as a:
      configs = zip(a["method"].tolist(), a["lag"].tolist(), a["rate"].tolist(), strict=True)
      return cls(list(configs), a["accuracy"], a["curves"])

  def rates(self, method: str, lag: int) -> dict[float, int]:
    """The rows of a method at a lag, by rate; of the synchronous ones, their rows."""
    lag = 0 if method.startswith("sync") else lag
    found = {rate: i for i, (name, k, rate) in enumerate(self.configs) if name == method and k == lag}
    return dict(sorted(found.items()))

  def best(self, method: str, lag: int) -> int | None:
    """The row with the highest mean accuracy over the rates."""
    rows = list(self.rates(method, lag).values())
    return max(rows, key=lambda i: np.nanmean(self.accuracy[i])) if rows else None

  def lags(self) -> list[int]:
    return sorted({lag for _, lag, _ in self.configs if lag})

  def methods(self) -> list[str]:
    """Those with results, in the order of the groups."""
    present = {name for name, _, _ in self.configs}
    return [name for name in dict.fromkeys(name for group in GROUPS.values() for name in group) if name in present]


def interval(values: np.ndarray) -> tuple[float, float]:
  """Mean, and half the width of its 95 % interval (Student), of the values that are not NaN."""
  values = values[~np.isnan(values)]
  spread = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else np.inf
  return float(np.mean(values)), STUDENT[min(len(values), len(STUDENT)) - 1] * spread


def _number(x: float) -> str:
  return f"{x:.2f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.2f}"


def _measure(values: np.ndarray) -> str:
  mean, half = interval(values)
  return _number(mean) + (f" ± {_number(half)}" if np.isfinite(half) else "")


def _grid(header: list[str], rows: list[list[str]]) -> str:
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def best_rates(table: Table) -> str:
  """A row a method: accuracy at its best rate for every lag, and the difference to sync, seed by seed."""
  reference = table.best("sync", 0)
  rows = []
  for method in table.methods():
    row = [method]
    for lag in [0, *table.lags()]:
      best = None if lag and method.startswith("sync") else table.best(method, lag)
      cell = "" if best is None else f"{_measure(table.accuracy[best])} ({table.configs[best][2]:g})"
      if best is not None and reference is not None and lag:
        mean, half = interval(table.accuracy[best] - table.accuracy[reference])
        cell += f", {mean:+.2f} ± {half:.2f}"
      row.append(cell)
    rows.append(row)
  return _grid(["method", *(f"lag {lag}" for lag in [0, *table.lags()])], rows)


def by_rate(table: Table, lag: int) -> str:
  """A row a method: accuracy at every rate."""
  rates = sorted({rate for _, _, rate in table.configs})
  rows = []
  for method in table.methods():
    at = table.rates(method, lag)
    if at:
      rows.append([method, *(_measure(table.accuracy[at[rate]]) if rate in at else "" for rate in rates)])
  return _grid([f"lag {lag}", *(f"{rate:g}" for rate in rates)], rows)


def diagnostics(table: Table, lag: int, rate: float) -> str:
  """A row a method: what was recorded, as means over the run, and the ESS and entropy of its last 50 updates."""
  names = ("ess", "scale", "cosine", "norm", "skipped", "clipped", "entropy", "kl")
  rows = []
  for method in table.methods():
    i = table.rates(method, lag).get(rate)
    if i is not None:
      curves = dict(zip(CURVES, table.curves[i].astype(np.float32), strict=True))
      late = [f"{curves[name][-LAST:].mean():.2f}" for name in ("ess", "entropy")]
      rows.append([method, *(f"{curves[name].mean():.2f}" for name in names), *late])
  return _grid([f"lag {lag}, rate {rate:g}", *names, "ess, late", "entropy, late"], rows)


def draw_rates(table: Table, file: pathlib.Path) -> None:
  """Accuracy against learning rate: a column a lag, a row a panel."""
  import matplotlib.pyplot as plt

  panels, lags = ("corrections", "stabilizers", "candidates"), table.lags()
  size = (3.2 * len(lags) + 1.5, 3.2 * len(panels))
  figure, axes = plt.subplots(len(panels), len(lags), figsize=size, sharex=True, sharey=True, squeeze=False)
  for row, panel in zip(axes, panels, strict=True):
    for axis, lag in zip(row, lags, strict=True):
      for method in ("sync", *PANELS[panel]):
        at = table.rates(method, lag)
        if at:
          measures = [interval(table.accuracy[i]) for i in at.values()]
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
  """What was recorded over a run, means over seeds."""
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
  figure.suptitle(f"lag {lag}, learning rate {rate:g}")
  _save(figure, file)


def _save(figure, file: pathlib.Path) -> None:
  import matplotlib.pyplot as plt

  figure.tight_layout()
  figure.savefig(file, dpi=90)
  plt.close(figure)


def report(results: Results, folder: pathlib.Path = RESULTS) -> str:
  """Condenses the runs there are; of all that was ever condensed, returns the tables, writes them and draws figures.

  Raises:
    ValueError: if a file in `folder` has configurations of which there are no runs; it is left as it is.
  """
  tables = {folder / f"lag_sweep_{task}.npz": Table.of(results, task) for task in {run.task for run in results.curves}}
  for file, table in tables.items():
    lost = set(Table.load(file).configs) - set(table.configs) if file.exists() else ()
    if lost:
      raise ValueError(f"{file} has {len(lost)} configurations of which there are no runs; give another --results.")
  folder.mkdir(parents=True, exist_ok=True)
  for file, table in tables.items():
    table.save(file)
  parts = ["# Tables of the lag sweep", "", "Made by `python -m experiments.reproductions.lag_sweep --report`."]
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
