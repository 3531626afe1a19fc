"""The runs of the study of off-policy RLHF: what is measured of them, which are to be made, and which rate is chosen.

The learning rate of a method at an N is chosen on some seeds and reported on others, which were never looked at.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import pathlib
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple
from typing import cast

import numpy as np

from async_rl.learning import Method


class Cell(NamedTuple):
  """What is compared: a method at an N, the number of batches that are sampled at a time."""

  method: Method
  rounds: int


class Run(NamedTuple):
  """A run by its learning rate and seed."""

  method: Method
  rounds: int
  rate: float
  seed: int

  @property
  def cell(self) -> Cell:
    """Returns what it is a run of."""
    return Cell(self.method, self.rounds)

  @property
  def name(self) -> str:
    """Returns the name of its folder."""
    return f"{self.method}_n{self.rounds}_rate{self.rate:g}_seed{self.seed}"


class Look(NamedTuple):
  """Measurement of a run at a step, on held-out samples: true reward, reward of the reward model, KL to the start."""

  method: Method
  rounds: int
  rate: float
  seed: int
  step: int
  gold: float
  proxy: float
  kl: float

  @property
  def run(self) -> Run:
    """Returns the run."""
    return Run(*self[:4])


def read(file: pathlib.Path) -> list[Look]:
  """Returns the measurements in a csv file, none if there is no file."""
  if not file.exists():
    return []
  with open(file, newline="") as lines:
    return [
      Look(cast(Method, row["method"]), int(row["rounds"]), float(row["rate"]), int(row["seed"]), int(row["step"]),
           float(row["gold"]), float(row["proxy"]), float(row["kl"]))
      for row in csv.DictReader(lines)
    ]  # fmt: skip


def append(file: pathlib.Path, found: Iterable[Look]) -> None:
  """Adds measurements to a csv file, made if missing."""
  file.parent.mkdir(parents=True, exist_ok=True)
  begins = not file.exists()
  with open(file, "a", newline="") as lines:
    writer = csv.writer(lines, lineterminator="\n")
    if begins:
      writer.writerow(Look._fields)
    writer.writerows(
      [*look[:2], f"{look.rate:g}", *look[3:5], *(f"{value:.4f}" for value in look[5:])] for look in found
    )


def ends(found: Iterable[Look]) -> dict[Run, Look]:
  """Returns the last measurement of every finished run: those that reach the last step of all."""
  found = list(found)
  last = max((look.step for look in found), default=0)
  return {look.run: look for look in found if look.step == last}


def by_rate(found: Iterable[Look], cell: Cell, seeds: Collection[int]) -> dict[float, float]:
  """Returns the mean true reward at the end at every learning rate that was run on all *seeds*, in ascending order."""
  golds: dict[float, list[float]] = {}
  for run, look in ends(found).items():
    if run.cell == cell and run.seed in seeds:
      golds.setdefault(run.rate, []).append(look.gold)
  return {rate: float(np.mean(golds[rate])) for rate in sorted(golds) if len(golds[rate]) == len(seeds)}


@dataclasses.dataclass(frozen=True)
class Study:
  """The runs of the study.

  Attributes:
    methods: the methods.
    rounds: the values of N.
    rates: the learning rates that are tried for all, in ascending order, each the double of the one before.
    limits: the lowest and the highest rate that is tried where the best one lies at an edge.
    choosing: the seeds on which a rate is chosen.
    reported: the seeds on which the chosen rate is run, in order of urgency.
  """

  methods: Sequence[Method]
  rounds: Sequence[int]
  rates: Sequence[float]
  limits: tuple[float, float]
  choosing: Sequence[int]
  reported: Sequence[int]

  @property
  def cells(self) -> list[Cell]:
    """Returns what is compared."""
    return [Cell(method, n) for n, method in itertools.product(self.rounds, self.methods)]

  def rate(self, found: Iterable[Look], cell: Cell) -> tuple[list[float], float | None]:
    """Returns the rates to try so far, and the chosen one: `None` until all of them have been run.

    While the best rate lies at an edge and within the limits, the one beyond is tried, too.
    """
    rates, golds = list(self.rates), by_rate(found, cell, self.choosing)
    while all(rate in golds for rate in rates):
      best = max(rates, key=lambda rate: golds[rate])
      if best == rates[0] and best / 2 >= self.limits[0]:
        rates.insert(0, best / 2)
      elif best == rates[-1] and best * 2 <= self.limits[1]:
        rates.append(best * 2)
      else:
        return rates, best
    return rates, None

  def left(self, found: Iterable[Look]) -> list[Run]:
    """Returns the runs that are not finished and can be begun by what is known, the most urgent first."""
    found = list(found)
    finished = ends(found)
    tried = {cell: self.rate(found, cell) for cell in self.cells}
    most = max(len(rates) for rates, _ in tried.values())
    runs = [
      Run(*cell, rates[i], seed)
      for i, seed, (cell, (rates, _)) in itertools.product(range(most), self.choosing, tried.items())
      if i < len(rates)
    ]
    runs += [
      Run(*cell, best, seed)
      for seed, (cell, (_, best)) in itertools.product(self.reported, tried.items())
      if best is not None
    ]
    return [run for run in runs if run not in finished]

  def reports(self, found: Iterable[Look]) -> list[Look]:
    """Returns the measurements at the chosen rates on the seeds that are finished for all methods and N."""
    found = list(found)
    finished = ends(found)
    rates = {cell: self.rate(found, cell)[1] for cell in self.cells}
    seeds = {
      seed
      for seed in self.reported
      if all(rate is not None and Run(*cell, rate, seed) in finished for cell, rate in rates.items())
    }
    return [look for look in found if look.seed in seeds and look.rate == rates[look.run.cell]]
