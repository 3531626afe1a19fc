"""A supervised warm start: teach a random policy a task's format until it is right often enough to learn by reward."""

from __future__ import annotations

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl.runtime._parts import UNTRAINED_TICKETS
from async_rl.runtime._parts import Parts
from async_rl.runtime._parts import evaluate
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group


def warm_start(
  parts: Parts,
  *,
  accuracy: float,
  learning_rate: float = 2e-3,
  sequences: int = 64,
  check_every: int = 50,
  max_steps: int = 5000,
) -> models.Params:
  """Trains on `task.solution`s until sampled completions earn a mean reward of `accuracy`.

  It stops at an accuracy and not after a number of steps, because policies leave the phase in which they find out
  how a task works at very different times.

  Args:
    parts: of the run; the task must be a `tasks.SupervisedTask`.
    accuracy: mean reward, at the run's temperature, on held-out prompts at which to stop.
    learning_rate: of Adam, after a short linear warm-up.
    sequences: solutions in a batch.
    check_every: steps between checks.
    max_steps: when to give up.

  Returns:
    The parameters, on the learner mesh.

  Raises:
    RuntimeError: if `accuracy` is not reached in `max_steps`.
  """
  experiment, task = parts.experiment, cast(tasks.SupervisedTask, parts.task)
  shape = learning.BatchShape(
    sequences=sequences,
    row_tokens=experiment.batch_shape().row_tokens,
    rows=experiment.rows,
    completion_tokens=experiment.max_completion_tokens,
  )
  learner = learning.Learner(
    parts.policy,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.0, learning_rate, 20))),
    lambda x: losses.reinforce(x.logprobs, x.behaviour, jnp.ones(x.mask.shape[0]), x.mask),
    lambda batch: batch.rewards,
    shape,
    parts.meshes.learner,
    aggregate=functools.partial(losses.aggregate, method="token_mean"),
  )
  state = learner.init(jax.random.key(experiment.seed))
  rng = np.random.default_rng(experiment.seed)
  probe = parts.held_out[:32] or [parts.prompts[i] for i in range(min(32, len(parts.prompts)))]
  reached = 0.0
  with tasks.RewardPool(task, workers=0) as rewards:
    for step in range(1, max_steps + 1):
      batch = learning.pack([_solved(parts, task, rng) for _ in range(sequences)], shape)
      state, metrics = learner.step(state, learner.put(batch))
      if step % check_every == 0:
        params = jax.jit(functools.partial(sampling.prepare_weights, parts.policy))(state.params)
        parts.engine.set_weights(jax.device_get(params), 0)
        reached = evaluate(parts, parts.engine, probe, rewards)["accuracy"]
        print(f"warm start: step {step}, loss {float(metrics['loss']):.3f}, accuracy {reached:.2f}", flush=True)
        if reached >= accuracy:
          return state.params
  raise RuntimeError(
    f"The warm start reached accuracy {reached:.2f} in {max_steps} steps, {accuracy} was asked for; "
    "give it more steps, another learning rate or a larger policy."
  )


def _solved(parts: Parts, task: tasks.SupervisedTask, rng: np.random.Generator) -> Group:
  """A random training prompt with a correct completion, as a group of one."""
  prompt = parts.prompts[int(rng.integers(len(parts.prompts)))]
  text = task.solution(prompt, rng)
  tokens = np.array([*parts.tokenizer.encode(text), parts.tokenizer.stop_ids[0]], np.int32)
  zeros = np.zeros(len(tokens), np.float32)
  completion = Completion(0, 0, tokens, zeros, zeros.astype(np.int32), np.ones(len(tokens), bool), STOP)
  return Group(parts.encode(UNTRAINED_TICKETS, prompt), (completion,), np.ones(1, np.float32))
