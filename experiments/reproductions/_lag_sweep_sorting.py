"""The sweep's second task, sorting: short answers that need comparisons and counts, where sums need arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from async_rl.types import STOP
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Sorting:
  """Sorting of `numbers` digits.

  The prompt `5208=` is answered by `0258`: one token a digit, and the end token. The reward is 1 if the completion has
  ended and holds the digits of the prompt in order, otherwise 0. Train and test share no problem, not even up to the
  order of the digits.

  Attributes:
    numbers: the number of digits.
    train: the number of problems in the training split.
    test: the number of problems in the test split.
    seed: the seed of the problems.
  """

  numbers: int = 16
  train: int = 8192
  test: int = 512
  seed: int = 0

  #: Every character that prompts and solutions use, and that one character is one token.
  corpus = "0123456789="
  model_type = "char"

  def __post_init__(self):
    limit = math.comb(9 + self.numbers, self.numbers) // 2
    if not (self.train >= 1 and self.test >= 1 and self.train + self.test <= limit):
      raise ValueError(
        f"*train* and *test* must be at least 1 and together at most {limit} with numbers={self.numbers}, got"
        f" train={self.train}, test={self.test}."
      )

  @property
  def name(self) -> str:
    return f"sorting{self.numbers}"

  def prompts(self, split: str) -> Sequence[Prompt]:
    """Returns the problems of a split, "train" or "test"."""
    rng = np.random.default_rng([self.seed, self.numbers])
    found: dict[str, str] = {}
    while len(found) < self.train + self.test:
      digits = "".join(map(str, rng.integers(0, 10, self.numbers)))
      found.setdefault("".join(sorted(digits)), digits)
    texts = list(found.values())
    chosen = {"test": texts[: self.test], "train": texts[self.test :]}[split]
    return [Prompt(i, f"{digits}=", digits) for i, digits in enumerate(chosen)]

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    return float(finish == STOP and text == "".join(sorted(prompt.answer)))

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Returns the only correct completion."""
    del rng
    return "".join(sorted(prompt.answer))
