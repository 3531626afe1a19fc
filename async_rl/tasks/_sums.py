"""Sums of two-digit numbers with a scratchpad: the smallest task on which stale data harms training."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._tfds_records import served
from async_rl.types import STOP
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums of `numbers` two-digit numbers, to be computed by writing down each running total.

  The prompt `12+34+56=` is answered by `34+012=046;56+046=102`: each step adds one number (two digits) to the running
  total (three digits); the first total is one of the numbers, and the numbers may come in any order. One token a
  character, a completion has 11 (numbers - 1) tokens, the end token included. The reward is 1 if the completion has
  this form, has ended, and its last total is right, otherwise 0.

  Train and test share no problem, not even up to the order of the numbers.

  Attributes:
    numbers: the number of numbers to add, 2 to 10.
    train: the number of problems in the training split.
    test: the number of problems in the test split.
    seed: the seed of the data set.
    data_dir: the folder in which TFDS keeps the data set; None means its default.
  """

  numbers: int = 3
  train: int = 8192
  test: int = 512
  seed: int = 0
  data_dir: str | None = None

  #: Every character that prompts and solutions use, and how `models.train_sentencepiece` cuts them.
  corpus = "0123456789+=;"
  model_type = "char"

  def __post_init__(self):
    if not 2 <= self.numbers <= 10:
      raise ValueError(f"numbers must be between 2 and 10, got numbers={self.numbers}")
    limit = math.comb(89 + self.numbers, self.numbers) // 2
    if not (self.train >= 1 and self.test >= 1 and self.train + self.test <= limit):
      raise ValueError(
        f"train and test must be >= 1 and together at most {limit} with numbers={self.numbers}, "
        f"got train={self.train}, test={self.test}"
      )

  @property
  def name(self) -> str:
    return f"sums{self.numbers}"

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, ("train", "test"))
    config = f"n{self.numbers}-train{self.train}-test{self.test}-seed{self.seed}"
    sources = served("async_rl_sums", config, {"numbers": (self.numbers,)}, self._generate, self.data_dir)
    return Prompts(sources[split], lambda i, record: self.prompt(i, record["numbers"].tolist()))

  def prompt(self, id: int, numbers: Sequence[int]) -> Prompt:
    """Returns the problem of adding `numbers`."""
    return Prompt(id, "+".join(map(str, numbers)) + "=", tuple(numbers))

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    right = finish == STOP and _form(self.numbers).fullmatch(text) and int(text[-3:]) == sum(prompt.answer)
    return float(bool(right))

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Returns a correct completion that adds the numbers in random order."""
    total, *rest = rng.permutation(prompt.answer).tolist()
    steps = []
    for number in rest:
      steps.append(f"{number:02d}+{total:03d}={total + number:03d}")
      total += number
    return ";".join(steps)

  def _generate(self) -> dict[str, list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng([self.seed, self.numbers])
    problems: dict[tuple[int, ...], np.ndarray] = {}
    while len(problems) < self.train + self.test:
      numbers = rng.integers(10, 100, self.numbers, dtype=np.int32)
      problems.setdefault(tuple(sorted(numbers.tolist())), numbers)
    records = [{"numbers": numbers} for numbers in problems.values()]
    return {"test": records[: self.test], "train": records[self.test :]}


@functools.cache
def _form(numbers: int) -> re.Pattern[str]:
  return re.compile(";".join([r"[0-9]{2}\+[0-9]{3}=[0-9]{3}"] * (numbers - 1)))
