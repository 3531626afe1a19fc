"""Which prompts of a data set to use, and what is easy and what is hard in it."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.tasks._task import Prompts
from async_rl.types import Prompt


def usable(
  prompts: Sequence[Prompt], encode_prompt: Callable[[Any], Sequence[int]], max_tokens: int
) -> tuple[Prompts, dict[str, float]]:
  """Leaves out prompts that are too long, and repetitions of a prompt.

  Args:
    prompts: the prompts of a split.
    encode_prompt: of the tokenizer.
    max_tokens: the most tokens that a prompt may have.

  Returns:
    The others in their order, numbered anew, and the counts `kept`, `too_long` and `repeated` with the quantiles of
    the kept prompts' lengths in tokens.

  Raises:
    ValueError: if none is left.
  """
  kept, lengths, seen = [], [], set()
  counts = collections.Counter(kept=0, too_long=0, repeated=0)
  for i, prompt in enumerate(prompts):
    key = json.dumps(prompt.text, sort_keys=True)
    length = len(encode_prompt(prompt.text))
    reason = "repeated" if key in seen else "too_long" if length > max_tokens else "kept"
    counts[reason] += 1
    seen.add(key)
    if reason == "kept":
      kept.append(i)
      lengths.append(length)
  if not kept:
    raise ValueError(f"no prompt is left: {counts['too_long']} of {len(prompts)} are longer than {max_tokens} tokens")
  chosen = Prompts(kept, lambda id, i: prompts[i]._replace(id=id))
  return chosen, dict(counts) | {f"tokens_{key}": value for key, value in quantiles(lengths).items()}


def quantiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
  """Mean, smallest, median, 90th percentile and largest of `values`; empty without values."""
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

  Kept once for what is submitted and once for what is trained, it shows whether slow or hard prompts go missing.
  """

  def __init__(self) -> None:
    self._sums: dict[int, np.ndarray] = collections.defaultdict(lambda: np.zeros(3))

  def add(self, prompt_id: int, rewards: Sequence[float], lengths: Sequence[int]) -> None:
    """Counts one group: its K rewards and its K completion lengths in tokens."""
    self._sums[prompt_id] += (len(rewards), np.sum(rewards), np.sum(lengths))

  def report(self) -> dict[str, float]:
    """The number of prompts, and quantiles over prompts of their mean reward and of their mean length."""
    counts, rewards, lengths = np.array(list(self._sums.values())).reshape(-1, 3).T
    result = {"prompts": float(len(counts))}
    for name, sums in (("reward", rewards), ("length", lengths)):
      result |= {f"{name}_{key}": value for key, value in quantiles(sums / counts).items()}
    return result
