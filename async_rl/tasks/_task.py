"""The protocol of a task: prompts with stable ids, and a pure reward."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np

from async_rl._suggestions import suggestion
from async_rl.types import Prompt


class Task(Protocol):
  """A source of prompts and the judge of their completions.

  A task is a small picklable value, usually a frozen dataclass of its options: reward workers receive a copy of it,
  so data sets are opened by `prompts`, never stored in it. Its module must be importable and must not import JAX.

  A task may also define `warm_up()`; each worker calls it once, outside the time limit, to import what `reward` needs.
  And it may define `same_answer(prompt, other)`: whether two prompts of the same text agree in what is rewarded.
  Otherwise their answers must be equal, or the run refuses them before its first step.
  """

  @property
  def name(self) -> str:
    """Returns a short name for logs and metrics."""

  def prompts(self, split: str) -> Sequence[Prompt]:
    """Returns the prompts of `split` ("train" or "test"), random access: item i has id i.

    Raises:
      ValueError: if a record could never earn a reward, at the latest when it is read; it names the field.
    """

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    """Judges the decoded completion `text`. Pure and deterministic; must survive any text.

    Args:
      prompt: the prompt that was completed.
      text: the completion without special tokens.
      finish: the reason of its end, `types.STOP` or `types.LENGTH`.

    Returns:
      A number that is finite in float32. Raising counts as a failure of the verifier, not as a wrong answer.
    """


class SupervisedTask(Task, Protocol):
  """A task that can write correct solutions, for a supervised warm start."""

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str | Sequence[str]:
    """Writes a completion of `prompt` (without the end token) that earns the full reward.

    If it calls a tool: the turns, the model's and the task's in turn, from the model's first to its last.
    """


class Preference(NamedTuple):
  """Two completions of one prompt, for training a reward model: `chosen` was preferred to `rejected`.

  Attributes:
    prompt: the text, as in `Prompt.text`.
    chosen: the preferred completion, without the end token.
    rejected: the other completion, likewise.
  """

  prompt: str | list[dict[str, str]]
  chosen: str
  rejected: str


class PreferenceTask(Task, Protocol):
  """A task with comparisons of completions, from which a reward model can be trained."""

  def preferences(self, split: str) -> Sequence[Preference]:
    """Returns the comparisons of `split`."""


class ToolTask(Task, Protocol):
  """A task of several turns: the model writes, the task answers, the model goes on.

  `reward` is given the text of the model's last turn. The task's own turns are context and never trained.
  Both run in the worker processes of a `RewardPool`; a call that hangs or raises costs the sample that made it.
  """

  def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
    """Returns the task's answer to the model's last turn, None if that was the last one. Pure, and safe on any text.

    Args:
      prompt: the prompt that began the conversation.
      turns: the texts so far: the model's, the task's, the model's, and so on; the last is the model's.
    """


class Prompts(Sequence[Prompt]):
  """Random access over the records of a data set, each made into a `Prompt` when it is read."""

  def __init__(
    self,
    records: Sequence[Any],
    make: Callable[[int, Any], Prompt],
    where: Callable[[int], str] | None = None,
  ):
    """Wraps records.

    Args:
      records: the records, anything with `len` and integer indexing.
      make: the function from a position and its record to a prompt.
      where: the function from a position to the place of its record; None asks the records, if they know.
    """
    self._records = records
    self._make = make
    self._where = where or getattr(records, "where", None)

  def where(self, index: int) -> str:
    """Returns the place of a prompt in its file, where the records know it, otherwise its number."""
    return self._where(index) if self._where is not None else f"prompt {index}"

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index):
    if isinstance(index, slice):
      ids = range(len(self))[index]
      return Prompts(ids, lambda _, i: self[i], lambda position: self.where(ids[position]))
    index = range(len(self))[index]
    return self._make(index, self._records[index])


def question(id: int, text: str, instruction: str, chat: bool, answer: Any) -> Prompt:
  """Makes a prompt of `text` and an instruction: a conversation of one message if `chat`, else lines of text."""
  text = f"{text}\n{instruction}" if instruction else text
  return Prompt(id, [{"role": "user", "content": text}] if chat else f"{text}\n", answer)


def known(what: str, value: str, names: Collection[str]) -> str:
  """Returns `value` if it is one of `names`, otherwise raises a ValueError that suggests the nearest name."""
  if value in names:
    return value
  raise ValueError(f"unknown {what} {value!r}: {suggestion(value, names)}")
