"""Tables and the figure of the study of off-policy RLHF."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.reproductions import _async_rlhf_plan as plans
from experiments.reproductions._async_rlhf_plan import Look
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import interval
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._intervals import verdict


class Ends:
  """The last measurements of all runs, of which each method has one learning rate at each N.

  Args:
    found: the measurements of runs.

  Attributes:
    methods: the methods, in the order in which they appear.
    rounds: the values of N, in ascending order.
    seeds: the seeds, in ascending order.
    step: the last step.
  """

  def __init__(self, found: list[Look]):
    self.step = max(look.step for look in found)
    self._ends: dict[tuple[str, int, int], Look]
    self._ends = {(look.method, look.rounds, look.seed): look for look in plans.ends(found).values()}
    self.methods = sorted({look.method for look in found})
    self.rounds = sorted({look.rounds for look in found})
    self.seeds = sorted({look.seed for look in found})

  def values(self, method: str, rounds: int, field: str = "gold") -> np.ndarray:
    """Returns a field of every seed, NaN where there is no finished run, [S]."""
    looks = [self._ends.get((method, rounds, seed)) for seed in self.seeds]
    return np.array([np.nan if look is None else getattr(look, field) for look in looks])

  def rows(self, text: Callable[[str, int], str]) -> str:
    """Returns a table with a row per method and what `text` says of it at each N."""
    rows = [[method, *(text(method, n) for n in self.rounds)] for method in self.methods]
    return grid(["method", *(f"N = {n}" for n in self.rounds)], rows)


def counts(found: list[Look], study: plans.Study) -> str:
  """Returns what the tables hold and with how many comparisons, as a sentence."""
  runs, ends = plans.ends(found), Ends(study.reports(found))
  tried = sum(run.seed in study.choosing for run in runs)
  reported = len(ends.methods) * len(ends.rounds) * len(ends.seeds)
  more, rivals = len(ends.rounds) - 1, len(ends.methods) - 1
  comparisons = len(ends.methods) * more + rivals * more + rivals * len(ends.rounds)
  return (
    f"{len(runs)} runs: {tried} on seeds {study.choosing[0]} to {study.choosing[-1]}, on which rates were chosen;"
    f" {reported} on {ends.seeds[0]} to {ends.seeds[-1]}, which are reported; {len(runs) - tried - reported} on seeds"
    f" that were not finished for all, which are left out. {comparisons} comparisons."
  )


def table(found: list[Look]) -> str:
  """Returns a row per method: true reward at the end with its 95 % interval over seeds, and the mean KL."""
  ends = Ends(found)

  def text(method: str, n: int) -> str:
    gold, kl = ends.values(method, n), ends.values(method, n, "kl")
    return "" if np.isnan(gold).all() else f"{measure(gold, 3)}, KL {np.nanmean(kl):.1f}"

  return ends.rows(text)


def proxies(found: list[Look]) -> str:
  """Returns a row per method: the reward of the reward model at the end with its 95 % interval over seeds."""
  ends = Ends(found)
  return ends.rows(lambda method, n: measure(ends.values(method, n, "proxy")))


def rates(found: list[Look], study: plans.Study) -> str:
  """Returns a row per method and N: mean true reward on the choosing seeds at each rate, the chosen one in bold."""
  chosen = {cell: (plans.by_rate(found, cell, study.choosing), study.rate(found, cell)[1]) for cell in study.cells}
  columns = sorted({rate for golds, _ in chosen.values() for rate in golds})
  rows = []
  for cell, (golds, best) in sorted(chosen.items()):
    texts = {rate: f"**{number(gold, 3)}**" if rate == best else number(gold, 3) for rate, gold in golds.items()}
    edge = "yes" if best is not None and best in (min(golds), max(golds)) else ""
    rows.append([cell.method, str(cell.rounds), *(texts.get(rate, "") for rate in columns), edge])
  return grid(["method", "N", *(rate_text(rate) for rate in columns), "at an edge"], rows)


def rate_text(rate: float) -> str:
  """Returns a learning rate as text.

  >>> rate_text(2.5e-4), rate_text(1e-3)
  ('2.5e-4', '1e-3')
  """
  digits, exponent = f"{rate:.3e}".split("e")
  return f"{float(digits):g}e{int(exponent)}"


def differences_to_one_round(found: list[Look]) -> str:
  """Returns a row per method: true reward at every larger N minus that at the smallest, paired by seed."""
  ends = Ends(found)
  first, *more = ends.rounds
  rows = []
  for method in ends.methods:
    differences = [ends.values(method, n) - ends.values(method, first) for n in more]
    rows.append([method, *(verdict(values, len(ends.methods) * len(more)) for values in differences)])
  return grid([f"minus N = {first}", *(f"N = {n}" for n in more)], rows)


def differences_to_method(found: list[Look], other: str) -> str:
  """Returns a row per method: true reward minus that of the method *other* at the same N, paired by seed."""
  ends = Ends(found)
  rivals = [method for method in ends.methods if method != other]
  rows = []
  for method in rivals:
    differences = [ends.values(method, n) - ends.values(other, n) for n in ends.rounds]
    rows.append([method, *(verdict(values, len(rivals) * len(ends.rounds)) for values in differences)])
  return grid([f"minus {other}", *(f"N = {n}" for n in ends.rounds)], rows)


def losses_to_method(found: list[Look], other: str) -> str:
  """Returns a row per method: what a larger N changes minus what it changes for the method *other*, paired by seed."""
  ends = Ends(found)
  first, *more = ends.rounds
  rivals = [method for method in ends.methods if method != other]
  change = lambda method, n: ends.values(method, n) - ends.values(method, first)
  rows = []
  for method in rivals:
    differences = [change(method, n) - change(other, n) for n in more]
    rows.append([method, *(verdict(values, len(rivals) * len(more)) for values in differences)])
  return grid([f"change from N = {first} minus that of {other}", *(f"N = {n}" for n in more)], rows)


def over_optimization(found: list[Look], study: plans.Study) -> str:
  """Returns a row per N: true reward, reward of the reward model and KL at each rate, mean of methods and seeds.

  Of the seeds for choosing, at the rates that are tried for all.
  """
  ends = plans.ends(found)
  rows = []
  for n in study.rounds:
    texts = []
    for rate in study.rates:
      runs = [plans.Run(method, n, rate, seed) for method in study.methods for seed in study.choosing]
      gold, proxy, kl = np.nanmean([ends[run][-3:] for run in runs], axis=0)
      texts.append(f"{number(gold, 3)}, {number(proxy)}, {kl:.1f}")
    rows.append([str(n), *texts])
  return grid(["N", *(rate_text(rate) for rate in study.rates)], rows)


def draw(found: list[Look], study: plans.Study, file: pathlib.Path) -> None:
  """Draws true reward against N; at the smallest and the largest N also against rate, and both rewards against KL."""
  import matplotlib.pyplot as plt

  reported = study.reports(found)
  ends = Ends(reported)
  figure = plt.figure(figsize=(15, 7), layout="constrained")
  parts: Any = figure.subfigures(1, 2, width_ratios=(1, 2.5))
  left, right = parts
  axis = left.subplots()
  for i, method in enumerate(ends.methods):
    shift = 1.05 ** (i - (len(ends.methods) - 1) / 2)  # beside each other
    means, halves, _ = zip(*(interval(ends.values(method, n)) for n in ends.rounds), strict=True)
    places = [n * shift for n in ends.rounds]
    axis.errorbar(places, means, halves, fmt="o-", color=f"C{i}", markersize=4, capsize=3, label=method)
  axis.set(xscale="log", xlabel="N, batches sampled at a time", ylabel="true reward")
  axis.set_title(f"chosen rates, {len(ends.seeds)} seeds, 95 %")
  _ticks(axis, dict(zip(ends.rounds, map(str, ends.rounds), strict=True)))
  axis.legend()
  panels = right.subplots(2, 3, sharex="col", sharey="col")
  for n, (by_rate, gold, proxy) in zip((ends.rounds[0], ends.rounds[-1]), panels, strict=True):
    by_rate.set_title(f"N = {n}, {len(study.choosing)} other seeds")
    _draw_rates(by_rate, found, study, [plans.Cell(method, n) for method in ends.methods])
    way = [look for look in reported if look.rounds == n]
    tried = [look for run, look in plans.ends(found).items() if run.rounds == n and run.seed in study.choosing]
    for axis, field, name in ((gold, "gold", "true reward"), (proxy, "proxy", "reward of the reward model")):
      axis.set(title=f"N = {n}; rings: all rates", ylabel=name)
      _draw_against_kl(axis, ends.methods, way, tried, field)
  for axis, name in zip(panels[1], ("learning rate", *["KL to the supervised policy"] * 2), strict=True):
    axis.set_xlabel(name)
  figure.savefig(file, dpi=100)
  plt.close(figure)


def _draw_rates(axis: Any, found: list[Look], study: plans.Study, cells: Sequence[plans.Cell]) -> None:
  """Draws the true reward of every cell against the learning rate, on the seeds for choosing."""
  golds = [plans.by_rate(found, cell, study.choosing) for cell in cells]
  for i, line in enumerate(golds):
    axis.plot(line.keys(), line.values(), "o-", color=f"C{i}", markersize=4)
  axis.set(xscale="log", ylabel="true reward")
  _ticks(axis, {rate: rate_text(rate) for rate in sorted(set().union(*golds))})


def _draw_against_kl(axis: Any, methods: Sequence[str], way: list[Look], tried: list[Look], field: str) -> None:
  """Draws a reward against the KL: the means of each step on the *way* as lines, all that were *tried* as rings."""
  for i, method in enumerate(methods):
    steps = sorted({look.step for look in way})
    at = [[look for look in way if (look.method, look.step) == (method, step)] for step in steps]
    means = [np.mean([(look.kl, getattr(look, field)) for look in looks], axis=0) for looks in at]
    axis.plot(*np.transpose(means), "o-", color=f"C{i}", markersize=4)
    rings = [(look.kl, getattr(look, field)) for look in tried if look.method == method]
    axis.plot(*np.transpose(rings), "o", color=f"C{i}", fillstyle="none")
  axis.set_xscale("function", functions=(lambda kl: np.sqrt(np.maximum(kl, 0.0)), np.square))
  _ticks(axis, {kl: str(kl) for kl in (0, 1, 2, 4, 8, 16)})


def _ticks(axis: Any, texts: Mapping[float, str]) -> None:
  """Puts these ticks alone on the x-axis."""
  axis.set_xticks(list(texts), texts.values())
  axis.minorticks_off()
