"""Observers observe rightly, and change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers
from async_rl.stabilizers import _gradient_statistics


def run(transformation, gradients):
  state = transformation.init(jax.tree.map(jnp.zeros_like, gradients[0]))
  states = []
  for gradient in gradients:
    updates, state = transformation.update(gradient, state)
    jax.tree.map(np.testing.assert_array_equal, updates, gradient)
    states.append(state)
  return states


def test_norm_and_its_usual_value():
  norms = [1.0, 4.0, 2.0, 3.0]
  states = run(stabilizers.track_norm(decay=0.5, threshold=100.0), [{"a": jnp.array([n])} for n in norms])
  np.testing.assert_allclose([s.grad_norm for s in states], norms)
  # Weights of the newest: 1, 1/2, then max(1 - decay, 1/n) = 1/2; in logarithms.
  expected = [1.0, 2.0, 2.0, np.sqrt(6.0)]
  np.testing.assert_allclose([s.grad_norm_usual for s in states], expected, rtol=1e-6)


def test_spike_is_counted_and_moves_the_usual_norm_no_further_than_the_threshold():
  norms = [1.0, 1.0, 1.0, 1000.0, 1.0, 4.0]
  states = run(stabilizers.track_norm(decay=0.75, threshold=5.0), [jnp.array([n]) for n in norms])
  assert [bool(s.grad_spike) for s in states] == [False, False, False, True, False, False]
  np.testing.assert_allclose(states[3].grad_norm_usual, 5.0**0.25, rtol=1e-6)
  assert int(states[-1].grad_spike_count) == 1


def test_by_default_the_mean_decays_by_a_twentieth_and_a_spike_is_five_times_the_usual():
  steady = [jnp.array([1.0])] * 40
  states = run(stabilizers.track_norm(), [*steady, jnp.array([4.9])])
  np.testing.assert_allclose(states[-1].grad_norm_usual, 4.9**0.05, rtol=1e-5)
  assert not bool(states[-1].grad_spike)
  assert bool(run(stabilizers.track_norm(), [*steady, jnp.array([5.1])])[-1].grad_spike)


def test_lasting_growth_stops_being_a_spike():
  states = run(stabilizers.track_norm(decay=0.8, threshold=3.0), [jnp.array([1.0])] * 5 + [jnp.array([50.0])] * 30)
  assert bool(states[5].grad_spike)
  assert not bool(states[-1].grad_spike)
  np.testing.assert_allclose(states[-1].grad_norm_usual, 50.0, rtol=0.05)


def test_zero_and_nonfinite_norms_stay_out_of_the_usual():
  gradients = [jnp.array([g]) for g in (2.0, 0.0, jnp.nan, jnp.inf, 2.0)]
  transformation = stabilizers.track_norm()
  state = transformation.init(jnp.zeros(1))
  for gradient in gradients:
    _, state = transformation.update(gradient, state)
  assert float(state.grad_norm_usual) == pytest.approx(2.0)
  assert int(state.grad_norm_count) == 2
  assert int(state.grad_nonfinite_count) == 2
  assert int(state.grad_spike_count) == 0


def test_cosine_is_that_of_numpy():
  rng = np.random.default_rng(0)
  vectors = [rng.normal(size=10) + 0.5 for _ in range(5)]
  trees = [{"a": jnp.asarray(v[:6].reshape(2, 3), jnp.float32), "b": jnp.asarray(v[6:], jnp.float32)} for v in vectors]
  expected = [0.0] + [
    x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(vectors[1:], vectors[:-1], strict=True)
  ]
  states = run(stabilizers.track_cosine(), trees)
  np.testing.assert_allclose([s.grad_cosine for s in states], expected, atol=1e-6)


def test_cosine_steps_over_a_nonfinite_gradient():
  transformation = stabilizers.track_cosine()
  state = transformation.init(jnp.zeros(2))
  cosines = []
  for gradient in ([1.0, 0.0], [jnp.nan, 1.0], [3.0, 4.0], [0.0, 0.0], [3.0, 4.0]):
    _, state = transformation.update(jnp.array(gradient), state)
    cosines.append(float(state.grad_cosine))
  np.testing.assert_allclose(cosines, [0.0, 0.0, 0.6, 0.0, 0.0], atol=1e-6)


def test_named_observers_at_both_ends_are_read_apart():
  optimizer = optax.named_chain(
    ("gradient", stabilizers.track_norm()), ("sgd", optax.sgd(0.1)), ("step", stabilizers.track_norm())
  )
  state = optimizer.init(jnp.zeros(1))
  _, state = optimizer.update(jnp.array([3.0]), state)
  assert float(optax.tree.get(state["gradient"], "grad_norm")) == pytest.approx(3.0)
  assert float(optax.tree.get(state["step"], "grad_norm")) == pytest.approx(0.3)


def test_norm_of_a_tree_in_bfloat16_is_summed_in_float32():
  tree = {"w": jnp.full((1000,), 0.1, jnp.bfloat16)}
  norm = _gradient_statistics.global_norm(tree)
  assert norm.dtype == jnp.float32
  np.testing.assert_allclose(norm, np.linalg.norm(np.asarray(tree["w"], np.float64)), rtol=1e-5)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"decay": 1.0}, r"\*decay\* must be a number at least 0 and below 1, got decay=1.0"),
    ({"threshold": 1.0}, r"\*threshold\* must be a number above 1"),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    stabilizers.track_norm(**arguments)
