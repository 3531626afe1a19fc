"""Countdown: reach a target with given numbers, each used exactly once."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from async_rl.tasks._arithmetic import evaluate
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._task import question
from async_rl.tasks._tfds_records import served
from async_rl.types import STOP
from async_rl.types import Prompt

_OPERATORS = "+-*/"
_STEP = re.compile(r"([0-9]{1,6}) ([-+*/]) ([0-9]{1,6}) = ([0-9]{1,6})")


class Puzzle(NamedTuple):
  """A countdown problem and one way to solve it: a chain that uses one number after the other.

  Attributes:
    numbers: the numbers, in the order of the prompt.
    target: the value to reach.
    chain: the first number, then triples (operator, number, swapped): the running value is the operator's left operand,
      or its right one if swapped.
  """

  numbers: tuple[int, ...]
  target: int
  chain: tuple[int, tuple[tuple[str, int, bool], ...]]


@dataclasses.dataclass(frozen=True)
class _Puzzles:
  """The data set of both forms of the task. Train and test share no puzzle.

  Attributes:
    numbers: the number of numbers in a puzzle, 2 to 6.
    largest_number: the largest number; the smallest is 1.
    largest_value: the largest target and the largest intermediate value of the known solution; the smallest is 1.
    train: the number of problems in the training split.
    test: the number of problems in the test split.
    seed: the seed of the data set.
    data_dir: the folder in which TFDS keeps the data set; None means its default.
  """

  numbers: int = 4
  largest_number: int = 99
  largest_value: int = 999
  train: int = 8192
  test: int = 512
  seed: int = 0
  data_dir: str | None = None

  def __post_init__(self):
    if not 2 <= self.numbers <= 6:
      raise ValueError(f"numbers must be between 2 and 6, got numbers={self.numbers}")
    if not 10 <= self.largest_number <= self.largest_value <= 9999:
      raise ValueError(
        "largest_number and largest_value must be between 10 and 9999, the latter not smaller, got "
        f"largest_number={self.largest_number}, largest_value={self.largest_value}"
      )
    limit = self.largest_number**self.numbers // (4 * self.numbers)
    if not (self.train >= 1 and self.test >= 1 and self.train + self.test <= limit):
      raise ValueError(
        f"train and test must be >= 1 and together at most {limit} with these numbers, got train={self.train}, "
        f"test={self.test}"
      )

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, ("train", "test"))
    config = "-".join(f"{field}{getattr(self, field)}" for field in _DATA_FIELDS)
    steps = (self.numbers - 1,)
    fields = {"numbers": (self.numbers,), "target": (), "operators": steps, "order": (self.numbers,), "swapped": steps}
    sources = served("async_rl_countdown", config, fields, self._generate, self.data_dir)
    return Prompts(sources[split], lambda i, record: self.prompt(i, _puzzle(record)))

  def prompt(self, id: int, puzzle: Puzzle) -> Prompt:
    raise NotImplementedError

  def _generate(self) -> dict[str, list[dict[str, Any]]]:
    rng = np.random.default_rng([self.seed, self.numbers, self.largest_number, self.largest_value])
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    while len(found) < self.train + self.test:
      record = self._draw(rng)
      if record is not None:
        found.setdefault((*sorted(record["numbers"].tolist()), int(record["target"])), record)
    records = list(found.values())
    return {"test": records[: self.test], "train": records[self.test :]}

  def _draw(self, rng: np.random.Generator) -> dict[str, Any] | None:
    """Draws a random chain; returns None if one of its values is fractional or out of range."""
    numbers = rng.integers(1, self.largest_number + 1, self.numbers, dtype=np.int32)
    order = rng.permutation(self.numbers).astype(np.int32)
    operators = rng.integers(0, 4, self.numbers - 1, dtype=np.int32)
    swapped = rng.integers(0, 2, self.numbers - 1, dtype=np.int32)
    value, *rest = numbers[order].tolist()
    for operator, number, swap in zip(operators, rest, swapped):
      value = _step(_OPERATORS[operator], *((number, value) if swap else (value, number)))
      if value is None or not 1 <= value <= self.largest_value:
        return None
    target = np.int32(value)
    return {"numbers": numbers, "target": target, "operators": operators, "order": order, "swapped": swapped}


_DATA_FIELDS = ("numbers", "largest_number", "largest_value", "train", "test", "seed")


@dataclasses.dataclass(frozen=True)
class Countdown(_Puzzles):
  """Countdown for language models: the answer is one expression between `<answer>` and `</answer>`.

  The reward is 1 if the last such expression uses every number exactly once and has the target as its exact value,
  `format_reward` if there is an expression that is merely wrong, otherwise 0. Expressions have `+ - * /` and
  parentheses; they are parsed, never executed.

  Attributes:
    format_reward: the reward of a well-formed wrong answer.
    chat: whether prompts are conversations, for instruct models, or plain text.
  """

  format_reward: float = 0.0
  chat: bool = True

  @property
  def name(self) -> str:
    return f"countdown{self.numbers}"

  def prompt(self, id: int, puzzle: Puzzle) -> Prompt:
    text = (
      f"Using each of the numbers {', '.join(map(str, puzzle.numbers))} exactly once, with +, -, *, / and parentheses, "
      f"write an expression that equals {puzzle.target}."
    )
    instruction = (
      "Think step by step, then give the expression between <answer> and </answer>, "
      "for example <answer>(1 + 2) * 3</answer>."
    )
    return question(id, text, instruction, self.chat, puzzle)

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    del finish  # a closed tag is an answer, whatever comes after it
    before, closing, _ = text.rpartition("</answer>")
    _, opening, expression = before.rpartition("<answer>")
    if not (opening and closing):
      return 0.0
    try:
      value, used = evaluate(expression)
    except ValueError:
      return 0.0
    right = value == prompt.answer.target and sorted(used) == sorted(prompt.answer.numbers)
    return 1.0 if right else self.format_reward

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Returns the known solution as an expression, the operands of sums and products in random order."""
    expression, rest = str(prompt.answer.chain[0]), prompt.answer.chain[1]
    for i, (operator, number, swapped) in enumerate(rest):
      left, right = (str(number), expression) if _swap(operator, swapped, rng) else (expression, str(number))
      expression = f"{left} {operator} {right}"
      if i < len(rest) - 1:
        expression = f"({expression})"
    return f"<answer>{expression}</answer>"


@dataclasses.dataclass(frozen=True)
class CountdownSteps(_Puzzles):
  """Countdown for small models trained from scratch: a chain of steps in a closed vocabulary.

  The prompt `3 7 12 20 = 45 :` is answered by `20 - 7 = 13 ; 13 * 3 = 39 ; ...`: each step takes two of the numbers
  that are left and puts back their sum, difference, product or quotient. With one token a word, a completion has
  6 (numbers - 1) tokens, the end token included. The reward is 1 if every step is right, the numbers are used up, the
  last value is the target and the completion has ended, otherwise 0.
  """

  largest_number: int = 20
  largest_value: int = 99

  #: How `models.train_sentencepiece` cuts this task's text.
  model_type = "word"

  @property
  def name(self) -> str:
    return f"countdown_steps{self.numbers}"

  @property
  def corpus(self) -> str:
    """Returns every word that prompts and solutions use, for training a tokenizer."""
    return " ".join([*map(str, range(self.largest_value + 1)), *_OPERATORS, "=", ";", ":"])

  def prompt(self, id: int, puzzle: Puzzle) -> Prompt:
    return Prompt(id, f"{' '.join(map(str, puzzle.numbers))} = {puzzle.target} :", puzzle)

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    steps = [_STEP.fullmatch(step) for step in text.split(" ; ", self.numbers)]
    if finish != STOP or len(steps) != self.numbers - 1:
      return 0.0
    left = collections.Counter(prompt.answer.numbers)
    result = None
    for step in steps:
      if step is None:
        return 0.0
      first, second, result = int(step[1]), int(step[3]), int(step[4])
      left.subtract((first, second))
      if min(left.values()) < 0 or _step(step[2], first, second) != result:
        return 0.0
      left[result] += 1
    return float(result == prompt.answer.target)

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Returns the known chain, the operands of sums and products in random order."""
    value, rest = prompt.answer.chain
    steps = []
    for operator, number, swapped in rest:
      left, right = (number, value) if _swap(operator, swapped, rng) else (value, number)
      value = _step(operator, left, right)
      steps.append(f"{left} {operator} {right} = {value}")
    return " ; ".join(steps)


def _step(operator: str, left: int, right: int) -> int | None:
  """Returns the value of one operation, None if it is no integer."""
  if operator == "/":
    return left // right if right and left % right == 0 else None
  return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _swap(operator: str, swapped: bool, rng: np.random.Generator) -> bool:
  return bool(rng.integers(2)) if operator in "+*" else swapped


def _puzzle(record: dict[str, np.ndarray]) -> Puzzle:
  first, *rest = record["numbers"][record["order"]].tolist()
  operators = [_OPERATORS[i] for i in record["operators"]]
  steps = tuple(zip(operators, rest, map(bool, record["swapped"])))
  return Puzzle(tuple(record["numbers"].tolist()), int(record["target"]), (first, steps))
