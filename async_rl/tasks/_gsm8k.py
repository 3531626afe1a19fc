"""GSM8K: grade-school word problems (Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021)."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from async_rl.tasks._jsonl import answer_field
from async_rl.tasks._jsonl import read_jsonl
from async_rl.tasks._jsonl import text_field
from async_rl.tasks._numbers import final_answer
from async_rl.tasks._numbers import plain_number
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._task import question
from async_rl.tasks._tfds_records import prepared
from async_rl.types import STOP
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class GSM8K:
  r"""Word problems whose answer is a number.

  The reward is 1 if the completion has ended and its final number equals the reference exactly, otherwise 0.

  Attributes:
    folder: the folder with `train.jsonl` and `test.jsonl`, one object per line with `question` and `answer`. The latter
      is a solution that ends in `#### number`, as in the original, or a plain number. None takes `gsm8k` of TFDS,
      downloaded if need be.
    data_dir: the folder in which TFDS keeps its data sets; None means its default.
    answer: the place of a completion's answer: "last" takes the number after `####`, else that in `\boxed{}`, else the
      last one of the text; "marked" gives no reward without `####` or `\boxed{}`.
    instruction: the text that follows the question.
    chat: whether prompts are conversations, for instruct models, or plain text.
  """

  folder: str | os.PathLike | None = None
  data_dir: str | None = None
  answer: str = "last"
  instruction: str = "Think step by step, then give the answer after '#### '."
  chat: bool = True

  def __post_init__(self):
    known("answer", self.answer, ("last", "marked"))

  @property
  def name(self) -> str:
    return "gsm8k"

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, ("train", "test"))
    if self.folder is not None:
      path = os.path.join(self.folder, f"{split}.jsonl")
      return Prompts(read_jsonl(path, ("question", "answer"), lambda record: self.prompt(0, record)), self.prompt)
    return Prompts(_from_tfds(split, self.data_dir), self.prompt)

  def prompt(self, id: int, record: dict[str, Any]) -> Prompt:
    """Returns the prompt of one record with `question` and `answer`.

    Raises:
      ValueError: if one of them is no text, or the answer holds no number.
    """
    answer = answer_field(record, "answer")
    if _reference(answer) is None:
      raise ValueError(f"field 'answer' must be a number, or end in '#### ' and a number, got {answer[-80:]!r}")
    return question(id, text_field(record, "question"), self.instruction, self.chat, answer)

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    if finish != STOP:  # its last number may be cut in two
      return 0.0
    found = final_answer(text, marked=self.answer == "marked")
    return float(found is not None and found == _reference(prompt.answer))

  def same_answer(self, prompt: Prompt, other: Prompt) -> bool:
    """Returns whether two solutions end in the same number."""
    return _reference(prompt.answer) == _reference(other.answer)

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Returns the reference solution without its calculator annotations; `#### number` where there is only that."""
    del rng
    if final_answer(prompt.answer, marked=True) is None:
      return f"#### {prompt.answer}"
    return re.sub(r"<<[^<>]*>>", "", prompt.answer)


def _reference(answer: str) -> Fraction | None:
  """The number of a reference answer: after `####`, or the whole of it."""
  number = final_answer(answer, marked=True)
  return plain_number(answer) if number is None else number


def _from_tfds(split: str, data_dir: str | None) -> Sequence[dict[str, Any]]:
  # Not by name: the search for a name imports unrelated data sets, and those have dependencies of their own.
  from tensorflow_datasets.text.gsm8k import Gsm8k

  make = functools.partial(Gsm8k, data_dir=data_dir, file_format="array_record")
  try:
    builder = prepared(make)
  except Exception as error:
    raise RuntimeError(
      f"TFDS could not prepare gsm8k in {make().data_dir}: {error}. Without a network, give the folder that holds the "
      "original train.jsonl and test.jsonl"
    ) from error
  return builder.as_data_source(split=split)
