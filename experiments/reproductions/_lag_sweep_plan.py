"""Names the runs of a sweep: plans of runs to make, and the file of those that were made."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.reproductions import _lag_sweep_knobs as sweep_knobs
from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions import _lag_sweep_tasks as problems
from experiments.reproductions._lag_sweep_run import CURVES
from experiments.reproductions._lag_sweep_run import MAX_LAG

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4)
#: Probes at the end of a run whose mean is its accuracy: 50 updates.
LAST = 5

#: Gives the rate to use for (task, method, lag), chosen on earlier seeds.
ChooseRate = Callable[[str, str, int], float]

GROUPS: dict[str, Collection[str]] = {
  "sync": methods.SYNC,
  "sync_only": ("sync",),
  "published": methods.PUBLISHED,
  "ahead": methods.AHEAD,
  "candidates": methods.CANDIDATES,
  "second": methods.SECOND,
  "sync_exact": methods.SYNC_EXACT,
  "third": methods.THIRD,
  "momentum": methods.MOMENTUM,
  "momentum_exact": methods.MOMENTUM_EXACT,
  "token_weights": methods.TOKEN_WEIGHTS,
  "estr": methods.ESTR,
  "trm": methods.TRM,
  "centered_scores": methods.CENTERED_SCORES,
  "ingredients": methods.INGREDIENTS,
  "ingredients_exact": methods.INGREDIENTS_EXACT,
  "parts": methods.PARTS,
  "less_momentum": methods.LESS_MOMENTUM,
  "reaching": methods.REACHING,
  "topr_reaching_exact": methods.TOPR_REACHING_EXACT,
  "reaching_exact": methods.REACHING_EXACT,
  "sync_falling": methods.SYNC_FALLING,
  "topr_falling": methods.TOPR_FALLING,
  "sequence_falling": methods.SEQUENCE_FALLING,
  "others_falling": methods.OTHERS_FALLING,
  "falling_exact": methods.FALLING_EXACT,
  "exact": methods.EXACT,
  "ramped": methods.RAMPED,
  "controls": methods.CONTROLS,
  **methods.GAC_MAP,
  **methods.GAC_ON,
  **methods.GAC_CONTROLS,
}
#: The tasks: those of the sweep, and the toy of `laboratory`.
TASKS = (*problems.SETTINGS, "words")


class Run(NamedTuple):
  """Identifies a run. *rate* is the nominal one; a control may train with another."""

  task: str
  method: str
  lag: int
  rate: float
  seed: int


def final_accuracy(curves: np.ndarray) -> float:
  """Returns the accuracy of a run by its curves [len(CURVES), probes]."""
  return float(np.mean(curves[CURVES.index("accuracy"), -LAST:], dtype=np.float32))


class Results:
  """Curves of finished runs, float16 [len(CURVES), probes] each, in one file a task.

  Args:
    folder: the folder with the files `runs_TASK.npz`; it need not exist yet.

  Attributes:
    curves: the curves by run.
    starts: the checksum of the warm start by (task, seed). All runs of a seed share one, so they may be paired.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.curves: dict[Run, np.ndarray] = {}
    self.starts: dict[tuple[str, int], int] = {}
    for file in sorted(folder.glob("runs_*.npz")):
      task = file.stem.removeprefix("runs_")
      with np.load(file) as arrays:
        keys = zip(*(arrays[name].tolist() for name in Run._fields[1:]))
        for key, curves, start in zip(keys, arrays["curves"], arrays["start"].tolist(), strict=True):
          run = Run(task, *key)
          self.curves[run] = curves
          self.starts[task, run.seed] = start

  def check_starts(self, task: str, checksums: dict[int, int]) -> None:
    """Refuses warm starts, given by the checksum of each seed, that differ from those of the runs already made.

    Raises:
      ValueError: if a seed has runs from another warm start, which would not be paired with new ones.
    """
    changed = [seed for seed, start in checksums.items() if self.starts.get((task, seed), start) != start]
    if changed:
      raise ValueError(
        f"{self.folder} has runs of seeds {changed} of {task} from other warm starts, with which new runs would not be"
        f" paired; restore its warm_{task}.npz, or give another --folder."
      )

  def add(self, runs: list[Run], curves: dict[str, np.ndarray], checksums: dict[int, int]) -> None:
    """Adds runs with their curves [len(runs), probes] and the checksum of the warm start of each seed."""
    stacked = np.stack([curves[name] for name in CURVES], axis=1)
    for run, values in zip(runs, np.clip(np.nan_to_num(stacked), -6e4, 6e4).astype(np.float16), strict=True):
      self.check_starts(run.task, {run.seed: checksums[run.seed]})
      self.curves[run] = values
      self.starts[run.task, run.seed] = checksums[run.seed]

  def save(self, task: str) -> None:
    """Writes the runs of a task."""
    runs = [run for run in self.curves if run.task == task]
    columns = {name: np.array([getattr(run, name) for run in runs]) for name in Run._fields[1:]}
    columns["start"] = np.array([self.starts[task, run.seed] for run in runs], np.uint32)
    columns["curves"] = np.stack([self.curves[run] for run in runs])
    file = self.folder / f"runs_{task}.npz"
    part = file.with_name(f"part_{task}.npz")
    np.savez_compressed(part, **columns)  # type: ignore[arg-type]
    os.replace(part, file)

  def best(self, task: str, names: Collection[str], lag: int, seeds: Collection[int]) -> tuple[str, float] | None:
    """Returns the method and rate of the highest mean accuracy on other seeds than *seeds*; None without runs."""
    found: dict[tuple[str, float], list[float]] = {}
    for run, curves in self.curves.items():
      if (run.task, run.lag) == (task, lag) and run.method in names and run.seed not in seeds:
        found.setdefault((run.method, run.rate), []).append(final_accuracy(curves))
    return max(found, key=lambda config: float(np.mean(found[config]))) if found else None

  def mean(self, run: Run, curve: str) -> float | None:
    """Returns the mean of a curve over a whole run; None if the run was not made."""
    return float(np.mean(self.curves[run][CURVES.index(curve)], dtype=np.float32)) if run in self.curves else None


def _measured(name: str) -> str:
  """Returns the method that a control is matched to; any other method itself."""
  return methods.MATCHED[name][0] if name in methods.MATCHED else name


@dataclasses.dataclass(frozen=True)
class Item:
  """Part of a plan: runs of one task in one program.

  Attributes:
    task: the name of a task of `SETTINGS`.
    names: the methods.
    lags: the lags of each method.
    seeds: the seeds of each configuration.
    rates: the nominal learning rates; none for the one that *choose* gives.
    choose: the function that chooses a rate where none is given.
    tried: whether to take the best rate of this sweep's own runs on other seeds, made before.
    best: whether to take only the best method at each lag, by the same runs.
  """

  task: str
  names: tuple[str, ...]
  lags: tuple[int, ...]
  seeds: tuple[int, ...]
  rates: tuple[float, ...] = RATES
  choose: ChooseRate | None = None
  tried: bool = False
  best: bool = False

  @property
  def exact(self) -> bool:
    """Whether the runs need the exact norms of trajectories, which is a program of its own."""
    return self.names[0] in methods.EXACT_NORMS

  @property
  def controls(self) -> bool:
    """Whether there are controls among the methods."""
    return any(name in methods.MATCHED for name in self.names)

  @property
  def depends(self) -> bool:
    """Whether other runs must have been made before."""
    return self.tried or self.controls

  def runs(self, results: Results) -> dict[Run, sweep_knobs.Knobs]:
    """Returns the runs still to be made with their knobs, without those whose measurement is missing."""
    return {run: values for run, values in self._missing(results) if values is not None}

  def waiting(self, results: Results) -> int:
    """Returns the number of runs that cannot be made before the ones that they are matched to."""
    return sum(values is None for _, values in self._missing(results))

  def rates_of(self, name: str, lag: int, results: Results | None = None) -> tuple[float, ...]:
    """Returns the rates of a method at a lag; a control has that of the method it is matched to."""
    measured = _measured(name)
    if self.tried:
      among = {_measured(other) for other in self.names} if self.best else {measured}
      best = results and results.best(self.task, among, lag, self.seeds)
      return (best[1],) if best and best[0] == measured else ()
    return (self.choose(self.task, measured, lag),) if self.choose else self.rates

  def _missing(self, results: Results) -> Iterator[tuple[Run, sweep_knobs.Knobs | None]]:
    for lag, name in itertools.product(self.lags, self.names):
      for rate, seed in itertools.product(self.rates_of(name, lag, results), self.seeds):
        run = Run(self.task, name, lag, rate, seed)
        if run not in results.curves:
          yield run, _knobs(run, results)


FORM = "TASK/GROUP[:LAG,...][@SEEDS|@FIRST-LAST][%RATE,...|%chosen|%tried|%best]"


def parse(text: str, choose: ChooseRate | None = None) -> Item:
  """Returns the item of a plan from its text; the name of a method may stand for a group.

  Args:
    text: the item as `FORM` has it: five seeds from 0 on if none are given, every rate of `RATES` if none is given.
    choose: the function behind `%chosen`.

  >>> parse("ch4/PPO + GAC:10,32@3").lags
  (10, 32)
  >>> parse("ch4/PPO:10@1000-1002%2e-4").seeds
  (1000, 1001, 1002)

  Raises:
    ValueError: if it does not read like that.
  """
  rate = r"\d*\.?\d+(?:e-?\d+)?"
  seeds = r"\d+|\d+-\d+"
  match = re.fullmatch(
    rf"(\w+)/([^:@%]+)(?::(\d+(?:,\d+)*))?(?:@({seeds}))?(?:%(chosen|tried|best|{rate}(?:,{rate})*))?", text
  )
  if not match or match[1] not in TASKS:
    raise ValueError(f"a plan is {FORM} with a task of {list(TASKS)}, got {text!r}")
  task, group = match[1], match[2]
  if group not in GROUPS and group not in methods.METHODS:
    raise ValueError(f"there is no group or method {group!r}; groups: {list(GROUPS)}; {list(methods.METHODS)}")
  lags = tuple(map(int, (match[3] or "0").split(",")))
  if max(lags) > MAX_LAG:
    raise ValueError(f"lags must be at most {MAX_LAG}, got {text!r}")
  first, _, last = (match[4] or "5").rpartition("-")
  numbers = range(int(first), int(last) + 1) if first else range(int(last))
  if not numbers:
    raise ValueError(f"a plan needs at least one seed, got {text!r}")
  names = tuple(GROUPS.get(group, [group]))
  if match[5] == "chosen":
    if choose is None:
      raise ValueError(f"there are no earlier seeds to choose a rate on, got {text!r}; give the rates.")
    return Item(task, names, lags, tuple(numbers), (), choose)
  if match[5] in ("tried", "best"):
    return Item(task, names, lags, tuple(numbers), (), tried=True, best=match[5] == "best")
  rates = tuple(map(float, match[5].split(","))) if match[5] else RATES
  if not min(rates):
    raise ValueError(f"a plan needs rates above 0, got {text!r}")
  return Item(task, names, lags, tuple(numbers), rates)


def read(file: pathlib.Path) -> list[str]:
  """Returns the items of a plan's file: one a line, without comments (from # on) and empty lines."""
  lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
  return [line for line in lines if line]


def seeds_of(items: Iterable[Item], task: str) -> set[int]:
  """Returns the seeds of all items of a task."""
  return {seed for item in items if item.task == task for seed in item.seeds}


def _knobs(run: Run, results: Results) -> sweep_knobs.Knobs | None:
  knobs = {"seed": run.seed, "lag": run.lag, "rate": run.rate} | methods.METHODS[run.method]
  if run.method in methods.MATCHED:
    measured, curve, knob, _ = methods.MATCHED[run.method]
    value = results.mean(run._replace(method=measured), curve)
    if value is None:
      return None
    knobs[knob] = value * run.rate if knob == "rate" else value
  return sweep_knobs.Knobs(**knobs)
