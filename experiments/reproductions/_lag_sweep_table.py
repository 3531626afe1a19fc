"""The condensed results of a sweep, and the statistics that compare two rows of them.

Every ± is half the width of a 95 % interval (Student's t), never a standard deviation. A difference is taken seed by
seed: both runs began with the same warm start, prompts and random numbers. A rate is chosen on some seeds and reported
on others: `Table.best` takes the seeds to choose on.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy import special

from experiments.reproductions._lag_sweep_plan import GROUPS
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_run import CURVES

#: Probes at the end of a run whose mean is its accuracy: 50 updates.
LAST = 5


class Interval(NamedTuple):
  """A mean with half the width of its interval, infinite for a single value.

  Attributes:
    mean: the mean.
    half: half the width.
    size: the number of values.
  """

  mean: float
  half: float
  size: int

  @property
  def holds_zero(self) -> bool:
    """Whether the interval holds 0, so that a difference is not shown."""
    return abs(self.mean) <= self.half


def interval(values: np.ndarray, comparisons: int = 1) -> Interval:
  """Returns the mean and 95 % interval (Student) of the values that are not NaN.

  Args:
    values: the values, one per seed, [S].
    comparisons: the number of intervals that hold jointly at 95 % (Bonferroni); 1 is the plain interval.
  """
  values = np.asarray(values, np.float64)
  values = values[~np.isnan(values)]
  count = len(values)
  if count < 2:
    return Interval(float(np.mean(values)), float("inf"), count)
  quantile = float(special.stdtrit(count - 1, 1.0 - 0.025 / comparisons))
  return Interval(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / count**0.5, count)


@dataclasses.dataclass
class Table:
  """The results of one task; a configuration is (method, lag, rate).

  Attributes:
    configs: the configurations.
    seeds: the seeds of the columns.
    accuracy: float32 [configs, seeds], NaN where a seed was not run.
    curves: float16 [configs, len(CURVES), probes], means over seeds.
  """

  configs: list[tuple[str, int, float]]
  seeds: list[int]
  accuracy: np.ndarray
  curves: np.ndarray

  @classmethod
  def of(cls, results: Results, task: str) -> Table:
    """Condenses the runs of a task."""
    seeds = sorted({run.seed for run in results.curves if run.task == task})
    rows: dict[tuple[str, int, float], dict[int, np.ndarray]] = {}
    for run, curves in results.curves.items():
      if run.task == task:
        rows.setdefault((run.method, run.lag, round(run.rate, 10)), {})[run.seed] = curves.astype(np.float32)
    accuracy = np.full((len(rows), len(seeds)), np.nan, np.float32)
    for i, row in enumerate(rows.values()):
      for seed, curves in row.items():
        accuracy[i, seeds.index(seed)] = curves[CURVES.index("accuracy"), -LAST:].mean()
    means = [np.clip(np.mean(list(row.values()), axis=0), -6e4, 6e4) for row in rows.values()]
    return cls(list(rows), seeds, accuracy, np.array(means, np.float16))

  def save(self, file: pathlib.Path) -> None:
    """Writes the table."""
    method, lag, rate = (np.array(column) for column in zip(*self.configs, strict=True))
    columns = {"method": method, "lag": lag, "rate": rate, "seeds": np.array(self.seeds)}
    np.savez_compressed(file, accuracy=self.accuracy, curves=self.curves, **columns)  # type: ignore[arg-type]

  @classmethod
  def load(cls, file: pathlib.Path) -> Table:
    """Reads a table; one without a list of seeds has those from 0 on."""
    with np.load(file) as a:
      configs = zip(a["method"].tolist(), a["lag"].tolist(), a["rate"].tolist(), strict=True)
      seeds = a["seeds"].tolist() if "seeds" in a else list(range(a["accuracy"].shape[1]))
      return cls(list(configs), seeds, a["accuracy"], a["curves"])

  def rates(self, method: str, lag: int) -> dict[float, int]:
    """Returns the rows of a method at a lag by rate; a synchronous method has its rows at every lag."""
    lag = 0 if method.startswith("sync") else lag
    found = {rate: i for i, (name, k, rate) in enumerate(self.configs) if name == method and k == lag}
    return dict(sorted(found.items()))

  def best(self, method: str, lag: int, seeds: Iterable[int] | None = None) -> int | None:
    """Returns the row with the highest mean accuracy over the rates, on *seeds* (all by default); None without rows."""
    chosen = set(self.seeds if seeds is None else seeds)
    columns = [i for i, seed in enumerate(self.seeds) if seed in chosen]
    rows = [i for i in self.rates(method, lag).values() if not np.all(np.isnan(self.accuracy[i, columns]))]
    return max(rows, key=lambda i: np.nanmean(self.accuracy[i, columns])) if rows else None

  def at_edge(self, row: int) -> bool:
    """Returns whether a row has the lowest or highest rate of its method and lag, so that the best may lie beyond."""
    method, lag, rate = self.configs[row]
    rates = list(self.rates(method, lag))
    return rate in (rates[0], rates[-1])

  def difference(self, row: int, other: int, comparisons: int = 1) -> Interval:
    """Returns accuracy of *row* minus that of *other*, paired by seed, over the seeds that both have."""
    return interval(self.accuracy[row] - self.accuracy[other], comparisons)

  def lags(self) -> list[int]:
    """Returns the lags above 0."""
    return sorted({lag for _, lag, _ in self.configs if lag})

  def methods(self) -> list[str]:
    """Returns the methods with results, in the order of the groups."""
    present = {name for name, _, _ in self.configs}
    return [name for name in dict.fromkeys(name for group in GROUPS.values() for name in group) if name in present]


def choose_rate(table: Table, method: str, lag: int, seeds: Iterable[int] | None = None) -> float:
  """Returns the rate with the highest mean accuracy on *seeds*, all of the table by default.

  Raises:
    ValueError: if the table has no runs of the method at the lag on these seeds.
  """
  row = table.best(method, lag, seeds)
  if row is None:
    raise ValueError(f"there are no earlier runs of {method!r} at lag {lag} to choose a rate on; give the rates.")
  return table.configs[row][2]


def number(x: float, digits: int = 2) -> str:
  """Returns a number without the zero before its point."""
  return f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"


def measure(values: np.ndarray, digits: int = 2) -> str:
  """Returns mean ± half the 95 % interval as text; the mean alone for a single value."""
  got = interval(values)
  return number(got.mean, digits) + (f" ± {number(got.half, digits)}" if np.isfinite(got.half) else "")


def signed(got: Interval, digits: int = 3) -> str:
  """Returns a difference with its sign and interval as text."""
  sign = "−" if got.mean < 0 else "+"
  return f"{sign}{number(abs(got.mean), digits)} ± {number(got.half, digits)}"


def grid(header: list[str], rows: list[list[str]]) -> str:
  """Returns a table in Markdown."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)
