"""Leading weights: against the steps that momentum really takes, in every place they are read from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers


def params():
  return {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1])}


def gradient(step):
  return {"w": jnp.cos(jnp.arange(4.0).reshape(2, 2) + step), "b": jnp.array([0.3 * step])}


@pytest.mark.parametrize("lag", [0, 1, 3, 10])
def test_momentum_gets_where_the_lead_is_if_no_gradients_come(lag):
  optimizer = optax.chain(optax.sgd(0.1, momentum=0.8), stabilizers.lead_by_momentum(0.8, lag))
  w, state = params(), optimizer.init(params())
  for step in range(4):
    updates, state = optimizer.update(gradient(step), state, w)
    w = optax.apply_updates(w, updates)
  leading = stabilizers.leading_params(w, state)
  nothing = optax.tree.zeros_like(w)
  for _ in range(lag):
    updates, state = optimizer.update(nothing, state, w)
    w = optax.apply_updates(w, updates)
  for name in w:
    np.testing.assert_allclose(leading[name], w[name], rtol=1e-5)


def test_adam_gets_near_the_lead():
  optimizer = optax.chain(optax.adam(1e-2, b1=0.9, b2=0.9999), stabilizers.lead_by_momentum(0.9, 10))
  w, state = params(), optimizer.init(params())
  for step in range(200):
    updates, state = optimizer.update(gradient(0.05 * step), state, w)
    w = optax.apply_updates(w, updates)
  start, leading = w, stabilizers.leading_params(w, state)
  for _ in range(10):
    updates, state = optimizer.update(optax.tree.zeros_like(w), state, w)
    w = optax.apply_updates(w, updates)
  for name in w:
    np.testing.assert_allclose(leading[name] - start[name], w[name] - start[name], rtol=0.02)


def test_without_a_lead_the_parameters_are_what_they_are():
  w = params()
  assert stabilizers.leading_params(w, optax.adam(1e-3).init(w)) is w


def test_parameters_that_are_masked_out_do_not_lead():
  transformation = optax.masked(stabilizers.lead_by_momentum(0.5, 1), {"w": True, "b": False})
  w = params()
  _, state = transformation.update(gradient(1), transformation.init(w), w)
  leading = stabilizers.leading_params(w, state)
  np.testing.assert_allclose(leading["w"], w["w"] + 0.5 * gradient(1)["w"], rtol=1e-6)
  np.testing.assert_array_equal(leading["b"], w["b"])


def test_parts_may_lead_by_momenta_of_their_own():
  part = lambda lag: optax.chain(optax.sgd(1.0, momentum=0.5), stabilizers.lead_by_momentum(0.5, lag))
  optimizer = optax.partition({"near": part(1), "far": part(2)}, {"w": "near", "b": "far"})
  w = params()
  updates, state = optimizer.update(gradient(1), optimizer.init(w), w)
  lead = jax.tree.map(lambda a, b: a - b, stabilizers.leading_params(w, state), w)
  np.testing.assert_allclose(lead["w"], 0.5 * updates["w"], rtol=1e-5)
  np.testing.assert_allclose(lead["b"], 0.75 * updates["b"], rtol=1e-5)


def test_parameters_may_be_called_lead():
  w = {"lead": jnp.ones(2)}
  optimizer = optax.sgd(0.1, momentum=0.5)
  _, state = optimizer.update({"lead": jnp.ones(2)}, optimizer.init(w), w)
  assert stabilizers.leading_params(w, state) is w


def test_a_skipped_step_keeps_the_lead():
  inner = optax.chain(optax.sgd(1.0, momentum=0.5), stabilizers.lead_by_momentum(0.5, 1))
  optimizer = stabilizers.control_alignment(inner, low=0.2, high=0.8)
  w, state = params(), optimizer.init(params())
  _, state = optimizer.update(gradient(1), state, w)
  before = optax.tree.get(state, "lead")
  updates, state = optimizer.update(gradient(1), state, w)  # the same gradient again: cosine 1
  np.testing.assert_array_equal(updates["w"], jnp.zeros((2, 2)))
  np.testing.assert_array_equal(optax.tree.get(state, "lead")["w"], before["w"])


def test_the_lead_can_be_stored_in_bfloat16():
  transformation = stabilizers.lead_by_momentum(0.5, 1, storage_dtype="bfloat16")
  w = params()
  _, state = transformation.update(gradient(1), transformation.init(w), w)
  leading = stabilizers.leading_params(w, state)
  assert state.lead["w"].dtype == jnp.bfloat16
  assert leading["w"].dtype == w["w"].dtype
  np.testing.assert_allclose(leading["w"], w["w"] + 0.5 * gradient(1)["w"], atol=4e-3)


@pytest.mark.parametrize(("options", "text"), [((1.0, 1), "decay=1.0"), ((0.9, -1), "lag=-1")])
def test_arguments_out_of_range_are_named(options, text):
  with pytest.raises(ValueError, match=text):
    stabilizers.lead_by_momentum(*options)
