"""The studies of a second task, sorting of 16 digits (`sort16`), and a second size, `ch4` twice as wide (`ch4wide`).

What methods lose there to sync stands beside what they lose on the task that the advice comes from. Sorting was studied
twice, the second time on other seeds at lower rates. `starts.csv` holds how the warm starts ended, as the command
printed it.
"""

from __future__ import annotations

import csv
import functools
import pathlib
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.reproductions import _lag_sweep_paired as paired
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _lag_sweep_studies as several
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import interval
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._intervals import verdict
from experiments.reproductions._lag_sweep_table import rate_text

TASK = paired.Split(reports.RESULTS / "second_task", "sort16", range(4100, 4103), range(4000, 4020))
LOWER = paired.Split(reports.RESULTS / "lower_rates", "sort16", range(4500, 4503), range(4400, 4420))
SIZE = paired.Split(reports.RESULTS / "second_size", "ch4wide", range(4300, 4303), range(4200, 4220))

#: The correction that the others are compared with.
BEST = "TOPR"
#: What exact OPOB is added to, and the name of both together.
PLAIN, WITH_OPOB = "sequence PPO, momentum .97", "sequence PPO + OPOB, exact, momentum .97"
#: The accuracy that a warm start must have for its runs to count where poor starts are left out.
LEAST = 0.15


class Start(NamedTuple):
  """How a warm start ended.

  Attributes:
    updates: the supervised updates that it took.
    accuracy: its accuracy, measured again over all test problems.
  """

  updates: int
  accuracy: float


def starts(runs: paired.Split) -> dict[int, Start]:
  """Returns the warm starts of a study by seed."""
  with open(runs.folder / "starts.csv", newline="") as lines:
    return {int(row["seed"]): Start(int(row["updates"]), float(row["accuracy"])) for row in csv.DictReader(lines)}


def poor(runs: paired.Split) -> list[int]:
  """Returns the seeds of a study whose warm start has an accuracy below `LEAST`."""
  return [seed for seed, start in starts(runs).items() if start.accuracy < LEAST]


def starts_table() -> str:
  """Returns a row per study: how its warm starts ended, and which are poor."""
  rows = []
  titles = {TASK: "sorting of 16", LOWER: "sorting of 16, lower rates", SIZE: "sums, twice the width"}
  for runs, title in titles.items():
    found = starts(runs)
    updates, accuracies = zip(*found.values(), strict=True)
    below = ", ".join(f"{seed} ({number(found[seed].accuracy, 3)})" for seed in poor(runs))
    spread = f"{number(min(accuracies), 3)} to {number(max(accuracies), 3)}"
    middle = number(float(np.median(accuracies)), 3)
    rows.append([title, str(len(found)), f"{min(updates):,} to {max(updates):,}", spread, middle, below or "–"])
  return grid(["task", "seeds", "updates", "accuracy", "median", f"below {number(LEAST)}"], rows)


@functools.cache
def task() -> paired.Study:
  """Returns the study of sorting."""
  return paired.Study(TASK.fresh, [TASK.tries])


@functools.cache
def lower() -> paired.Study:
  """Returns the study of sorting at lower rates."""
  return paired.Study(LOWER.fresh, [LOWER.tries])


@functools.cache
def size_runs(all_starts: bool = True) -> paired.Split:
  """Returns the runs of sums at twice the width, with those from poor warm starts or without them."""
  return SIZE if all_starts else SIZE.without(poor(SIZE))


@functools.cache
def size(all_starts: bool = True) -> paired.Study:
  """Returns the study of sums at twice the width, likewise."""
  runs = size_runs(all_starts)
  return paired.Study(runs.fresh, [runs.tries], (0, 10))


def counts() -> str:
  """Returns what the studies hold, as a sentence."""
  runs = sum(study.fresh.accuracy.size for study in (task(), lower(), size()))
  return f"{runs} runs on fresh seeds, 20 of each configuration; {comparisons()} comparisons."


def _edge(study: paired.Study, config: tuple[str, int, float]) -> str:
  """Returns a star for a configuration at the edge of the rates that were tried."""
  return "*" * study.edge(config)


def _configs(study: paired.Study) -> list[tuple[str, int, float]]:
  return [study.fresh.configs[row.config] for rows in study.rows.values() for row in rows]


def _minus_best(study: paired.Study, config: tuple[str, int, float]) -> np.ndarray | None:
  """Returns the accuracies minus those of `BEST` at the same lag, [S], each at its own rate; None for it and sync."""
  method, lag, _ = config
  others = list(study.fresh.rates(BEST, lag)) if lag and method != BEST else []
  return study.accuracy(*config) - study.accuracy(BEST, lag, others[0]) if others else None


def comparisons() -> int:
  """Returns the number of differences that are shown: to sync, to `BEST`, those without poor starts, and by OPOB."""
  count = len(_by_opob())
  for study in (task(), lower(), size(), size(all_starts=False)):
    configs = _configs(study)
    count += len(configs) - 1 + sum(_minus_best(study, config) is not None for config in configs)
  return count


def task_table() -> str:
  """Returns the table of sorting."""
  return differences({"": task()})


def lower_table() -> str:
  """Returns the table of sorting at lower rates."""
  return differences({"": lower()})


def _by_opob() -> dict[tuple[int, float], np.ndarray]:
  """Returns what exact OPOB adds in sorting at lower rates, by the lags and rates that ran with it and without, [S]."""
  study = lower()
  found: dict[tuple[int, float], np.ndarray] = {}
  for lag in study.rows:
    shared = study.fresh.rates(PLAIN, lag).keys() & study.fresh.rates(WITH_OPOB, lag).keys()
    found |= {(lag, rate): study.accuracy(WITH_OPOB, lag, rate) - study.accuracy(PLAIN, lag, rate) for rate in shared}
  return found


def opob_table() -> str:
  """Returns a row per lag: what exact OPOB adds to PPO on sequence ratios in sorting at lower rates."""
  rows = [
    [str(lag), WITH_OPOB, PLAIN, rate_text(rate), verdict(values, comparisons())]
    for (lag, rate), values in _by_opob().items()
  ]
  return grid(["lag", "method", "minus", "rate", "difference"], rows)


def size_table() -> str:
  """Returns the table of sums at twice the width, over all seeds and without poor starts."""
  left_out = ", ".join(str(seed) for seed in poor(SIZE) if seed in SIZE.reported)
  return differences({"": size(), f", without {left_out}": size(all_starts=False)})


def differences(studies: Mapping[str, paired.Study]) -> str:
  """Returns a row per configuration: accuracy, and the differences to sync and to `BEST`, over the seeds of each study.

  Args:
    studies: studies of the same configurations by what to add to the header; accuracies are those of the first one.
  """
  first, *_ = studies.values()
  rows = []
  for config in _configs(first):
    method, lag, rate = config
    row = [str(lag), method, rate_text(rate) + _edge(first, config), measure(first.accuracy(*config), 3)]
    for study in studies.values():
      is_sync = config == first.fresh.configs[first.sync]
      to_best = _minus_best(study, config)
      row.append("" if is_sync else verdict(study.minus_sync(*config), comparisons()))
      row.append("" if to_best is None else verdict(to_best, comparisons()))
    rows.append(row)
  header = [f"minus {other}{words}" for words in studies for other in ("sync", BEST)]
  return grid(["lag", "method", "rate", "accuracy", *header], rows)


class Column(NamedTuple):
  """What methods were measured on.

  Attributes:
    title: the task and size.
    studies: the studies on fresh seeds, each of other seeds.
    rates: the rate of every (method, lag).
    comparisons: the number of comparisons that its differences are among.
  """

  title: str
  studies: Sequence[paired.Study]
  rates: Mapping[tuple[str, int], float]
  comparisons: int

  @classmethod
  def of(cls, title: str, studies: Sequence[paired.Study], comparisons: int) -> Column:
    """Returns the column of studies that have one rate of every method at a lag, together."""
    rates = {(method, lag): rate for study in studies for method, lag, rate in _configs(study)}
    return cls(title, studies, rates, comparisons)

  def has(self, method: str, lag: int) -> bool:
    """Returns whether there are runs of a method at a lag."""
    return (method, lag) in self.rates

  def minus_sync(self, method: str, lag: int) -> np.ndarray:
    """Returns the differences to sync over the seeds of all studies that have the method at the lag, [S]."""
    config = (method, lag, self.rates[method, lag])
    return np.concatenate([study.minus_sync(*config) for study in several.having(self.studies, config)])

  def cell(self, method: str, lag: int) -> str:
    """Returns the difference to sync and the rate, nothing without runs."""
    if not self.has(method, lag):
      return ""
    rate = self.rates[method, lag]
    at = rate_text(rate) + "*" * several.at_edge(self.studies, (method, lag, rate))
    return f"{verdict(self.minus_sync(method, lag), self.comparisons)} at {at}"


def beside(columns: Sequence[Column], methods: Sequence[str], lags: Iterable[int]) -> str:
  """Returns a row per method and lag: what it loses to sync in every column, and the accuracy of sync before."""
  sync = [np.concatenate([study.fresh.accuracy[study.sync] for study in column.studies]) for column in columns]
  rows = [["0", "sync, its accuracy", *(f"{measure(values, 3)} ({len(values)} seeds)" for values in sync)]]
  for lag in lags:
    for method in methods:
      cells = [column.cell(method, lag) for column in columns]
      if any(cells):
        rows.append([str(lag), method, *cells])
  return grid(["lag", "method", *(column.title for column in columns)], rows)


def draw(columns: Sequence[Column], methods: Sequence[str], lags: Sequence[int], file: pathlib.Path) -> None:
  """Draws what `beside` holds, with 95 % intervals: a panel per lag, a row per method, a marker per column."""
  import matplotlib.pyplot as plt

  names = {lag: [m for m in methods if any(c.has(m, lag) for c in columns)][::-1] for lag in lags}
  heights = [len(found) for found in names.values()]
  size = (8.5, 0.5 * sum(heights) + 1.6)
  figure, axes = plt.subplots(len(lags), 1, figsize=size, sharex=True, squeeze=False, height_ratios=heights)
  for axis, (lag, found) in zip(axes[:, 0], names.items(), strict=True):
    for i, column in enumerate(columns):
      places = [y for y, method in enumerate(found) if column.has(method, lag)]
      got = [interval(column.minus_sync(found[y], lag)) for y in places]
      heights_of = [y + 0.22 * (len(columns) - 1) / 2 - 0.22 * i for y in places]
      style = {"fmt": "osD^"[i], "color": f"C{i}", "capsize": 2.5, "markersize": 4, "label": column.title}
      axis.errorbar([x.mean for x in got], heights_of, xerr=[x.half for x in got], **style)
    axis.set_yticks(range(len(found)), found, fontsize=8)
    axis.set_ylim(-0.6, len(found) - 0.4)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.grid(axis="x", linewidth=0.3)
    axis.set_title(f"lag {lag}", loc="left", fontsize=9)
  axes[-1, 0].legend(fontsize=8, loc="upper left")
  figure.supxlabel("accuracy minus sync, paired over fresh seeds, with 95 % intervals", fontsize=9)
  figure.tight_layout()
  figure.savefig(file, dpi=110)
  plt.close(figure)
