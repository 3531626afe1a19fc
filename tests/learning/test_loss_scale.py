"""Float16: gradients of small losses keep their precision, and sampler and learner agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from learning_helpers import CONFIG
from learning_helpers import POLICY
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import params_of
from learning_helpers import shape_of
from learning_helpers import start

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl.learning._loss_scale import pull_back
from async_rl.types import Prompt
from async_rl.types import Request


def test_the_gradient_of_small_cotangents_is_not_rounded_to_zero():
  weights = jnp.array([0.5, 3.0, -7.0], jnp.float32)

  def pull(cotangent):
    return (cotangent.astype(jnp.float16) * weights.astype(jnp.float16)).astype(jnp.float32)

  small = jnp.array([3e-9, -1e-9, 0.0], jnp.float32)
  assert not np.any(pull(small))
  np.testing.assert_allclose(pull_back(pull, small, "float16"), small * weights, rtol=1e-3)
  assert not np.any(pull_back(pull, jnp.zeros(3), "float16"))
  assert not np.all(np.isfinite(pull_back(pull, small.at[0].set(jnp.nan), "float16")))


@functools.cache
@functools.cache
def updated(dtype, factor=1.0):
  """The parameters before and after a step of gradient descent on rewards times `factor`, whose rate undoes it."""
  learner = make_learner(
    shape_of(rows=2, row_tokens=40),
    optimizer=optax.sgd(1.0 / factor),
    policy=dataclasses.replace(POLICY, dtype=dtype),
    objective=learning.objective("reinforce", advantages="dr_grpo", aggregate="sequence_mean"),
  )
  groups = [group._replace(rewards=np.float32(factor) * group.rewards) for group in make_groups()]
  state = start(learner)
  before = jax.device_get(state.params)
  state, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
  assert not metrics["update/skipped"]
  return before, jax.device_get(state.params)


def test_small_rewards_give_the_same_gradient_bit_for_bit():
  jax.tree.map(np.testing.assert_array_equal, updated("float16")[1], updated("float16", 2.0**-30)[1])


def gradient(dtype):
  before, after = updated(dtype)
  return np.concatenate([(a - b).ravel() for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)])


def test_the_gradient_is_closer_to_that_of_float32_than_in_bfloat16():
  exact = gradient("float32")
  errors = {dtype: np.linalg.norm(gradient(dtype) - exact) / np.linalg.norm(exact) for dtype in ("bfloat16", "float16")}
  assert errors["float16"] < min(0.004, errors["bfloat16"] / 4), errors


def disagreement(dtype):
  """The mean difference of the log-probabilities of sampler and learner at equal weights."""
  policy = models.Policy(dataclasses.replace(CONFIG, num_layers=6), dtype=dtype)
  params = params_of(dataclasses.replace(policy, dtype="float32"))
  config = sampling.SamplerConfig(slots=16, group_size=8, max_prompt_tokens=8, max_new_tokens=24, length_buckets=1)
  engine = sampling.Engine(policy, config, stop_ids=(), pad_id=0)
  engine.set_weights(params, 0)
  requests = [Request(t, np.arange(3, 9) + t, Prompt(t, "", None)) for t in range(2)]
  done = sampling.generate(engine, requests)
  tokens = np.stack([np.concatenate([requests[c.ticket].tokens, c.tokens]) for c in done])
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  scored = models.score(policy, params, tokens, np.ones_like(tokens), positions).logprobs[:, 6:]
  return np.abs(np.asarray(scored) - np.stack([c.logprobs for c in done])).mean()


def test_sampler_and_learner_agree_better_than_in_bfloat16():
  rough = disagreement("bfloat16")
  assert rough > 0.002
  assert disagreement("float16") < rough / 4
