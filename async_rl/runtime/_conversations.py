"""Samples from their submission to their reward, with the turns of a task's tool in between."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from typing import NamedTuple

import numpy as np

from async_rl import sampling
from async_rl import tasks
from async_rl.rollout._completion_arrays import completions_from_arrays
from async_rl.rollout._completion_arrays import completions_to_arrays
from async_rl.runtime._parts import Parts
from async_rl.types import FAILED
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Request


class Scored(NamedTuple):
  """A group with its rewards.

  Attributes:
    request: what was submitted.
    completions: the K samples, ordered by `sample`.
    results: of their rewards.
  """

  request: Request
  completions: tuple[Completion, ...]
  results: tuple[tasks.RewardResult, ...]


@dataclasses.dataclass
class _Open:
  """A group that is not complete; everything by sample.

  Attributes:
    request: what was submitted.
    completions: samples that the sampler has not got: they wait for the task's answer or for their reward.
    turns: the texts before the turn that is being written: the model's, the task's, and so on.
    answers: to come from the task.
    rewards: to come.
  """

  request: Request
  completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
  turns: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  answers: dict[int, Future[tasks.ToolResult]] = dataclasses.field(default_factory=dict)
  rewards: dict[int, Future[tasks.RewardResult]] = dataclasses.field(default_factory=dict)


class Conversations:
  """What becomes of the samples of one sampler: the task answers or judges what they wrote.

  A sample that ended its turn with a stop token goes to the task if that is a `tasks.ToolTask`. If it answers, the
  answer is appended as tokens that nobody drew, and the sample goes on; meanwhile its slot is free for others. The
  sample ends when the task has no answer, after `max_turns` turns, or, with `LENGTH`, when the answer and a token more
  do not fit its longest completion. A call that fails (see `tasks.RewardPool`) ends it with `FAILED`; its reward is the
  stand-in of a failed judgment. Otherwise the reward is the task's, for the text of the last turn.

  Not thread-safe.

  Args:
    parts: of the run.
    engine: the sampler.
    rewards: asks the task.
    samples: K, samples of a group.
    scorer: gives the rewards in the place of the task.
  """

  def __init__(
    self,
    parts: Parts,
    engine: sampling.Sampler,
    rewards: tasks.RewardPool,
    samples: int,
    scorer: tasks.Scorer | None = None,
  ):
    self._scorer = scorer or rewards
    self._parts, self._engine, self._rewards, self._samples = parts, engine, rewards, samples
    self._open: dict[int, _Open] = {}

  def __len__(self) -> int:
    """Groups that are not complete."""
    return len(self._open)

  def submit(self, request: Request) -> None:
    """Hands a group to the sampler."""
    self._open[request.ticket] = _Open(request)
    self._engine.submit(request)

  def judge(self, completion: Completion) -> None:
    """Asks the task to answer a sample that the sampler has finished, or for its reward if it has ended."""
    group, sample = self._open[completion.ticket], completion.sample
    group.completions[sample] = completion
    turns = (*group.turns.get(sample, ()), last_turn(self._parts, completion))
    last = (len(turns) + 1) // 2 >= self._parts.experiment.max_turns
    if not self._parts.multi_turn or completion.finish != STOP or last:
      self._end(completion)
    else:
      group.answers[sample] = self._rewards.respond(group.request.prompt, turns)

  def take_up(self, which: tuple[int, int] | None = None, wait: bool = False) -> list[tuple[int, int]]:
    """Goes on with samples that the task has answered.

    Args:
      which: ticket and sample of the only one to go on with; it is waited for.
      wait: wait for all answers, so that what happens does not depend on time.

    Returns:
      Ticket and sample of each one, in the order in which they were taken up.

    Raises:
      ValueError: if the sample `which` does not wait for an answer.
    """
    answers = {(ticket, k): answer for ticket, group in self._open.items() for k, answer in group.answers.items()}
    if which is not None:
      if which not in answers:
        raise ValueError(
          f"Sample {which[1]} of group {which[0]} has not called the tool; is this another run's schedule?"
        )
      answers = {which: answers[which]}
    if wait or which is not None:
      concurrent.futures.wait(answers.values())
    taken = sorted(key for key, answer in answers.items() if answer.done())
    for key in taken:
      self._go_on(*key)
    return taken

  def due(self) -> list[Future[Any]]:
    """Answers that were not taken up yet, and rewards that are to come."""
    answers = [answer for group in self._open.values() for answer in group.answers.values()]
    return answers + [reward for group in self._open.values() for reward in group.rewards.values() if not reward.done()]

  def settle(self) -> None:
    """Waits for the rewards of all samples that have ended."""
    concurrent.futures.wait([reward for group in self._open.values() for reward in group.rewards.values()])

  def finished(self) -> list[Scored]:
    """Removes and returns the complete groups, in the order of their submission."""
    complete = lambda g: len(g.rewards) == self._samples and all(reward.done() for reward in g.rewards.values())
    ready = [self._open.pop(ticket) for ticket in [t for t, g in self._open.items() if complete(g)]]
    order = range(self._samples)
    return [
      Scored(g.request, tuple(g.completions[k] for k in order), tuple(g.rewards[k].result() for k in order))
      for g in ready
    ]

  def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
    """Turns and calls of a batch, and the calls that failed so far; nothing without a tool."""
    if not self._parts.multi_turn:
      return {}
    turns = [1 + int(np.count_nonzero(_ends(self._parts, c)[:-1])) for group in groups for c in group.completions]
    return {
      "tools/turns": float(np.mean(turns)),
      "tools/calls": float(sum(turns) - len(turns)),
      "tools/failures": float(sum(self._rewards.tool_failures.values())),
    }

  # Checkpoints.

  def held(self) -> list[Completion]:
    """The samples of incomplete groups that the sampler has not got, ordered by ticket and sample."""
    return [c for _, group in sorted(self._open.items()) for _, c in sorted(group.completions.items())]

  def state(self) -> dict[str, Any]:
    """Everything but what the sampler has, for a checkpoint."""
    turns = [[ticket, k, list(texts)] for ticket, g in self._open.items() for k, texts in g.turns.items()]
    return {
      "tickets": np.array(sorted(self._open), np.int64),
      "finished": completions_to_arrays(self.held()),
      "turns": turns,
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Takes up what `state` returned: the task is asked again for what it had not answered or judged."""
    self._open = {int(ticket): _Open(self._parts.request(int(ticket))) for ticket in state["tickets"]}
    for ticket, sample, texts in state["turns"]:
      self._open[ticket].turns[sample] = tuple(texts)
    for completion in completions_from_arrays(state["finished"]):
      self.judge(completion)

  # The parts.

  def _go_on(self, ticket: int, sample: int) -> None:
    """Continues or ends one sample after the task's answer."""
    group = self._open[ticket]
    completion, answer = group.completions[sample], group.answers.pop(sample).result()
    if answer.failed:
      self._end(completion._replace(finish=FAILED), answer.reason)
    elif answer.text is None:
      self._end(completion)
    else:
      tokens = self._parts.encode_turn(group.request.prompt, answer.text)
      if len(tokens) >= self._engine.room(completion):
        self._end(completion._replace(finish=LENGTH))
      else:
        del group.completions[sample]
        group.turns[sample] = (*group.turns.get(sample, ()), last_turn(self._parts, completion), answer.text)
        self._engine.resume(group.request, completion, tokens)

  def _end(self, completion: Completion, reason: str = "earlier") -> None:
    """Asks for the reward of a sample that has ended."""
    group = self._open[completion.ticket]
    group.completions[completion.sample] = completion
    if completion.finish == FAILED:
      reward: Future[tasks.RewardResult] = Future()
      reward.set_result(tasks.RewardResult(self._rewards.failure_value, True, f"tool call {reason}"))
    else:
      reward = self._scorer.submit(group.request.prompt, last_turn(self._parts, completion), completion.finish)
    group.rewards[completion.sample] = reward


def last_turn(parts: Parts, completion: Completion) -> str:
  """Text of what the model wrote last."""
  before = np.flatnonzero((_ends(parts, completion) | ~completion.mask)[:-1])
  return parts.decode(completion.tokens[before[-1] + 1 if len(before) else 0 :])


def _ends(parts: Parts, completion: Completion) -> np.ndarray:
  """bool [T], whether a token is drawn and ends a turn."""
  return completion.mask & np.isin(completion.tokens, parts.tokenizer.stop_ids)
