"""Statistics of how easy or hard the prompts of a data set are."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np


def quantiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
  """Returns mean, smallest, median, 90th percentile and largest of `values`; nothing without values."""
  if not len(values):
    return {}
  low, middle, high, top = np.quantile(np.asarray(values, np.float64), [0, 0.5, 0.9, 1])
  return {
    "mean": float(np.mean(values)),
    "min": float(low),
    "p50": float(middle),
    "p90": float(high),
    "max": float(top),
  }


class Difficulty:
  """Mean reward and completion length per prompt, over all groups seen.

  One for the groups submitted and one for the groups trained show whether slow or hard prompts go missing.
  """

  def __init__(self) -> None:
    self._sums: dict[int, np.ndarray] = collections.defaultdict(lambda: np.zeros(3))

  def add(self, prompt_id: int, rewards: Sequence[float], lengths: Sequence[int]) -> None:
    """Counts one group: its K rewards and its K completion lengths in tokens."""
    self._sums[prompt_id] += (len(rewards), np.sum(rewards), np.sum(lengths))

  def report(self) -> dict[str, float]:
    """Returns the number of prompts, and quantiles over prompts of their mean reward and of their mean length."""
    counts, rewards, lengths = np.array(list(self._sums.values())).reshape(-1, 3).T
    result = {"prompts": float(len(counts))}
    for name, sums in (("reward", rewards), ("length", lengths)):
      result |= {f"{name}_{key}": value for key, value in quantiles(sums / counts).items()}
    return result
