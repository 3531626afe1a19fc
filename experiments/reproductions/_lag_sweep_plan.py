"""Which runs to make, and the file of those that were made."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Collection
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions import _lag_sweep_tasks as problems
from experiments.reproductions._lag_sweep_run import CURVES
from experiments.reproductions._lag_sweep_run import MAX_LAG

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4)

GROUPS: dict[str, Collection[str]] = {
  "sync": methods.SYNC,
  "published": methods.PUBLISHED,
  "ahead": methods.AHEAD,
  "candidates": methods.CANDIDATES,
  "second": methods.SECOND,
  "sync_exact": methods.SYNC_EXACT,
  "third": methods.THIRD,
  "exact": methods.EXACT,
  "ramped": methods.RAMPED,
  "controls": methods.CONTROLS,
}


class Run(NamedTuple):
  """What identifies a run. *rate* is the nominal one; a control may train with another."""

  task: str
  method: str
  lag: int
  rate: float
  seed: int


class Results:
  """Curves of finished runs, float16 [len(CURVES), probes] each, in one file a task."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.curves: dict[Run, np.ndarray] = {}
    for file in sorted(folder.glob("runs_*.npz")):
      with np.load(file) as arrays:
        keys = zip(*(arrays[name].tolist() for name in Run._fields[1:]))
        for key, curves in zip(keys, arrays["curves"]):
          self.curves[Run(file.stem.removeprefix("runs_"), *key)] = curves

  def add(self, runs: list[Run], curves: dict[str, np.ndarray]) -> None:
    stacked = np.stack([curves[name] for name in CURVES], axis=1)
    for run, values in zip(runs, np.clip(np.nan_to_num(stacked), -6e4, 6e4).astype(np.float16), strict=True):
      self.curves[run] = values

  def save(self, task: str) -> None:
    runs = [run for run in self.curves if run.task == task]
    columns = {name: np.array([getattr(run, name) for run in runs]) for name in Run._fields[1:]}
    file = self.folder / f"runs_{task}.npz"
    part = file.with_name(f"part_{task}.npz")
    np.savez_compressed(part, curves=np.stack([self.curves[run] for run in runs]), **columns)  # type: ignore[arg-type]
    os.replace(part, file)

  def mean(self, run: Run, curve: str) -> float | None:
    """The mean of a curve over a whole run; None if it was not made."""
    return float(np.mean(self.curves[run][CURVES.index(curve)], dtype=np.float32)) if run in self.curves else None


@dataclasses.dataclass(frozen=True)
class Item:
  """Part of a plan: runs of one task in one program.

  Attributes:
    task: of `SETTINGS`.
    names: methods.
    lags: for each method.
    seeds: as many, from 0 on.
    rates: nominal learning rates.
  """

  task: str
  names: tuple[str, ...]
  lags: tuple[int, ...]
  seeds: int
  rates: tuple[float, ...] = RATES

  @property
  def exact(self) -> bool:
    return self.names[0] in methods.EXACT | methods.SYNC_EXACT | methods.THIRD

  @property
  def depends(self) -> bool:
    """Whether other runs must have been made before."""
    return any(name in methods.CONTROLS for name in self.names)

  def runs(self, results: Results) -> dict[Run, methods.Knobs]:
    """The runs still to be made with their knobs; without those whose measurement is missing."""
    return {run: values for run, values in self._missing(results) if values is not None}

  def waiting(self, results: Results) -> int:
    """How many runs cannot be made before the ones that they are matched to."""
    return sum(values is None for _, values in self._missing(results))

  def _missing(self, results: Results) -> Iterator[tuple[Run, methods.Knobs | None]]:
    for lag, name, rate, seed in itertools.product(self.lags, self.names, self.rates, range(self.seeds)):
      run = Run(self.task, name, lag, rate, seed)
      if run not in results.curves:
        yield run, _knobs(run, results)


def parse(text: str) -> Item:
  """An item of a plan from TASK/GROUP[:LAG,...][@SEEDS][%RATE,...]; the name of a method may stand for a group.

  >>> parse("ch4/PPO + GAC:10,32@3").lags
  (10, 32)

  Raises:
    ValueError: if it does not read like that.
  """
  rate = r"\d*\.?\d+(?:e-?\d+)?"
  match = re.fullmatch(rf"(\w+)/([^:@%]+)(?::(\d+(?:,\d+)*))?(?:@(\d+))?(?:%({rate}(?:,{rate})*))?", text)
  if not match or match[1] not in problems.SETTINGS:
    form = "TASK/GROUP[:LAG,...][@SEEDS][%RATE,...]"
    raise ValueError(f"a plan is {form} with a task of {list(problems.SETTINGS)}, got {text!r}")
  if match[2] not in GROUPS and match[2] not in methods.METHODS:
    raise ValueError(f"there is no group or method {match[2]!r}; groups: {list(GROUPS)}; {list(methods.METHODS)}")
  lags = tuple(map(int, (match[3] or "0").split(",")))
  if max(lags) > MAX_LAG:
    raise ValueError(f"lags must be at most {MAX_LAG}, got {text!r}")
  rates, seeds = tuple(map(float, match[5].split(","))) if match[5] else RATES, int(match[4] or 5)
  if not seeds or not min(rates):
    raise ValueError(f"a plan needs at least one seed and rates above 0, got {text!r}")
  return Item(match[1], tuple(GROUPS.get(match[2], [match[2]])), lags, seeds, rates)


def _knobs(run: Run, results: Results) -> methods.Knobs | None:
  knobs = {"seed": run.seed, "lag": run.lag, "rate": run.rate} | methods.METHODS[run.method]
  if run.method in methods.CONTROLS:
    measured, curve, knob, _ = methods.CONTROLS[run.method]
    value = results.mean(run._replace(method=measured), curve)
    if value is None:
      return None
    knobs[knob] = value * run.rate if knob == "rate" else value
  return methods.Knobs(**knobs)
