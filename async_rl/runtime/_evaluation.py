"""Completions of given prompts with their rewards, and evaluations made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl.rollout._conversations import Conversations
from async_rl.rollout._conversations import ScoredGroup
from async_rl.rollout._prompts import UNTRAINED_TICKETS
from async_rl.rollout._prompts import PromptEncoder
from async_rl.runtime._gather import gather_scored
from async_rl.runtime._hosts import Hosts
from async_rl.types import LENGTH
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
  """Returns the mean over prompts and half the width of its 95 % interval.

  The interval is a normal approximation for independent prompts; it is infinite for a single one.
  """
  half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
  return float(np.mean(values)), half


def complete(
  sampler: sampling.Sampler,
  encoder: PromptEncoder,
  requests: Sequence[Request],
  samples: int,
  rewards: tasks.RewardPool,
  between_chunks: Callable[[], None] | None = None,
  hosts: Hosts | None = None,
) -> list[ScoredGroup]:
  """Completes `requests` with an idle sampler under its current weights, including the turns of a tool.

  Several processes deal the requests among themselves, each with a sampler of its own, and all return the same.

  Args:
    sampler: the sampler.
    encoder: the encoder of prompts and answers.
    requests: the requests, of distinct tickets.
    samples: K, the sampler's group size.
    rewards: the pool that scores and answers; answers are awaited after every chunk, so samples cannot influence one
      another.
    between_chunks: called before each chunk; what it raises ends the work.
    hosts: the processes; `None` for this one alone.

  Returns:
    The groups in the order of the requests.
  """

  def work(own: Sequence[Request]) -> tuple[list[ScoredGroup], list[float]]:
    return _complete(sampler, encoder, own, samples, rewards, between_chunks), []

  return _deal(hosts, requests, work)[0]


def _deal(
  hosts: Hosts | None,
  requests: Sequence[Request],
  work: Callable[[Sequence[Request]], tuple[list[ScoredGroup], list[float]]],
) -> tuple[list[ScoredGroup], list[float]]:
  """Has each process work on its share of the requests; returns the groups and proxies of all, in order."""
  hosts = hosts or Hosts()
  found = hosts.agree(lambda: work(requests[hosts.index :: hosts.count]))
  return gather_scored(hosts, *found, [request.prompt for request in requests])


def _complete(
  sampler: sampling.Sampler,
  encoder: PromptEncoder,
  requests: Sequence[Request],
  samples: int,
  rewards: tasks.RewardPool,
  between_chunks: Callable[[], None] | None,
) -> list[ScoredGroup]:
  """Completes the requests of this process."""
  conversations = Conversations(sampler, encoder, rewards, samples)
  for request in requests:
    conversations.submit(request)
  while not sampler.idle:
    if between_chunks is not None:
      between_chunks()
    for completion in sampler.step():
      conversations.process_completion(completion)
    conversations.resume_answered(wait=True)
  conversations.wait_for_rewards()
  return conversations.pop_complete()


def evaluate(
  sampler: sampling.Sampler,
  encoder: PromptEncoder,
  prompts: Sequence[Prompt],
  rewards: tasks.RewardPool,
  samples: int = 1,
  *,
  proxy: tasks.Scorer | None = None,
  between_chunks: Callable[[], None] | None = None,
  hosts: Hosts | None = None,
) -> tuple[dict[str, float], list[ScoredGroup]]:
  """Completes `prompts` with an idle sampler under its current weights and scores the completions.

  Several processes deal the prompts among themselves, each with a sampler of its own, and all return the same.

  Args:
    sampler: the sampler.
    encoder: the encoder of prompts and answers.
    prompts: the prompts to complete.
    rewards: the judge.
    samples: K, the number of samples of each prompt.
    proxy: the scorer that replaces the judge in training, such as a reward model.
    between_chunks: called before each chunk; what it raises ends the work.
    hosts: the processes of the run; `None` for this one alone.

  Returns:
    The metrics `accuracy` (mean reward), `interval` (half the width of its 95 % interval; for two prompts or more),
    `length` (mean drawn tokens), `truncated` (share that hit the length limit), `failures` (number of rewards that
    failed, whose stand-ins are part of the accuracy) and, with `proxy`, its mean reward; and the groups in the order of
    the prompts.
  """
  requests = [encoder.encode(UNTRAINED_TICKETS + i, prompt) for i, prompt in enumerate(prompts)]

  def work(own: Sequence[Request]) -> tuple[list[ScoredGroup], list[float]]:
    groups = _complete(sampler, encoder, own, samples, rewards, between_chunks)
    return groups, [] if proxy is None else _score(proxy, encoder, groups)

  groups, proxies = _deal(hosts, requests, work)
  completions = [c for group in groups for c in group.completions]
  accuracy, interval = mean_and_interval(np.array([[r.value for r in group.results] for group in groups]).mean(axis=1))
  metrics = {
    "accuracy": accuracy,
    **({"interval": interval} if len(groups) > 1 else {}),
    "length": float(np.mean([np.count_nonzero(c.mask) for c in completions])),
    "truncated": float(np.mean([c.finish == LENGTH for c in completions])),
    "failures": float(sum(result.failed for group in groups for result in group.results)),
  }
  if proxy is not None:
    metrics["proxy"] = float(np.mean(proxies))
  return metrics, groups


def _score(scorer: tasks.Scorer, encoder: PromptEncoder, groups: Sequence[ScoredGroup]) -> list[float]:
  """Returns the rewards by `scorer` of all samples of the groups."""
  decode = encoder.decode_last_turn
  futures = [scorer.submit(g.request.prompt, decode(c), c.finish) for g in groups for c in g.completions]
  return [future.result().value for future in futures]


def measure_distance(learner: learning.Learner, params: models.Params, groups: Sequence[ScoredGroup]) -> float:
  """Returns the mean over completions of log pi - log pi_ref, an unbiased estimate of the KL of whole sequences.

  Args:
    learner: the learner, with a reference policy.
    params: the policy's parameters, which drew the completions at the temperature at which the learner scores.
    groups: the completions.
  """
  count = sum(len(group.completions) for group in groups)
  unscored = [Group(g.request, g.completions, np.zeros(len(g.completions), np.float32)) for g in groups]
  batch = learning.pack(unscored, dataclasses.replace(learner.shape, sequences=count))
  reference = _fetch(learner.score_reference(params, batch))
  return float(np.sum(batch.logprobs - reference, where=batch.mask) / count)


def _fetch(array: jax.Array) -> np.ndarray:
  """Returns an array on the host, of whatever processes the devices that have it are."""
  if array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)
  return multihost_utils.process_allgather(array, tiled=True)
