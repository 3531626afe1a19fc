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
from async_rl.rollout._prompts import PromptEncoder
from async_rl.rollout._prompts import PromptStream
from async_rl.types import FAILED
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Request


class ScoredGroup(NamedTuple):
  """A complete group with the results of its rewards.

  Attributes:
    request: the request that was submitted.
    completions: the K samples, ordered by `sample`.
    results: the K results of their rewards.
  """

  request: Request
  completions: tuple[Completion, ...]
  results: tuple[tasks.RewardResult, ...]


@dataclasses.dataclass
class _OpenGroup:
  """An incomplete group; everything by sample.

  Attributes:
    request: the request that was submitted.
    completions: the samples that are not in the sampler, waiting for the task's answer or for their reward.
    turns: the texts before the turn that is being written: the model's, the task's, and so on.
    answers: the task's pending answers.
    rewards: the pending rewards.
  """

  request: Request
  completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
  turns: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  answers: dict[int, Future[tasks.ToolResult]] = dataclasses.field(default_factory=dict)
  rewards: dict[int, Future[tasks.RewardResult]] = dataclasses.field(default_factory=dict)


class Conversations:
  """Tracks the samples of one sampler until the task has answered and scored them.

  A sample that ended its turn with a stop token goes to the task if that is a `tasks.ToolTask`. If the task answers,
  the answer is appended as tokens that nobody drew and the sample is resumed; its slot is free in the meantime. The
  sample ends when the task has no answer, after `max_turns` turns, or, with `LENGTH`, when the answer and one more
  token do not fit its longest completion. A call that fails (see `tasks.RewardPool`) ends it with `FAILED`; its reward
  is the stand-in of a failed judgment. Otherwise the reward is the task's, for the text of the last turn.

  Not thread-safe.

  Args:
    sampler: the sampler.
    encoder: the encoder of prompts and answers.
    rewards: the pool that asks the task.
    samples: K, the number of samples of a group.
    scorer: the scorer that replaces the task's reward.
  """

  def __init__(
    self,
    sampler: sampling.Sampler,
    encoder: PromptEncoder,
    rewards: tasks.RewardPool,
    samples: int,
    scorer: tasks.Scorer | None = None,
  ):
    self._sampler = sampler
    self._encoder = encoder
    self._rewards = rewards
    self._samples = samples
    self._scorer = scorer or rewards
    self._open: dict[int, _OpenGroup] = {}

  def __len__(self) -> int:
    """Returns the number of incomplete groups."""
    return len(self._open)

  def submit(self, request: Request) -> None:
    """Submits a group to the sampler."""
    self._open[request.ticket] = _OpenGroup(request)
    self._sampler.submit(request)

  def process_completion(self, completion: Completion) -> None:
    """Asks the task to answer a sample that the sampler has finished, or requests its reward if it has ended."""
    group, sample = self._open[completion.ticket], completion.sample
    group.completions[sample] = completion
    earlier = group.turns.get(sample, ())  # the model's and the task's, in turns
    may_call = self._encoder.has_tool and completion.finish == STOP
    if may_call and len(earlier) // 2 + 1 < self._encoder.max_turns:
      texts = (*earlier, self._encoder.decode_last_turn(completion))
      group.answers[sample] = self._rewards.respond(group.request.prompt, texts)
    else:
      self._request_reward(completion)

  def resume_answered(self, only: tuple[int, int] | None = None, wait: bool = False) -> list[tuple[int, int]]:
    """Resumes or ends the samples that the task has answered.

    Args:
      only: the ticket and sample of the only one to resume; its answer is awaited.
      wait: whether to wait for all answers, so that the outcome does not depend on time.

    Returns:
      The ticket and sample of each one, in the order in which they were resumed.

    Raises:
      ValueError: if the sample `only` does not wait for an answer.
    """
    answers = {(ticket, k): answer for ticket, group in self._open.items() for k, answer in group.answers.items()}
    if only is not None:
      if only not in answers:
        raise ValueError(
          f"Sample {only[1]} of group {only[0]} has not called the tool; is this another run's schedule?"
        )
      answers = {only: answers[only]}
    if wait or only is not None:
      concurrent.futures.wait(answers.values())
    answered = sorted(key for key, answer in answers.items() if answer.done())
    for ticket, sample in answered:
      self._resume(ticket, sample)
    return answered

  def pending(self) -> list[Future[Any]]:
    """Returns the answers that were not used yet, and the rewards that are still computed."""
    answers = [answer for group in self._open.values() for answer in group.answers.values()]
    return answers + [reward for group in self._open.values() for reward in group.rewards.values() if not reward.done()]

  def wait_for_rewards(self) -> None:
    """Waits for the rewards of all samples that have ended."""
    concurrent.futures.wait([reward for group in self._open.values() for reward in group.rewards.values()])

  def pop_complete(self) -> list[ScoredGroup]:
    """Removes and returns the complete groups, in the order of their submission."""
    complete = [ticket for ticket, group in self._open.items() if self._is_complete(group)]
    return [self._scored(self._open.pop(ticket)) for ticket in complete]

  def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
    """Returns the turns and calls of a batch, and the calls that failed so far; nothing for tasks without a tool."""
    if not self._encoder.has_tool:
      return {}
    turns = [self._encoder.count_turns(completion) for group in groups for completion in group.completions]
    return {
      "tools/turns": float(np.mean(turns)),
      "tools/calls": float(sum(turns) - len(turns)),
      "tools/failures": float(sum(self._rewards.tool_failures.values())),
    }

  # Checkpoints.

  def held(self) -> list[Completion]:
    """Returns the samples of incomplete groups that are not in the sampler, ordered by ticket and sample."""
    return [c for _, group in sorted(self._open.items()) for _, c in sorted(group.completions.items())]

  def state(self) -> dict[str, Any]:
    """Returns everything but what the sampler has, for a checkpoint."""
    turns = [[ticket, k, list(texts)] for ticket, g in self._open.items() for k, texts in g.turns.items()]
    return {
      "tickets": np.array(sorted(self._open), np.int64),
      "finished": completions_to_arrays(self.held()),
      "turns": turns,
    }

  def restore(self, state: dict[str, Any], prompts: PromptStream) -> None:
    """Continues from what `state` returned; the task is asked again for what it had not answered or scored."""
    self._open = {int(ticket): _OpenGroup(prompts.request(int(ticket))) for ticket in state["tickets"]}
    for ticket, sample, texts in state["turns"]:
      self._open[ticket].turns[sample] = tuple(texts)
    for completion in completions_from_arrays(state["finished"]):
      self.process_completion(completion)

  # Steps of the above.

  def _is_complete(self, group: _OpenGroup) -> bool:
    return len(group.rewards) == self._samples and all(reward.done() for reward in group.rewards.values())

  def _scored(self, group: _OpenGroup) -> ScoredGroup:
    order = range(self._samples)
    completions = tuple(group.completions[k] for k in order)
    return ScoredGroup(group.request, completions, tuple(group.rewards[k].result() for k in order))

  def _resume(self, ticket: int, sample: int) -> None:
    """Resumes or ends one sample after the task's answer."""
    group = self._open[ticket]
    completion, answer = group.completions[sample], group.answers.pop(sample).result()
    if answer.failed:
      self._request_reward(completion._replace(finish=FAILED), answer.reason)
    elif answer.text is None:
      self._request_reward(completion)
    else:
      tokens = self._encoder.encode_answer(group.request.prompt, answer.text)
      if len(tokens) >= self._sampler.room(completion):
        self._request_reward(completion._replace(finish=LENGTH))
      else:
        del group.completions[sample]
        turn = self._encoder.decode_last_turn(completion)
        group.turns[sample] = (*group.turns.get(sample, ()), turn, answer.text)
        self._sampler.resume(group.request, completion, tokens)

  def _request_reward(self, completion: Completion, failure: str = "earlier") -> None:
    """Requests the reward of a sample that has ended; `failure` is the reason if a call of its tool failed."""
    group = self._open[completion.ticket]
    group.completions[completion.sample] = completion
    if completion.finish == FAILED:
      reward: Future[tasks.RewardResult] = Future()
      reward.set_result(tasks.RewardResult(self._rewards.failure_value, True, f"tool call {failure}"))
    else:
      text = self._encoder.decode_last_turn(completion)
      reward = self._scorer.submit(group.request.prompt, text, completion.finish)
    group.rewards[completion.sample] = reward
