"""Completions of given prompts, with their rewards: what evaluations are made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl.rollout._conversations import Conversations
from async_rl.rollout._conversations import ScoredGroup
from async_rl.rollout._prompts import UNTRAINED_TICKETS
from async_rl.rollout._prompts import PromptEncoder
from async_rl.runtime._parts import Parts
from async_rl.types import LENGTH
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
  """Mean over prompts, and half the width of its 95 % interval (normal approximation; prompts are independent)."""
  half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
  return float(np.mean(values)), half


def complete(
  engine: sampling.Sampler,
  encoder: PromptEncoder,
  requests: Sequence[Request],
  samples: int,
  rewards: tasks.RewardPool,
  between_chunks: Callable[[], None] | None = None,
) -> list[ScoredGroup]:
  """Completes `requests` with an idle engine under its current weights, a tool's turns included.

  Args:
    engine: the sampler.
    encoder: the encoder of prompts and answers.
    requests: the requests, of distinct tickets.
    samples: K, the engine's group size.
    rewards: the pool that scores and answers; answers are awaited after every chunk, so samples cannot influence one
      another.
    between_chunks: called before each chunk; what it raises ends the work.

  Returns:
    The groups in the order of the requests.
  """
  conversations = Conversations(engine, encoder, rewards, samples)
  for request in requests:
    conversations.submit(request)
  while not engine.idle:
    if between_chunks is not None:
      between_chunks()
    for completion in engine.step():
      conversations.process_completion(completion)
    conversations.resume_answered(wait=True)
  conversations.wait_for_rewards()
  return conversations.pop_complete()


def evaluate(
  parts: Parts,
  engine: sampling.Sampler,
  prompts: Sequence[Prompt],
  rewards: tasks.RewardPool,
  samples: int = 1,
  *,
  proxy: tasks.Scorer | None = None,
  policy: models.Params | None = None,
  between_chunks: Callable[[], None] | None = None,
) -> dict[str, float]:
  """Completes `prompts` with an idle engine under its current weights and scores the completions.

  Args:
    parts: of the run.
    engine: the sampler.
    prompts: to complete.
    rewards: the judge.
    samples: of each prompt.
    proxy: what stands in for the judge in training, such as a reward model.
    policy: the learner's parameters, to measure their distance to its reference policy; the engine must have the same
      and sample at the run's temperature.
    between_chunks: called before each chunk; what it raises ends the work.

  Returns:
    `accuracy` (mean reward), `interval` (half the width of its 95 % interval; of two prompts or more), `length` (mean
    drawn tokens), `truncated` (share that hit the length limit) and `failures` (number of rewards that failed, whose
    stand-ins are part of the accuracy). With `proxy` its mean reward; with `policy`,
    `kl_reference`, the mean over completions of log pi - log pi_ref: an unbiased estimate of the KL of whole sequences.
  """
  requests = [parts.encoder.encode(UNTRAINED_TICKETS + i, prompt) for i, prompt in enumerate(prompts)]
  groups = complete(engine, parts.encoder, requests, samples, rewards, between_chunks)
  completions = [c for group in groups for c in group.completions]
  accuracy, interval = mean_and_interval(np.array([[r.value for r in group.results] for group in groups]).mean(axis=1))
  found = {
    "accuracy": accuracy,
    **({"interval": interval} if len(groups) > 1 else {}),
    "length": float(np.mean([np.count_nonzero(c.mask) for c in completions])),
    "truncated": float(np.mean([c.finish == LENGTH for c in completions])),
    "failures": float(sum(result.failed for group in groups for result in group.results)),
  }
  if proxy is not None:
    decode = parts.encoder.decode_last_turn
    futures = [proxy.submit(g.request.prompt, decode(c), c.finish) for g in groups for c in g.completions]
    found["proxy"] = float(np.mean([future.result().value for future in futures]))
  if policy is not None:
    found["kl_reference"] = _distance(parts, policy, groups)
  return found


def _distance(parts: Parts, policy: models.Params, groups: Sequence[ScoredGroup]) -> float:
  """Mean over completions of log pi - log pi_ref."""
  count = sum(len(group.completions) for group in groups)
  whole = [Group(g.request, g.completions, np.zeros(len(g.completions), np.float32)) for g in groups]
  batch = learning.pack(whole, dataclasses.replace(parts.learner.shape, sequences=count))
  reference = np.asarray(parts.learner.score_reference(policy, batch))
  return float(np.sum(batch.logprobs - reference, where=batch.mask) / count)
