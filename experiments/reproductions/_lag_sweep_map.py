"""Says what the map of GAC shows: which thresholds were chosen on some seeds, and what they do on others."""

from __future__ import annotations

import numpy as np

from experiments.reproductions import _lag_sweep_gac as gac
from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._intervals import verdict
from experiments.reproductions._lag_sweep_run import CURVES
from experiments.reproductions._lag_sweep_table import Table
from experiments.reproductions._lag_sweep_table import rate_text


def _signed(x: float) -> str:
  return ("−" if x < 0 else "+") + number(abs(x), 3)


def _curve(table: Table, row: int, name: str) -> np.ndarray:
  return table.curves[row, CURVES.index(name)].astype(np.float32)


def cosines(table: Table, lags: tuple[int, ...]) -> str:
  """Returns a row per correction and lag, at its best rate: the cosine of consecutive gradients, on average over a run
  and in the tenth of the run in which it is highest."""
  rows = []
  for base, lag in [("sync", 0), *((base, lag) for base in gac.BASES for lag in lags)]:
    row = table.best(base, lag)
    assert row is not None, f"there are no runs of {base} at lag {lag}"
    curve = _curve(table, row, "cosine")
    highest = max(part.mean() for part in np.array_split(curve, 10))
    rate = rate_text(table.configs[row][2]) + "*" * table.at_edge(row)
    rows.append([base, str(lag), rate, number(float(curve.mean())), number(float(highest))])
  return grid(["method", "lag", "best rate", "mean cosine", "highest tenth"], rows)


class Map:
  """The map of GAC on one task.

  Args:
    tried: the runs on the seeds that thresholds, choices and rates are chosen on.
    fresh: the runs on other seeds.

  Attributes:
    comparisons: the number of differences of `differences`.
  """

  def __init__(self, tried: Table, fresh: Table):
    self.tried, self.fresh, self.lags = tried, fresh, tried.lags()
    present = set(fresh.methods())
    self.bases = [base for base in gac.BASES if present & set(methods.GAC_ON[f"GAC on {base}"])]
    self.comparisons = 2 * len(self.bases) * len(self.lags)

  def _best(self, names: list[str], lag: int) -> int:
    """Returns the row of the most accurate of some methods, over all rates, on the seeds that are chosen on."""
    rows = [row for name in names if (row := self.tried.best(name, lag)) is not None]
    return max(rows, key=lambda row: float(np.nanmean(self.tried.accuracy[row])))

  def _fresh(self, method: str, lag: int, rate: float) -> int:
    return self.fresh.rates(method, lag)[rate]

  def counts(self) -> str:
    """Returns the number of runs and comparisons, as a sentence."""
    tried, fresh = (int(np.sum(~np.isnan(table.accuracy))) for table in (self.tried, self.fresh))
    seeds = self.fresh.seeds
    return (
      f"{tried} runs on {len(self.tried.seeds)} seeds to choose on, {fresh} on {len(seeds)} others, {seeds[0]} to"
      f" {seeds[-1]}; {self.comparisons} comparisons."
    )

  def thresholds(self) -> str:
    """Returns what GAC at its best rate differs from the correction at its best rate, by lower and upper threshold, on
    the seeds that are chosen on; in brackets the share of the steps that it skipped."""
    rows = []
    for base in self.bases:
      for lag in self.lags:
        own = float(np.nanmean(self.tried.accuracy[self._best([base], lag)]))
        cells = []
        for name in gac.thresholds(base):
          row = self._best([name], lag)
          skipped = float(_curve(self.tried, row, "skipped").mean())
          difference = float(np.nanmean(self.tried.accuracy[row])) - own
          cells.append(f"{_signed(difference)} ({number(skipped)})")
        rows.append([base, str(lag), *cells])
    header = [name.rpartition(" ")[2] for name in gac.thresholds(self.bases[0])]
    return grid(["correction", "lag", *header], rows)

  def choices(self) -> str:
    """Returns the mean difference of every other choice to the default one, over the configurations that have both
    (correction, lag, thresholds and rate), on the seeds that are chosen on."""
    found: dict[str, list[np.ndarray]] = {}
    for base in self.bases:
      for name in gac.choices(base):
        default, _, choice = name.partition(", ")
        for lag in self.lags:
          others = self.tried.rates(default, lag)
          for rate, row in self.tried.rates(name, lag).items():
            if rate in others:
              found.setdefault(choice, []).append(self.tried.accuracy[row] - self.tried.accuracy[others[rate]])
    rows = [[choice, str(len(values)), _signed(float(np.nanmean(values)))] for choice, values in found.items()]
    return grid(["choice", "configurations", "minus the default choice"], rows)

  def differences(self) -> str:
    """Returns a row per correction and lag: GAC as chosen against the correction alone, and against random skips.

    Beside it stands what it was chosen for: its difference to the correction alone on the seeds that are chosen on.
    """
    rows = []
    for base in self.bases:
      for lag in self.lags:
        own = self._best([base], lag)
        _, _, own_rate = self.tried.configs[own]
        best = self._best(list(methods.GAC_ON[f"GAC on {base}"]), lag)
        name, _, rate = self.tried.configs[best]
        row = self._fresh(name, lag, rate)
        accuracy = self.fresh.accuracy
        alone = accuracy[self._fresh(base, lag, own_rate)]
        random = accuracy[self._fresh(gac.at_random(name), lag, rate)]
        rows.append(
          [
            base,
            str(lag),
            f"{measure(alone, 3)} at {rate_text(own_rate)}" + "*" * self.tried.at_edge(own),
            name.removeprefix(f"{base} + "),
            _signed(float(np.nanmean(self.tried.accuracy[best]) - np.nanmean(self.tried.accuracy[own]))),
            f"{measure(accuracy[row], 3)} at {rate_text(rate)}" + "*" * self.tried.at_edge(best),
            number(float(_curve(self.fresh, row, "skipped").mean())),
            verdict(accuracy[row] - alone, self.comparisons),
            verdict(accuracy[row] - random, self.comparisons),
          ]
        )
    chosen = ["chosen", "chosen for", "with GAC", "skipped"]
    return grid(["correction", "lag", "alone", *chosen, "minus alone", "minus random skips"], rows)
