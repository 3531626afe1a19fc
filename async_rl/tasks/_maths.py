"""Competition mathematics, judged by math-verify (answers may be any expression, set, interval or matrix)."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from async_rl.tasks._exact import agree
from async_rl.tasks._jsonl import answer_field
from async_rl.tasks._jsonl import read_jsonl
from async_rl.tasks._jsonl import text_field
from async_rl.tasks._numbers import WINDOW
from async_rl.tasks._numbers import boxed
from async_rl.tasks._numbers import plain_number
from async_rl.tasks._numbers import simplify_digits
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._task import question
from async_rl.types import STOP
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Maths:
  r"""Problems whose answer is a mathematical object, from a folder with `train.jsonl` and `test.jsonl`.

  The reward is 1 if the completion has ended and its answer equals the reference, otherwise 0. Two plain numbers are
  compared exactly. All else is left to math-verify, whose numerical comparison is then checked where the values are
  rational: 1/2006! is not 1/2004!. Lists with an ellipsis, such as `1, 3, \ldots, 2n-1`, must agree in every entry.

  math-verify computes with SymPy, whose time nothing bounds: use reward workers, which have a time limit.

  Attributes:
    folder: the folder with the files, one JSON object per line.
    problem: the field with the problem.
    reference: the field with the answer, a number or a text in LaTeX or plain.
    answer: the place of a completion's answer: "boxed" takes the last `\boxed{}`; "any" lets math-verify search the
      whole completion.
    instruction: the text that follows the problem.
    chat: whether prompts are conversations, for instruct models, or plain text.
  """

  folder: str | os.PathLike
  problem: str = "problem"
  reference: str = "answer"
  answer: str = "boxed"
  instruction: str = r"Think step by step, then give the answer in \boxed{}."
  chat: bool = True

  def __post_init__(self):
    known("answer", self.answer, ("boxed", "any"))

  @property
  def name(self) -> str:
    return "maths"

  def warm_up(self) -> None:
    _parse(r"\boxed{\frac{1}{2}}")

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, ("train", "test"))
    path = os.path.join(self.folder, f"{split}.jsonl")
    records = read_jsonl(path, (self.problem, self.reference), lambda record: self.prompt(0, record))
    return Prompts(records, self.prompt)

  def prompt(self, id: int, record: dict[str, Any]) -> Prompt:
    """Returns the prompt of one record.

    Raises:
      ValueError: if the problem or the reference is blank, or neither text nor number.
    """
    reference = answer_field(record, self.reference)
    return question(id, text_field(record, self.problem), self.instruction, self.chat, reference)

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    if finish != STOP:
      return 0.0
    text = text[-WINDOW:]
    if self.answer == "any":
      return float(_verified(prompt.answer, _normalized(text)))
    inside = boxed(text)
    return float(inside is not None and bool(inside.strip()) and _equal(prompt.answer, inside))

  def same_answer(self, prompt: Prompt, other: Prompt) -> bool:
    """Returns whether two references are equal, or cannot be compared.

    Either of them may be the answer: math-verify's comparison is not symmetric.
    """
    a, b = prompt.answer, other.answer
    try:
      return a == b or _equal(a, b) or _equal(b, a)
    except ValueError:
      return True


def _equal(reference: str, answer: str) -> bool:
  reference, answer = _normalized(reference), _normalized(answer)
  if _ELLIPSIS.search(reference) or _ELLIPSIS.search(answer):
    return _same_entries(_entries(reference), _entries(answer))
  expected, found = _values(reference), _values(answer)
  if expected and found:
    return expected[0] == found[0] if len(expected) == len(found) else bool({*expected} & {*found})
  if _UNCLEAR.search(answer):
    return False
  return _verified(reference, f"\\boxed{{{answer}}}")


def _values(text: str) -> list[Fraction]:
  """Returns the value of a plain number, for a percentage also its hundredth, and nothing for other texts."""
  value = plain_number(text.replace(r"\%", "%"))
  if value is None:
    return []
  return [value, value / 100] if "%" in text else [value]


def _verified(reference: str, text: str) -> bool:
  """Returns whether math-verify finds the reference in a text, and exact arithmetic does not contradict it."""
  from math_verify import verify

  expected, found = _reference(reference), _parse(text)
  if not expected:
    raise ValueError(f"math-verify cannot read the reference answer {reference!r}")
  return bool(verify(expected, found, timeout_seconds=None)) and agree(expected, found)


_ELLIPSIS = re.compile(r"\\[lc]?dots[cbmio]?\b|…|⋯|\.\.\.+")
#: Numbers that math-verify would read as products or sums: `12 34`, `1_00`, `1e9999999`.
_UNCLEAR = re.compile(r"[0-9](?:\s+|_|[eE][-+]?)[0-9]")
_OPEN, _CLOSE = "([{", ")]}"


def _entries(text: str) -> list[str]:
  """Returns the entries of a list, separated by commas outside of brackets, with `...` for an ellipsis."""
  entries, depth = [""], 0
  for c in _ELLIPSIS.sub("...", text).strip().strip("$"):
    depth += (c in _OPEN) - (c in _CLOSE)
    if c == "," and not depth:
      entries.append("")
    else:
      entries[-1] += c
  return [entry.strip() for entry in entries]


def _same_entries(expected: list[str], found: list[str]) -> bool:
  return len(expected) == len(found) and all(
    "".join(a.split()) == "".join(b.split()) or ("..." not in a + b and bool(b) and _equal(a, b))
    for a, b in zip(expected, found)
  )


def _normalized(text: str) -> str:
  """Returns a text as math-verify reads it: ASCII digits without separators, powers of ten and exponents in LaTeX."""
  text = re.sub(r"([0-9])[eE]([-+]?[0-9]{1,3})(?![0-9])", r"\1 \\times 10^{\2}", simplify_digits(text))
  return re.sub(r"\^\s*(-[0-9]+)", r"^{\1}", text)


@functools.lru_cache(maxsize=4096)
def _reference(answer: str) -> list:
  return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list:
  from math_verify import parse

  # Its own time limit is an alarm and works in the main thread only; reward workers have one, so its warning is moot.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return parse(text, parsing_timeout=None)
