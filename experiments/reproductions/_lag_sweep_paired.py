"""Compares the configurations of a study on fresh seeds with sync and with named controls, paired by seed."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._intervals import verdict
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_plan import Run
from experiments.reproductions._lag_sweep_run import CURVES
from experiments.reproductions._lag_sweep_table import Table
from experiments.reproductions._lag_sweep_table import rate_text

#: What each method is compared with, so that one ingredient differs.
CONTROL_OF = {
  "sync, momentum .97": "sync",
  "sync, OPOB exact": "sync",
  "seq TIS": "no correction",
  "PPO": "no correction",
  "A-3PO": "PPO",
  "DPPO": "PPO",
  "SAPO": "PPO",
  "PPO, MaxRL": "PPO",
  **dict.fromkeys((*methods.ESTR, *methods.TRM), "PPO"),
  "PPO + GAC": "PPO + random skips",
  "PPO + random skips": "PPO",
  "VESPO": "sequence PPO",
  "SAT": "PPO",
  "DPPO + log-squared": "DPPO",
  "M2PO, signed": "M2PO",
  "centered": "no correction",
  "centered token TIS": "token TIS",
  "centered + OPOB, exact": "centered",
  "no correction, momentum .97": "no correction",
  "no correction + OPOB, exact": "no correction",
  "sequence PPO, rate / lag": "sequence PPO",
  "TOPR": "seq TIS",
  "TOPR + GAC": "TOPR",
  "TOPR + OPOB, exact": "TOPR",
  "TOPR, sums": "TOPR",
  "TOPR, momentum .97": "TOPR",
  "TOPR, momentum .5": "TOPR",
  "TOPR, momentum 0": "TOPR",
  **{name: name.removesuffix(", falling rate") for name in methods.OTHERS_FALLING},
  "TOPR, falling rate": "TOPR",
  "TOPR, momentum .5, falling rate": "TOPR, momentum .5",
  "TOPR + ahead": "TOPR",
  "successes alone": "TOPR",
  "seq TIS, cap 1": "TOPR",
  "TOPR, sums, momentum .97": "TOPR, sums",
  "TOPR, sums, momentum .5": "TOPR, sums",
  "TOPR, sums + ahead, momentum .97": "TOPR, sums, momentum .97",
  "TOPR + OPOB, exact, momentum .97": "TOPR + OPOB, exact",
  "TOPR, sums + OPOB, exact": "TOPR, sums",
  "TOPR, sums + OPOB, exact, momentum .97": "TOPR, sums + OPOB, exact",
  "TOPR, sums + OPOB, exact + ahead, momentum .97": "TOPR, sums + OPOB, exact, momentum .97",
  "VESPO, momentum .97": "VESPO",
  "VESPO + OPOB, exact": "VESPO",
  "no correction + ahead": "no correction",
  "OPOB, exact": "seq TIS",
  "VCPO, exact": "seq TIS",
  "sequence PPO": "PPO",
  "sequence PPO, momentum .97": "sequence PPO",
  "sequence PPO, momentum .97, falling rate": "sequence PPO, momentum .97",
  "sequence PPO + ahead, momentum .97": "sequence PPO, momentum .97",
  "sequence PPO, means": "sequence PPO",
  "sequence PPO, momentum .5": "sequence PPO",
  "sequence PPO + ESS": "sequence PPO",
  "sequence PPO + ahead": "sequence PPO",
  "sequence PPO + OPOB, exact, momentum .5": "sequence PPO + OPOB, exact",
  "sequence PPO + ESS + OPOB, exact": "sequence PPO + OPOB, exact",
  "sequence PPO + OPOB, exact": "sequence PPO",
  "sequence PPO + OPOB, exact + ahead": "sequence PPO + OPOB, exact",
  "sequence PPO + OPOB, exact, momentum .97": "sequence PPO + OPOB, exact",
  "sequence PPO + OPOB, exact + ahead, momentum .97": "sequence PPO + OPOB, exact, momentum .97",
  "sequence PPO + OPOB, exact, momentum .97, falling rate": "sequence PPO + OPOB, exact, momentum .97",
}


@dataclasses.dataclass(frozen=True)
class Split:
  """The runs of a task in a folder, read once: on seeds that something was chosen on, and on fresh ones.

  Attributes:
    folder: the folder of the result files.
    task: the name of the task.
    tried: the seeds on which rates and methods were chosen.
    reported: the fresh seeds.
  """

  folder: pathlib.Path
  task: str
  tried: Collection[int]
  reported: Collection[int]

  @property
  def tries(self) -> Table:
    """Returns the runs that something was chosen on."""
    return self._tables[0]

  @property
  def fresh(self) -> Table:
    """Returns the runs on fresh seeds."""
    return self._tables[1]

  def without(self, seeds: Collection[int]) -> Split:
    """Returns the same runs but for some seeds."""
    tried, reported = (tuple(s for s in part if s not in seeds) for part in (self.tried, self.reported))
    return dataclasses.replace(self, tried=tried, reported=reported)

  def runs(self, method: str, lag: int, rate: float) -> np.ndarray:
    """Returns the curves of a configuration on the fresh seeds, float32 [seeds, len(CURVES), probes]."""
    found = [self._results.curves[Run(self.task, method, lag, rate, seed)] for seed in self.reported]
    return np.stack(found).astype(np.float32)

  @functools.cached_property
  def _results(self) -> Results:
    return Results(self.folder)

  @functools.cached_property
  def _tables(self) -> tuple[Table, Table]:
    return Table.of(self._results, self.task, self.tried), Table.of(self._results, self.task, self.reported)


class Row(NamedTuple):
  """A configuration of the fresh table with the rows that it is compared with, `None` where there is none.

  Attributes:
    config: the row of the table.
    chosen: whether its rate is the one chosen on other seeds.
    edge: whether that is the highest or lowest of the rates tried there, so that a better one may lie beyond.
    sync: the row of sync.
    sync_exact: the row of sync with exact OPOB, for a method that uses it at a lag.
    sync_falling: the row of sync whose learning rate falls, for a method whose rate does at a lag.
    control: the row of its control.
  """

  config: int
  chosen: bool
  edge: bool
  sync: int | None
  sync_exact: int | None
  sync_falling: int | None
  control: int | None


class Study:
  """A study on fresh seeds.

  Args:
    fresh: the runs on fresh seeds.
    choices: the runs on the seeds that rates and methods were chosen on; of several tables, the first that has a method
      at a lag counts.
    lags: the lags of the tables; 0 is sync.

  Raises:
    ValueError: if sync was not run on every seed.

  Attributes:
    rows: the rows of every lag's table, the most accurate first.
    comparisons: the number of differences in all tables.
  """

  def __init__(self, fresh: Table, choices: Sequence[Table], lags: Iterable[int] = (0, 10, 32)):
    self.fresh = fresh.complete()
    self._choices = choices
    sync = self._row("sync", 0)
    if sync is None:
      raise ValueError("there is no sync run on every seed at the rate chosen on earlier seeds; make it first.")
    self.sync = sync
    self._sync_exact = self._row("sync, OPOB exact", 0)
    self._sync_falling = self._row("sync, falling rate", 0)
    self.rows = {lag: self._rows(lag) for lag in lags}
    self.comparisons = sum(other is not None for rows in self.rows.values() for row in rows for other in row[3:])

  def _choice(self, method: str, lag: int) -> tuple[float | None, bool]:
    """Returns the rate chosen for a method, `None` without runs, and whether it lies at the edge of those tried."""
    for table in self._choices:
      best = table.best(method, lag)
      if best is not None:
        return round(table.configs[best][2], 10), table.at_edge(best)
    return None, False

  def _row(self, method: str, lag: int, rate: float | None = None) -> int | None:
    """Returns the row of a method at a rate, or else at its chosen rate."""
    rows = self.fresh.rates(method, lag)
    return rows.get(rate, rows.get(self._choice(method, lag)[0]))  # type: ignore[arg-type]

  def _rows(self, lag: int) -> list[Row]:
    rows = []
    for index, (method, k, rate) in enumerate(self.fresh.configs):
      if k == lag:
        exact = self._sync_exact if lag and method in methods.EXACT_NORMS else None
        falling = self._sync_falling if lag and methods.METHODS[method].get("fall") else None
        control = self._row(CONTROL_OF[method], lag, rate) if lag and method in CONTROL_OF else None
        sync = None if index == self.sync else self.sync
        best, edge = self._choice(method, lag)
        rows.append(Row(index, rate == best, rate == best and edge, sync, exact, falling, control))
    return sorted(rows, key=lambda row: -float(self.fresh.accuracy[row.config].mean()))

  def accuracy(self, method: str, lag: int, rate: float) -> np.ndarray:
    """Returns the accuracies of a configuration by seed, [S]."""
    return self.fresh.accuracy[self.fresh.rates(method, lag)[rate]]

  def minus_sync(self, method: str, lag: int, rate: float) -> np.ndarray:
    """Returns the accuracies of a configuration minus those of sync, by seed, [S]."""
    return self.accuracy(method, lag, rate) - self.fresh.accuracy[self.sync]

  def edge(self, config: tuple[str, int, float]) -> bool:
    """Returns whether a configuration has the chosen rate, at the edge of those tried."""
    return any(row.edge for row in self.rows[config[1]] if self.fresh.configs[row.config] == config)

  def table(self, lag: int) -> str:
    """Returns the table of a lag: accuracy, and the differences to sync, to sync with exact OPOB or a rate that falls,
    of which there is a column if the study has it, and to a control."""
    alike = {"OPOB exact": "sync_exact"} if self._sync_exact is not None else {}
    alike |= {"falling rate": "sync_falling"} if self._sync_falling is not None else {}
    lines = []
    for row in self.rows[lag]:
      method, _, rate = self.fresh.configs[row.config]
      line = [method, rate_text(rate) + " c" * row.chosen + "*" * row.edge, measure(self.fresh.accuracy[row.config], 3)]
      line.append(self._difference(row.config, row.sync))
      if lag:
        line += [self._difference(row.config, getattr(row, name)) for name in alike.values()]
        line += [self._name(row.control, rate), self._difference(row.config, row.control)]
      lines.append(line)
    header = [f"lag {lag}" if lag else "no lag", "rate", "accuracy", "minus sync"]
    others = [*(f"minus sync, {name}" for name in alike), "control", "minus control"]
    return grid(header + (others if lag else []), lines)

  def diagnostics(self, lags: Iterable[int]) -> str:
    """Returns a row per configuration: recorded quantities as means over all updates and seeds."""
    names = ("ess", "kl", "clipped", "cosine", "entropy")
    rows = []
    for row in (row for lag in lags for row in self.rows[lag]):
      method, lag, rate = self.fresh.configs[row.config]
      curves = dict(zip(CURVES, self.fresh.curves[row.config].astype(np.float32), strict=True))
      values = [number(float(curves[name].mean())) for name in names]
      rows.append([method, str(lag), rate_text(rate), number(float(self.fresh.accuracy[row.config].mean())), *values])
    return grid(["method", "lag", "rate", "accuracy", *names], rows)

  def _difference(self, index: int, other: int | None) -> str:
    if other is None:
      return ""
    return verdict(self.fresh.accuracy[index] - self.fresh.accuracy[other], self.comparisons)

  def _name(self, index: int | None, rate: float) -> str:
    if index is None:
      return ""
    name, _, at = self.fresh.configs[index]
    return name if at == rate else f"{name} at {rate_text(at)}"

  def draw(self, file: pathlib.Path) -> None:
    """Draws the difference to sync of every configuration with its 95 % interval, a panel per lag that has one."""
    import matplotlib.pyplot as plt

    panels = {lag: [row for row in rows if row.sync is not None][::-1] for lag, rows in self.rows.items()}
    panels = {lag: rows for lag, rows in panels.items() if rows}
    heights = [len(rows) + 1.5 for rows in panels.values()]
    size = (8.5, 0.27 * sum(heights) + 0.8)
    figure, axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False, height_ratios=heights)
    for axis, (lag, rows) in zip(axes[:, 0], panels.items(), strict=True):
      for chosen, color, label in ((True, "C0", "rate chosen on other seeds"), (False, "0.6", "another rate")):
        places = [y for y, row in enumerate(rows) if row.chosen is chosen]
        found = [self.fresh.difference(rows[y].config, self.sync) for y in places]
        means, halves = [x.mean for x in found], [x.half for x in found]
        style = {"fmt": "o", "color": color, "capsize": 2.5, "markersize": 4, "label": label}
        axis.errorbar(means, places, xerr=halves, **style)
      configs = [(*self.fresh.configs[row.config], "*" * row.edge) for row in rows]
      names = [f"{method}, {rate_text(rate)}{star}" for method, _, rate, star in configs]
      axis.set_yticks(range(len(rows)), names, fontsize=8)
      axis.axvline(0, color="black", linewidth=0.8)
      axis.grid(axis="x", linewidth=0.3)
      axis.set_ylim(-0.7, len(rows) - 0.3)
      axis.set_title(f"lag {lag}" if lag else "no lag", loc="left", fontsize=9)
    figure.legend(*axes[-1, 0].get_legend_handles_labels(), fontsize=8, ncols=2, loc="upper right")
    rate, seeds = self.fresh.configs[self.sync][2], len(self.fresh.seeds)
    label = f"accuracy minus sync at {rate_text(rate)}, paired over {seeds} fresh seeds, with 95 % intervals"
    figure.supxlabel(f"{label} (* an edge of the rates tried)", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.1 / size[1]))  # but for what the legend has beside the first title
    figure.savefig(file, dpi=110)
    plt.close(figure)
