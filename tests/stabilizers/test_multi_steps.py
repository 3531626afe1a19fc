"""Stabilizers inside `optax.MultiSteps`: what is advised works, and what fails does so loudly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers


def test_multi_steps_hands_over_the_last_micro_batch_s_log_weights_only():
  """Documented, and the reason to accumulate outside: the ratio is of the last micro-batch, not of the whole."""
  optimizer = optax.MultiSteps(stabilizers.scale_by_ess(power=1.0), 2)
  params = jnp.zeros(1)
  state = optimizer.init(params)
  micro_batches = jnp.array([0.0, 0.0]), jnp.array([0.0, -100.0])
  for log_weights in micro_batches:
    updates, state = optimizer.update(jnp.ones(1), state, params, log_weights=log_weights)
  assert float(updates[0]) == pytest.approx(0.5)
  assert float(stabilizers.ess_ratio(jnp.concatenate(micro_batches))) == pytest.approx(0.75)


def test_the_whole_batch_s_log_weights_with_every_micro_batch_are_exact():
  optimizer = optax.MultiSteps(optax.chain(optax.adam(1e-2), stabilizers.scale_by_ess()), 2)
  plain = optax.chain(optax.adam(1e-2), stabilizers.scale_by_ess())
  rng = np.random.default_rng(0)
  params = jnp.asarray(rng.normal(size=3), jnp.float32)
  state, plain_state = optimizer.init(params), plain.init(params)
  for _ in range(3):
    log_weights = jnp.asarray(rng.normal(size=8), jnp.float32)
    gradients = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
    for gradient in gradients:
      updates, state = optimizer.update(gradient, state, params, log_weights=log_weights)
    expected, plain_state = plain.update(jnp.mean(gradients, axis=0), plain_state, params, log_weights=log_weights)
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


def test_multi_steps_in_a_chain_drops_extra_arguments_and_that_fails_loudly():
  optimizer = optax.chain(optax.identity(), optax.MultiSteps(stabilizers.scale_by_ess(), 2))
  params = jnp.zeros(1)
  with pytest.raises(TypeError, match="log_weights"):
    optimizer.update(jnp.ones(1), optimizer.init(params), params, log_weights=jnp.zeros(4))


def test_multi_steps_around_alignment_compares_accumulated_gradients():
  gradients = jnp.array([[1.0, 0.0], [1.0, 2.0], [0.0, 3.0], [0.0, -1.0]])
  accumulating = optax.MultiSteps(stabilizers.control_alignment(optax.sgd(0.1)), 2)
  state, update = accumulating.init(jnp.zeros(2)), jax.jit(accumulating.update)
  for gradient in gradients:
    updates, state = update(gradient, state, jnp.zeros(2))
  plain = stabilizers.control_alignment(optax.sgd(0.1))
  plain_state = plain.init(jnp.zeros(2))
  for gradient in gradients.reshape(2, 2, 2).mean(1):
    expected, plain_state = plain.update(gradient, plain_state, jnp.zeros(2))
  np.testing.assert_allclose(updates, expected, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.inner_opt_state, plain_state)
