"""The condensed results of a sweep: accuracies by configuration and seed, compared seed by seed.

Two runs of one seed begin with the same warm start, prompts and random numbers, so differences are paired. A rate is
chosen on some seeds and reported on others: `choose_rate` takes the seeds to choose on.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection
from collections.abc import Iterable

import numpy as np

from experiments.reproductions._intervals import Interval
from experiments.reproductions._intervals import interval
from experiments.reproductions._lag_sweep_plan import GROUPS
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_plan import final_accuracy


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
  def of(cls, results: Results, task: str, among: Collection[int] | None = None) -> Table:
    """Condenses the runs of a task, on the seeds *among* or on all."""
    made = {run: curves for run, curves in results.curves.items() if run.task == task}
    if among is not None:
      made = {run: curves for run, curves in made.items() if run.seed in among}
    seeds = sorted({run.seed for run in made})
    rows: dict[tuple[str, int, float], dict[int, np.ndarray]] = {}
    for run, curves in made.items():
      rows.setdefault((run.method, run.lag, round(run.rate, 10)), {})[run.seed] = curves.astype(np.float32)
    accuracy = np.full((len(rows), len(seeds)), np.nan, np.float32)
    for i, row in enumerate(rows.values()):
      for seed, curves in row.items():
        accuracy[i, seeds.index(seed)] = final_accuracy(curves)
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

  def difference(self, row: int, other: int) -> Interval:
    """Returns the accuracy of *row* minus that of *other*, paired by seed, over the seeds that both have."""
    return interval(self.accuracy[row] - self.accuracy[other])

  def complete(self) -> Table:
    """Returns the table of the configurations that were run on every seed."""
    return self._at([i for i, values in enumerate(self.accuracy) if not np.isnan(values).any()])

  def among(self, methods: Collection[str]) -> Table:
    """Returns the table of some methods."""
    return self._at([i for i, (name, _, _) in enumerate(self.configs) if name in methods])

  def _at(self, rows: list[int]) -> Table:
    return Table([self.configs[i] for i in rows], self.seeds, self.accuracy[rows], self.curves[rows])

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


def rate_text(rate: float) -> str:
  """Returns a learning rate as text.

  >>> rate_text(2e-4), rate_text(1.6e-3)
  ('2e-4', '1.6e-3')
  """
  return f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")
