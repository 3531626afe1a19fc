"""Competition mathematics, judged by math-verify (answers may be any expression, set, interval or matrix)."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

from async_rl.tasks._jsonl import read_jsonl
from async_rl.tasks._numbers import WINDOW
from async_rl.tasks._numbers import boxed
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._task import question
from async_rl.types import STOP
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Maths:
  r"""Problems whose answer is a mathematical object, from a folder with `train.jsonl` and `test.jsonl`.

  The reward is 1 if the completion has ended and math-verify finds its answer equal to the reference, otherwise 0. It
  computes with SymPy, whose time nothing bounds: use reward workers, which have a time limit.

  Attributes:
    folder: holds the files, one JSON object per line.
    problem: field with the problem.
    reference: field with the answer, in LaTeX or plain.
    answer: "boxed" takes what stands in the last `\boxed{}`; "any" lets math-verify search the whole completion.
    instruction: follows the problem.
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
    records = read_jsonl(os.path.join(self.folder, f"{split}.jsonl"), (self.problem, self.reference))
    return Prompts(records, self.prompt)

  def prompt(self, id: int, record: dict[str, Any]) -> Prompt:
    """The prompt of one record."""
    return question(id, record[self.problem].strip(), self.instruction, self.chat, str(record[self.reference]))

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    if finish != STOP:
      return 0.0
    text = text[-WINDOW:]
    if self.answer == "boxed":
      inside = boxed(text)
      if not inside:
        return 0.0
      text = f"\\boxed{{{inside}}}"
    from math_verify import verify

    reference = _reference(prompt.answer)
    if not reference:
      raise ValueError(f"math-verify cannot read the reference answer {prompt.answer!r}")
    return float(verify(reference, _parse(text), timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _reference(answer: str) -> list:
  return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list:
  from math_verify import parse

  # Its own time limit is an alarm and works in the main thread only; reward workers have one, so its warning is moot.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return parse(text, parsing_timeout=None)
