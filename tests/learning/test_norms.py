"""Exact gradient norms of trajectories: against one gradient per unpacked sequence; what OPOB makes of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import LONGEST
from learning_helpers import POLICY
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import make_mesh
from learning_helpers import params_of
from learning_helpers import shape_of
from learning_helpers import start

from async_rl import learning
from async_rl import models
from async_rl.learning._norms import squared_gradient_norms


def squared_norms(params, groups, policy=POLICY, trained=lambda tree: tree):
  """One sequence at a time, with nothing but padding after it; and the sequences' log-weights."""

  @jax.jit
  @jax.value_and_grad
  def log_probability(params, ids, mask):
    ids = ids[None]
    hidden = policy.hidden(params, ids, jnp.ones_like(ids), jnp.arange(LONGEST)[None])
    logits = jax.nn.log_softmax(policy.logits(params, hidden)[0, :-1])
    logp = jnp.take_along_axis(logits, ids[0, 1:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(mask[1:], logp, 0.0))

  norms, weights = [], []
  for group in groups:
    prompt = group.request.tokens
    for c in group.completions:
      after = (0, LONGEST - len(prompt) - len(c.tokens))
      ids = np.pad(np.concatenate([prompt, c.tokens]), after)
      mask = np.pad(np.concatenate([np.zeros(len(prompt), bool), c.mask]), after)
      value, gradient = log_probability(params, ids, mask)
      norms.append(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(trained(gradient))))
      weights.append(float(value) - float(np.sum(np.where(c.mask, c.logprobs, 0.0))))
  return np.array(norms), np.array(weights)


@pytest.fixture(scope="module")
def groups():
  return make_groups()


@pytest.fixture(scope="module")
def expected(groups):
  return squared_norms(params_of(POLICY), groups)


@pytest.mark.parametrize(
  ("rows", "row_tokens", "axes", "at_once"),
  [
    (1, 20, {}, 1),
    (4, 96, {}, 1),
    (4, 96, {}, 3),  # does not divide them
    (8, 33, dict(data=2, fsdp=2, tensor=2), 1),
    (8, 33, dict(data=2, fsdp=2, tensor=2), 2),
    (8, 20, dict(data=8), 1),
  ],
)
def test_norms_are_those_of_unpacked_sequences(groups, expected, rows, row_tokens, axes, at_once):
  mesh = make_mesh(**axes)
  score = functools.partial(models.score, dataclasses.replace(POLICY, mesh=mesh))
  batch = jax.tree.map(jnp.asarray, learning.pack(groups, shape_of(rows, row_tokens)))
  copies = mesh.shape["data"] * mesh.shape["fsdp"]
  norms = jax.jit(lambda params: squared_gradient_norms(score, params, batch, LONGEST, copies, at_once))
  np.testing.assert_allclose(norms(params_of(POLICY)), expected[0], rtol=1e-4)


def test_with_adapters_they_are_of_the_adapters(groups):
  policy = dataclasses.replace(POLICY, lora=models.LoRA(rank=2))
  params = policy.init(jax.random.key(0))
  params["adapters"] = jax.tree.map(lambda x: x + 0.1, params["adapters"])  # b is zero at the start, and so its effect
  norms, _ = squared_norms(params, groups, policy, lambda gradient: gradient["adapters"])
  batch = jax.tree.map(jnp.asarray, learning.pack(groups, shape_of()))
  found = jax.jit(lambda p: squared_gradient_norms(functools.partial(models.score, policy), p, batch, LONGEST, 1))
  np.testing.assert_allclose(found(params), norms, rtol=1e-4)


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_learner_offers_them_to_opob(groups, expected, at_once):
  norms, log_weights = expected
  rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
  weight = (np.exp(2 * log_weights) * norms).reshape(4, 4)
  baseline = (weight * rewards.reshape(4, 4)).sum(1) / weight.sum(1)
  objective = learning.objective("sequence_tis", advantages="opob")
  learner = make_learner(
    shape_of(prompt_tokens=7), optimizer=optax.sgd(0.1), objective=objective, norm_sequences=at_once
  )
  assert learner.shape.sequence_tokens == LONGEST
  batch = learner.put(learning.pack(groups, learner.shape))
  _, metrics = learner.step(start(learner), batch)
  advantages = rewards - np.repeat(baseline, 4)
  assert float(metrics["advantage/abs_mean"]) == pytest.approx(np.abs(advantages).mean(), rel=1e-3)
