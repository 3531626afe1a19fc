"""The stabilizers in other people's training loops, with the real libraries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from async_rl import stabilizers

STEPS, LR = 5, 1e-2


def make_optimizer():
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR))
  return optax.chain(stabilizers.control_alignment(inner, low=0.1, high=0.95), stabilizers.scale_by_ess())


def make_batch(step):
  """Features [B, 3], actions [B], advantages [B] and behavior log-probabilities [B] of a contextual bandit."""
  rng = np.random.default_rng(step)
  features = rng.normal(size=(16, 3)).astype(np.float32)
  return features, rng.integers(0, 4, 16), rng.normal(size=16).astype(np.float32), np.full(16, -np.log(4), np.float32)


def policy_loss(logits, actions, advantages, behavior):
  """Importance-weighted REINFORCE, and the log-weights that the optimizer needs."""
  logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
  log_weights = logprobs - behavior
  return -jnp.mean(jnp.exp(log_weights) * advantages), jax.lax.stop_gradient(log_weights)


INITIAL = {"kernel": np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4), "bias": np.zeros(4, np.float32)}


@pytest.fixture(scope="module")
def by_hand():
  """The plain optax loop that the other libraries must reproduce: final parameters and ESS ratio of every step."""
  optimizer = make_optimizer()
  params = jax.tree.map(jnp.asarray, INITIAL)

  @jax.jit
  def train_step(params, opt_state, features, *rest):
    loss = lambda p: policy_loss(features @ p["kernel"] + p["bias"][None], *rest)
    gradients, log_weights = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params, log_weights=log_weights)
    return optax.apply_updates(params, updates), opt_state

  opt_state, ratios = optimizer.init(params), []
  for step in range(STEPS):
    params, opt_state = train_step(params, opt_state, *make_batch(step))
    ratios.append(float(optax.tree.get(opt_state, "ess_ratio")))
  return params, ratios


def test_plain_optax(by_hand):
  params, ratios = by_hand
  assert all(0 < ratio < 0.9 for ratio in ratios)
  assert np.all(np.abs(np.asarray(params["kernel"]) - INITIAL["kernel"]) > 0)
  # The first step, from the definitions: Adam's first step is the sign, then decay, then the scale.
  features, *rest = make_batch(0)
  initial = jax.tree.map(jnp.asarray, INITIAL)
  loss = lambda p: policy_loss(features @ p["kernel"] + p["bias"][None], *rest)
  gradients, log_weights = jax.grad(loss, has_aux=True)(initial)
  weights = np.exp(np.asarray(log_weights, np.float64))
  ratio = weights.sum() ** 2 / (weights**2).sum() / 16
  assert ratios[0] == pytest.approx(ratio, rel=1e-5)
  optimizer = make_optimizer()
  update = jax.jit(optimizer.update)
  updates, _ = update(gradients, optimizer.init(initial), initial, log_weights=log_weights)
  expected = -LR * np.sqrt(ratio) * (np.sign(gradients["kernel"]) + 1e-4 * INITIAL["kernel"])
  np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-3)


def test_flax_nnx(by_hand):
  class Policy(nnx.Module):
    def __init__(self):
      self.linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      self.linear.kernel[...] = INITIAL["kernel"]

    def __call__(self, features):
      return features @ self.linear.kernel[...] + self.linear.bias[...][None]

  policy = Policy()
  optimizer = nnx.Optimizer(policy, make_optimizer(), wrt=nnx.Param)

  @nnx.jit
  def train_step(policy, optimizer, features, *rest):
    loss = lambda policy: policy_loss(policy(features), *rest)
    gradients, log_weights = nnx.grad(loss, has_aux=True)(policy)
    optimizer.update(policy, gradients, log_weights=log_weights)

  ratios = []
  for step in range(STEPS):
    train_step(policy, optimizer, *make_batch(step))
    ratios.append(float(optax.tree.get(nnx.as_pure(optimizer.opt_state), "ess_ratio")))
  np.testing.assert_allclose(ratios, by_hand[1], rtol=1e-5)
  np.testing.assert_allclose(policy.linear.kernel[...], by_hand[0]["kernel"], rtol=1e-5)
  with pytest.raises(TypeError, match="log_weights"):
    optimizer.update(policy, nnx.grad(lambda policy: jnp.sum(policy(jnp.ones((1, 3)))))(policy))


def test_equinox(by_hand):
  policy = eqx.nn.Linear(3, 4, key=jax.random.key(0))
  policy = eqx.tree_at(lambda p: (p.weight, p.bias), policy, (jnp.asarray(INITIAL["kernel"].T), jnp.zeros(4)))
  optimizer = make_optimizer()
  opt_state = optimizer.init(eqx.filter(policy, eqx.is_inexact_array))

  @eqx.filter_jit
  def train_step(policy, opt_state, features, *rest):
    loss = lambda policy: policy_loss(jax.vmap(policy)(features), *rest)
    gradients, log_weights = eqx.filter_grad(loss, has_aux=True)(policy)
    params = eqx.filter(policy, eqx.is_inexact_array)
    updates, opt_state = optimizer.update(gradients, opt_state, params, log_weights=log_weights)
    return eqx.apply_updates(policy, updates), opt_state

  ratios = []
  for step in range(STEPS):
    policy, opt_state = train_step(policy, opt_state, *make_batch(step))
    ratios.append(float(optax.tree.get(opt_state, "ess_ratio")))
  np.testing.assert_allclose(ratios, by_hand[1], rtol=1e-5)
  np.testing.assert_allclose(policy.weight.T, by_hand[0]["kernel"], rtol=1e-5)


def test_leading_params_of_flax_nnx():
  policy = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(policy, stabilizers.lead_by_momentum(optax.sgd(0.1, momentum=0.5), 2), wrt=nnx.Param)
  before = nnx.as_pure(nnx.state(policy, nnx.Param))
  optimizer.update(policy, nnx.grad(lambda policy: jnp.sum(policy(jnp.ones((1, 3)))))(policy))
  params, opt_state = nnx.state(policy, nnx.Param), optimizer.opt_state
  leading = stabilizers.leading_params(nnx.as_pure(params), nnx.as_pure(opt_state))
  expected = jax.tree.map(lambda old, new: new + 0.75 * (new - old), before, nnx.as_pure(params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), leading, expected)
  for state in (opt_state, nnx.state(opt_state)):  # never silently a lead of 0
    with pytest.raises(ValueError, match="nnx.as_pure"):
      stabilizers.leading_params(params, state)


def test_leading_params_of_equinox():
  policy = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
  optimizer = stabilizers.lead_by_momentum(optax.sgd(0.1, momentum=0.5), 2)
  opt_state = optimizer.init(eqx.filter(policy, eqx.is_inexact_array))
  gradient = eqx.filter_grad(lambda policy: jnp.sum(policy(jnp.ones(3))))(policy)
  updates, opt_state = optimizer.update(gradient, opt_state, eqx.filter(policy, eqx.is_inexact_array))
  policy = eqx.apply_updates(policy, updates)
  leading = stabilizers.leading_params(policy, opt_state)
  assert leading.activation is policy.activation
  np.testing.assert_allclose(
    leading.layers[0].weight, policy.layers[0].weight + 0.75 * updates.layers[0].weight, rtol=1e-5
  )
