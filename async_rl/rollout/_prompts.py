"""Prompts on their way to the sampler, and completions on their way back to text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from collections.abc import Sequence

import grain
import numpy as np

from async_rl import models
from async_rl import tasks
from async_rl.types import Completion
from async_rl.types import Prompt
from async_rl.types import Request

#: Tickets of samples that are not trained on start here, so that their random keys never collide with those of
#: training samples.
UNTRAINED_TICKETS = 2**31


@dataclasses.dataclass(frozen=True)
class PromptEncoder:
  """Encodes prompts and tool answers, and decodes the model's turns.

  Attributes:
    task: the task, which is asked for its name and for whether it has a tool.
    tokenizer: the policy's tokenizer.
    max_prompt_tokens: the length of the longest prompt, in tokens.
    max_turns: the maximum number of model turns in a completion, for tasks with a tool.
    tool_role: the role in which a tool speaks in a conversation.
  """

  task: tasks.Task
  tokenizer: models.Tokenizer
  max_prompt_tokens: int
  max_turns: int = 8
  tool_role: str = "tool"

  @property
  def has_tool(self) -> bool:
    """Returns whether the task is a `tasks.ToolTask`."""
    return hasattr(self.task, "respond")

  def encode(self, ticket: int, prompt: Prompt) -> Request:
    """Encodes a prompt as the request with this ticket.

    Raises:
      ValueError: if the prompt is empty or too long.
    """
    tokens = np.asarray(self.tokenizer.encode_prompt(prompt.text), np.int32)
    if not 0 < len(tokens) <= self.max_prompt_tokens:
      raise ValueError(
        f"Prompt {prompt.id} of task {self.task.name!r} has {len(tokens)} tokens; the limits are 1 and "
        f"max_prompt_tokens={self.max_prompt_tokens}. Raise max_prompt_tokens or leave such prompts out of the task."
      )
    return Request(ticket, tokens, prompt)

  def check(self, prompts: Sequence[Prompt], *, skip: bool = False) -> tasks.PromptCheck:
    """Checks before a run that it can use all prompts of a split, see `tasks.check_prompts`.

    Args:
      prompts: the prompts, by id.
      skip: whether prompts that it could not use are to be left out instead of refused.
    """
    return tasks.check_prompts(
      prompts,
      self.tokenizer.encode_prompts,
      self.max_prompt_tokens,
      same_answer=getattr(self.task, "same_answer", None),
      skip=skip,
    )

  def encode_answer(self, prompt: Prompt, answer: str) -> list[int]:
    """Encodes a tool's answer as the tokens that follow a turn of the model.

    Args:
      prompt: the prompt that began the conversation.
      answer: the text of the answer.

    Raises:
      ValueError: if the tokenizer's chat template has no place for it.
    """
    if isinstance(prompt.text, str):
      return self.tokenizer.encode(answer)
    try:
      return self.tokenizer.encode_turn(answer, self.tool_role)
    except ValueError as error:
      raise ValueError(f"A tool cannot answer as tool_role={self.tool_role!r}, try another: {error}") from error

  def decode_last_turn(self, completion: Completion) -> str:
    """Returns the text of the model's last turn, without its stop token."""
    earlier = np.flatnonzero((self._ends_turn(completion) | ~completion.mask)[:-1])
    start = earlier[-1] + 1 if len(earlier) else 0
    return self.tokenizer.decode(completion.tokens[start:].tolist())

  def count_turns(self, completion: Completion) -> int:
    """Returns the number of turns of the model."""
    return 1 + int(np.count_nonzero(self._ends_turn(completion)[:-1]))

  def _ends_turn(self, completion: Completion) -> np.ndarray:
    """Returns bool [T]: whether a token was drawn and ends a turn."""
    stops = self._sorted_stops  # np.isin would sort them again for every completion, while the devices wait
    return completion.mask & (stops[np.searchsorted(stops[:-1], completion.tokens)] == completion.tokens)

  @functools.cached_property
  def _sorted_stops(self) -> np.ndarray:
    """The tokens that end a turn, after one that no vocabulary has."""
    return np.unique(np.array([-1, *self.tokenizer.stop_ids], np.int32))


class PromptStream:
  """Deals the training prompts as requests, shuffled again for each epoch.

  All prompts are shuffled and those to be left out are then passed over, so the others keep their order.

  Attributes:
    prompts: the training prompts, by id.

  Args:
    encoder: the encoder of the prompts.
    prompts: the training prompts, by id.
    seed: the seed of the order.
    epochs: the number of passes over the prompts; `None` repeats them without end.
    skipped: the ids of prompts to leave out, see `check`.

  Raises:
    ValueError: if there are no prompts or all are left out, or the task's tool could not answer them.
  """

  def __init__(
    self,
    encoder: PromptEncoder,
    prompts: Sequence[Prompt],
    seed: int,
    epochs: int | None = None,
    skipped: Collection[int] = (),
  ):
    if len(prompts) <= len(skipped):
      raise ValueError(f"Task {encoder.task.name!r} has no training prompts; check its data folder and split.")
    if encoder.has_tool:
      encoder.encode_answer(prompts[0], "?")  # a chat template without a place for it says so before the run
    self.prompts = prompts
    self._encoder = encoder
    self._epochs = epochs
    self._skipped = frozenset(skipped)
    shuffled = grain.MapDataset.range(len(prompts)).seed(seed).shuffle()
    self._order = shuffled.repeat(epochs) if epochs else shuffled.repeat()
    self._epoch_order = functools.lru_cache(maxsize=2)(self._order_of_epoch)

  @property
  def num_tickets(self) -> int | None:
    """Returns the number of requests that the prompts give, `None` if they are repeated without end."""
    return self._epochs * self._num_used if self._epochs else None

  @property
  def _num_used(self) -> int:
    return len(self.prompts) - len(self._skipped)

  def request(self, ticket: int) -> Request:
    """Returns the request with this ticket, counted from 0."""
    if not self._skipped:
      return self._encoder.encode(ticket, self.prompts[int(self._order[ticket])])
    epoch, position = divmod(ticket, self._num_used)
    return self._encoder.encode(ticket, self.prompts[self._epoch_order(epoch)[position]])

  def _order_of_epoch(self, epoch: int) -> list[int]:
    """Returns the ids of an epoch's prompts in their order, without those that are left out."""
    size = len(self.prompts)
    ids = (int(self._order[ticket]) for ticket in range(epoch * size, (epoch + 1) * size))
    return [id for id in ids if id not in self._skipped]
