"""Tables and the figure of the study of off-policy RLHF."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.reproductions import _async_rlhf_plan as plans
from experiments.reproductions._async_rlhf_plan import Look
from experiments.reproductions._intervals import grid
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


def draw(found: list[Look], file: pathlib.Path) -> None:
  """Draws true reward and chosen rate against N, and both rewards against the KL, at the smallest and the largest N."""
  import matplotlib.pyplot as plt

  ends = Ends(found)
  figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
  for i, method in enumerate(ends.methods):
    color = f"C{i}"
    for n in ends.rounds:
      gold = ends.values(method, n)
      place = n * 1.06 ** (i - (len(ends.methods) - 1) / 2)  # beside each other
      axes[0, 0].plot([place] * len(gold), gold, ".", color=color, markersize=3)
    means = [np.nanmean(ends.values(method, n)) for n in ends.rounds]
    axes[0, 0].plot(ends.rounds, means, color=color, label=method)
    chosen = {look.rounds: look.rate for look in found if look.method == method}
    axes[1, 0].plot(ends.rounds, [chosen[n] * 1.03**i for n in ends.rounds], ".-", color=color)
    for column, n in ((1, ends.rounds[0]), (2, ends.rounds[-1])):
      for row, field in enumerate(("gold", "proxy")):
        way = [look for look in found if (look.method, look.rounds) == (method, n)]
        _draw_way(axes[row, column], way, field, color)
  title = f"after {ends.step} updates, {len(ends.seeds)} seeds"
  axes[0, 0].set(ylabel="true reward", title=title)
  axes[1, 0].set(yscale="log", xlabel="N, batches sampled at a time", ylabel="chosen learning rate")
  for axis in axes[:, 0]:
    axis.set(xscale="log")
    axis.set_xticks(ends.rounds, map(str, ends.rounds))
  axes[0, 0].legend(fontsize=8)
  for column, n in ((1, ends.rounds[0]), (2, ends.rounds[-1])):
    axes[0, column].set(title=f"on the way, N = {n}", ylabel="true reward")
    axes[1, column].set(ylabel="reward of the reward model", xlabel="KL to the supervised policy")
    axes[1, column].sharex(axes[0, column])
    axes[0, column].set(xscale="log")
  figure.savefig(file, dpi=100)
  plt.close(figure)


def _draw_way(axis: Any, looks: list[Look], field: str, color: str) -> None:
  """Draws a reward against the KL: every seed pale, and the means of each step."""
  for seed in {look.seed for look in looks}:
    way = sorted((look for look in looks if look.seed == seed), key=lambda look: look.step)
    axis.plot(_kls(way), [getattr(look, field) for look in way], color=color, linewidth=0.5, alpha=0.4)
  steps = sorted({look.step for look in looks})
  means = [[look for look in looks if look.step == step] for step in steps]
  kls = [np.mean(_kls(at_step)) for at_step in means]
  axis.plot(kls, [np.mean([getattr(look, field) for look in at_step]) for at_step in means], ".-", color=color)


def _kls(looks: list[Look]) -> list[float]:
  """Returns the KLs, those of the start moved onto a logarithmic axis."""
  return [max(look.kl, 1e-2) for look in looks]
