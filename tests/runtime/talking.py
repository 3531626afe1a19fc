"""A task with a tool, and the smallest experiment of it; a module of its own, so that workers can import the task."""

import dataclasses
import time

from async_rl import tasks


@dataclasses.dataclass(frozen=True)
class Talking(tasks.Sums):
  """Answers every turn with digits, and rewards the share of digits in the last one.

  Attributes:
    slow: prompts of which the answers take a second, by id modulo 8.
    hangs: prompts of which they never come, likewise.
    raises: prompts of which they fail, likewise.
    says: what the tool says; None: the length of the turn.
  """

  slow: tuple[int, ...] = ()
  hangs: tuple[int, ...] = ()
  raises: tuple[int, ...] = ()
  says: str | None = None

  def respond(self, prompt, turns):
    kind = prompt.id % 8
    if kind in self.raises:
      raise ZeroDivisionError("by zero")
    if kind in self.hangs:
      time.sleep(1000)
    if kind in self.slow:
      time.sleep(1)
    assert len(turns) % 2 == 1
    assert all(answer == self._answer(turn) for turn, answer in zip(turns[::2], turns[1::2], strict=False))
    return self._answer(turns[-1])

  def _answer(self, turn):
    return f"{len(turn)}=" if self.says is None else self.says

  def reward(self, prompt, text, finish):
    return sum(c.isdigit() for c in text) / 16

  def solution(self, prompt, rng):
    text = super().solution(prompt, rng)
    return [text[:3], self._answer(text[:3]), text[3:]]
