"""Training loop shared by supervised and reward-model training, on completions that no policy drew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence

import jax
import numpy as np
import optax

from async_rl import learning
from async_rl import models
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import TrainState


def train_on_groups(
  learner: learning.Learner | learning.PairLearner,
  params: models.Params | None,
  data: Iterator[Group],
  groups: int,
  steps: int,
  seed: int,
) -> Iterator[tuple[int, TrainState, dict[str, jax.Array]]]:
  """Takes `steps` optimizer steps and yields each one's number (from 1), state and metrics.

  A step is launched once the one before is done: a signal, or a look at the state, never waits for a long queue.

  Args:
    learner: the learner, whose batch has `groups` groups.
    params: the first parameters; `None` starts from random ones.
    data: the groups, without end.
    groups: the number of groups in a batch.
    steps: the number of optimizer steps.
    seed: the seed of random parameters.
  """
  state = learner.init(jax.random.key(seed), params)
  previous: dict[str, jax.Array] = {}
  for step in range(1, steps + 1):
    batch = learning.pack(list(itertools.islice(data, groups)), learner.shape)
    jax.block_until_ready(previous)
    state, previous = learner.step(state, learner.put(batch))
    yield step, state, previous


def make_adam(learning_rate: float) -> optax.GradientTransformation:
  """Makes a clipped Adam whose learning rate is reached after 20 steps."""
  rate = optax.linear_schedule(0.0, learning_rate, 20)
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.95))


def make_completion(tokens: Sequence[int], mask: Sequence[bool], sample: int = 0) -> Completion:
  """Makes a completion that no policy drew, to be trained where `mask` is True."""
  logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
  return Completion(0, sample, np.asarray(tokens, np.int32), logprobs, versions, np.asarray(mask, bool), STOP)
