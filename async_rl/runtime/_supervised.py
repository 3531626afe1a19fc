"""Supervised training on a task's solutions: the start of a run whose policy could not yet learn from rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np

from async_rl import learning
from async_rl import models
from async_rl import tasks
from async_rl.rollout._prompts import UNTRAINED_TICKETS
from async_rl.runtime._evaluation import evaluate
from async_rl.runtime._fit import adam
from async_rl.runtime._fit import fit
from async_rl.runtime._fit import written
from async_rl.runtime._parts import Parts
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt

_PROBE = 32  # held-out prompts of a check
_MOST_TOO_LONG = 1000  # solutions in a row that are left out before it is an error


def train_supervised(
  parts: Parts,
  params: models.Params | None = None,
  *,
  steps: int,
  learning_rate: float,
  accuracy: float | None = None,
  sequences: int = 64,
  check_every: int = 50,
) -> models.Params:
  """Trains on `task.solution`s of random training prompts.

  A warm start of a random policy should stop at an `accuracy` and not after a number of steps, because policies leave
  the phase in which they find out how a task works at very different times.

  Args:
    parts: of the run; the task must be a `tasks.SupervisedTask`. Solutions that exceed the run's limits are left out.
    params: to start from; `None`: random ones.
    steps: optimizer steps, at least 1; with `accuracy`, the most it may take.
    learning_rate: of Adam, reached after 20 steps.
    accuracy: stop once completions of held-out prompts, sampled at the run's temperature, earn this mean reward.
    sequences: solutions in a batch.
    check_every: steps between looks at that.

  Returns:
    The parameters, on the learner mesh.

  Raises:
    RuntimeError: if `accuracy` is not reached in `steps`.
  """
  learner = _make_learner(parts, learning_rate, sequences)
  solutions = _solutions(parts, np.random.default_rng(parts.experiment.seed))
  reached = 0.0
  workers = parts.experiment.reward_workers if parts.encoder.has_tool else 0  # a tool may hang
  with tasks.RewardPool(parts.task, workers, parts.experiment.reward_timeout) as rewards:
    for step, state, metrics in fit(learner, params, solutions, sequences, steps, parts.experiment.seed):
      if step % check_every == 0 or step == steps:
        reached = _probe(parts, state.params, rewards)
        loss = float(metrics["loss"])
        print(f"supervised step {step}: loss {loss:.3f}, accuracy of samples {reached:.2f}", flush=True)
        if accuracy is not None and reached >= accuracy:
          return state.params
  if accuracy is None:
    return state.params
  raise RuntimeError(
    f"Supervised training reached accuracy {reached:.2f} in {steps} steps, {accuracy} was asked for; "
    "give it more steps, another learning rate or a larger policy."
  )


def _make_learner(parts: Parts, learning_rate: float, sequences: int) -> learning.Learner:
  return learning.Learner(
    parts.policy,
    adam(learning_rate),
    learning.likelihood_objective(),
    dataclasses.replace(parts.experiment.batch_shape(), sequences=sequences),
    parts.meshes.learner,
    max_lag=0,
  )


def _probe(parts: Parts, params: models.Params, rewards: tasks.RewardPool) -> float:
  """Mean reward of samples at the run's temperature."""
  prompts = parts.held_out[:_PROBE] or parts.prompts.prompts[:_PROBE]
  parts.engine.set_weights(params, 0)
  return evaluate(parts, parts.engine, prompts, rewards, parts.experiment.samples)["accuracy"]


def _solutions(parts: Parts, rng: np.random.Generator):
  """Yields random training prompts with correct completions, as groups of one, without end."""
  task = cast(tasks.SupervisedTask, parts.task)
  limit, too_long = parts.experiment.max_completion_tokens, 0
  while too_long < _MOST_TOO_LONG:
    prompt = parts.prompts.prompts[int(rng.integers(len(parts.prompts.prompts)))]
    completion = _completion(parts, prompt, task.solution(prompt, rng))
    too_long = too_long + 1 if len(completion.tokens) > limit else 0
    if not too_long:
      yield Group(parts.encoder.encode(UNTRAINED_TICKETS, prompt), (completion,), np.ones(1, np.float32))
  raise ValueError(
    f"{too_long} solutions in a row are longer than max_completion_tokens={limit}, the last one has "
    f"{len(completion.tokens)} tokens; raise max_completion_tokens."
  )


def _completion(parts: Parts, prompt: Prompt, solution: str | Sequence[str]) -> Completion:
  """A solution to be trained on, but for the turns of a tool."""
  tokens: list[int] = []
  mask: list[bool] = []
  for i, text in enumerate([solution] if isinstance(solution, str) else solution):
    drawn = i % 2 == 0
    end = parts.tokenizer.stop_ids[0]
    tokens += [*parts.tokenizer.encode(text), end] if drawn else parts.encoder.encode_answer(prompt, text)
    mask += [drawn] * (len(tokens) - len(mask))
  return written(tokens, mask)
