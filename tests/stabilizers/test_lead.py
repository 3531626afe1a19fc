"""Leading weights: against the steps that optimizers really take, in every place they are read from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers


def params():
  return {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1])}


def gradient(step):
  return {"w": jnp.cos(jnp.arange(4.0).reshape(2, 2) + step), "b": jnp.array([0.1 + 0.2 * step])}


def train(optimizer, steps, w, state, make_gradient):
  update = jax.jit(optimizer.update)
  for step in range(steps):
    updates, state = update(make_gradient(step), state, w)
    w = optax.apply_updates(w, updates)
  return w, state


def no_gradient(step):
  del step
  return optax.tree.zeros_like(params())


WARMUP = optax.linear_schedule(0.0, 1e-2, 8)
COSINE = optax.cosine_decay_schedule(1e-2, 8)
OPTIMIZERS = {
  "momentum": optax.sgd(0.1, momentum=0.8),
  "adam": optax.adam(1e-2),
  "adam, beta2 .95": optax.adam(1e-2, b2=0.95),
  "warm-up": optax.adam(WARMUP),
  "cosine": optax.adam(COSINE),
  "adamw behind clipping": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)),
  "alignment": stabilizers.control_alignment(optax.adam(1e-2), low=0.2, high=2.0),
}


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_lead_is_where_the_optimizer_gets_without_gradients(name, steps):
  lag = 4
  optimizer = stabilizers.lead_by_momentum(OPTIMIZERS[name], lag)
  w, state = train(optimizer, steps, params(), optimizer.init(params()), gradient)
  lead = jax.tree.map(jnp.subtract, stabilizers.leading_params(w, state), w)
  reached, _ = train(OPTIMIZERS[name], lag, w, state.inner_state, no_gradient)
  displacement = jax.tree.map(jnp.subtract, reached, w)
  for part in w:
    assert np.abs(displacement[part]).max() > 1e-4
    np.testing.assert_allclose(lead[part], displacement[part], rtol=1e-3, atol=1e-7)


def test_the_wrapped_optimizer_takes_its_own_steps():
  adam = optax.adamw(1e-2)
  optimizer = stabilizers.lead_by_momentum(adam, 3)
  w, state = train(optimizer, 5, params(), optimizer.init(params()), gradient)
  expected, expected_state = train(adam, 5, params(), adam.init(params()), gradient)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), w, expected)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.inner_state, expected_state)


def test_a_lag_of_zero_leads_by_nothing():
  optimizer = stabilizers.lead_by_momentum(optax.adam(1e-2), 0)
  w, state = train(optimizer, 3, params(), optimizer.init(params()), gradient)
  assert stabilizers.has_lead(state)
  jax.tree.map(np.testing.assert_array_equal, stabilizers.leading_params(w, state), w)


def test_the_steps_ahead_see_the_extra_arguments_of_the_last_batch():
  half = jnp.array([0.0, 0.0, -100.0, -100.0])
  inner = optax.chain(optax.sgd(1.0, momentum=0.5), stabilizers.scale_by_ess(power=1.0))
  optimizer = stabilizers.lead_by_momentum(inner, 1)
  updates, state = optimizer.update(jnp.ones(1), optimizer.init(jnp.zeros(1)), jnp.zeros(1), log_weights=half)
  np.testing.assert_allclose(updates, [-0.5])
  np.testing.assert_allclose(state.lead, [-0.25])


def test_an_optimizer_that_needs_no_parameters_leads_without_them():
  optimizer = stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), 2)
  _, state = optimizer.update(jnp.ones(1), optimizer.init(jnp.zeros(1)))
  np.testing.assert_allclose(state.lead, [-0.75])


def test_a_lead_that_is_not_finite_is_no_lead():
  optimizer = stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), 2)
  _, state = optimizer.update(jnp.array([jnp.nan, 1.0]), optimizer.init(jnp.zeros(2)))
  np.testing.assert_allclose(state.lead, [0.0, -0.75])


def test_parameters_that_are_masked_out_do_not_lead():
  optimizer = optax.masked(stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), 1), {"w": True, "b": False})
  w = params()
  _, state = optimizer.update(gradient(1), optimizer.init(w), w)
  leading = stabilizers.leading_params(w, state)
  np.testing.assert_allclose(leading["w"], w["w"] - 0.5 * gradient(1)["w"], rtol=1e-6)
  np.testing.assert_array_equal(leading["b"], w["b"])


def test_parts_may_lead_by_momenta_of_their_own():
  part = lambda lag: stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), lag)
  optimizer = optax.partition({"near": part(1), "far": part(2)}, {"w": "near", "b": "far"})
  w = params()
  updates, state = optimizer.update(gradient(1), optimizer.init(w), w)
  lead = jax.tree.map(lambda a, b: a - b, stabilizers.leading_params(w, state), w)
  np.testing.assert_allclose(lead["w"], 0.5 * updates["w"], rtol=1e-5)
  np.testing.assert_allclose(lead["b"], 0.75 * updates["b"], rtol=1e-5)


def test_a_state_without_a_lead_is_refused_even_if_parameters_are_called_lead():
  w = {"lead": jnp.ones(2)}
  state = optax.sgd(0.1, momentum=0.5).init(w)
  assert not stabilizers.has_lead(state)
  with pytest.raises(ValueError, match="must hold the state of a lead_by_momentum, got none; add one"):
    stabilizers.leading_params(w, state)


def test_parameters_of_another_structure_are_refused():
  state = stabilizers.lead_by_momentum(optax.sgd(0.1), 1).init(params())
  with pytest.raises(ValueError, match=r"\*params\* must have the structure .*nnx.as_pure"):
    stabilizers.leading_params({"w": params()["w"]}, state)


def test_a_skipped_step_keeps_the_lead():
  inner = stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), 1)
  optimizer = stabilizers.control_alignment(inner, low=0.2, high=0.8)
  w, state = params(), optimizer.init(params())
  _, state = optimizer.update(gradient(1), state, w)
  before = optax.tree.get(state, "lead")
  updates, state = optimizer.update(gradient(1), state, w)  # the same gradient again: cosine 1
  np.testing.assert_array_equal(updates["w"], jnp.zeros((2, 2)))
  np.testing.assert_array_equal(optax.tree.get(state, "lead")["w"], before["w"])


def test_the_lead_can_be_stored_in_bfloat16():
  optimizer = stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), 1, storage_dtype="bfloat16")
  w = params()
  _, state = optimizer.update(gradient(1), optimizer.init(w), w)
  leading = stabilizers.leading_params(w, state)
  assert state.lead["w"].dtype == jnp.bfloat16
  assert leading["w"].dtype == w["w"].dtype
  np.testing.assert_allclose(leading["w"], w["w"] - 0.5 * gradient(1)["w"], atol=4e-3)


@pytest.mark.parametrize("lag", [-1, 1.5, np.int32(-2)])
def test_lags_out_of_range_are_named(lag):
  with pytest.raises(ValueError, match=rf"\*lag\* must be an integer at least 0, got lag={lag}"):
    stabilizers.lead_by_momentum(optax.sgd(0.1), lag)
