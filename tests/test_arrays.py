"""The shared array functions against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import _arrays
from async_rl import losses
from async_rl import stabilizers


def slow_ess_ratio(log_weights):
  weights = np.exp(np.asarray(log_weights, np.float64))
  return weights.sum() ** 2 / (weights**2).sum() / weights.size


@pytest.mark.parametrize("shape", [(1,), (2,), (37,), (8, 5)])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
def test_ratio_is_that_of_the_formula(shape, spread):
  log_weights = np.random.default_rng(0).normal(size=shape) * spread
  np.testing.assert_allclose(_arrays.ess_ratio(log_weights), slow_ess_ratio(log_weights), rtol=1e-5)


def test_worked_example():
  # Weights 1, 2, 3: (1 + 2 + 3)^2 = 36 over 1 + 4 + 9 = 14, over B = 3: 36 / 42 = 6 / 7.
  np.testing.assert_allclose(_arrays.ess_ratio(jnp.log(jnp.array([1.0, 2.0, 3.0]))), 6 / 7, rtol=1e-6)


def test_common_factor_cancels_even_where_exp_would_overflow():
  log_weights = np.random.default_rng(1).normal(size=16)
  for shift in (-1e4, -100.0, 100.0, 1e4):
    np.testing.assert_allclose(_arrays.ess_ratio(log_weights + shift), slow_ess_ratio(log_weights), rtol=1e-2)


@pytest.mark.parametrize(
  ("log_weights", "expected"),
  [
    ([1e4, 0.0, 0.0, 0.0], 0.25),
    ([1e4, -1e4, 1e4, -1e4], 0.5),
    ([-1e4] * 4, 1.0),
    ([3.0], 1.0),
    ([0.0, 0.0, -np.inf, -np.inf], 0.5),
    ([-np.inf, -np.inf], 0.0),
    ([np.nan, 0.0], 0.0),
    ([np.inf, 0.0], 0.0),
    ([np.inf, -np.inf], 0.0),
    ([], 0.0),
  ],
)
def test_extremes_have_their_stated_value(log_weights, expected):
  assert float(_arrays.ess_ratio(jnp.array(log_weights, jnp.float32))) == pytest.approx(expected)


def test_mask_equals_leaving_rows_out():
  log_weights = np.random.default_rng(2).normal(size=(6, 4))
  mask = np.arange(24).reshape(6, 4) % 3 > 0
  np.testing.assert_allclose(
    _arrays.ess_ratio(np.where(mask, log_weights, np.nan), mask), slow_ess_ratio(log_weights[mask]), rtol=1e-5
  )
  assert float(_arrays.ess_ratio(log_weights, np.zeros_like(mask))) == 0.0


def test_mask_of_another_shape_is_refused():
  with pytest.raises(ValueError, match=r"mask's shape \(3,\), got log_weights.shape=\(4,\)"):
    _arrays.ess_ratio(jnp.zeros(4), jnp.ones(3, bool))


def test_ratio_does_not_depend_on_dtype_or_order():
  log_weights = np.random.default_rng(3).normal(size=64).astype(jnp.bfloat16)
  expected = slow_ess_ratio(log_weights.astype(np.float64))
  assert _arrays.ess_ratio(log_weights).dtype == jnp.float32
  np.testing.assert_allclose(_arrays.ess_ratio(log_weights), expected, rtol=1e-5)
  np.testing.assert_allclose(_arrays.ess_ratio(log_weights[::-1]), expected, rtol=1e-5)


def test_ratio_of_a_sharded_batch_is_that_of_the_whole():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  log_weights = np.random.default_rng(4).normal(size=64).astype(np.float32)
  sharded = jax.device_put(log_weights, jax.NamedSharding(mesh, jax.P("data")))
  ratio = jax.jit(_arrays.ess_ratio)(sharded)
  assert ratio.sharding.is_fully_replicated
  np.testing.assert_allclose(ratio, slow_ess_ratio(log_weights), rtol=1e-5)


def test_truncation_comes_before_the_sums():
  # Weights 4, 1, 1 become 2, 1, 1: 16 over 6, over 3.
  log_weights = jnp.log(jnp.array([4.0, 1.0, 1.0]))
  np.testing.assert_allclose(_arrays.ess_ratio(log_weights, cap=2.0), 16 / 18, rtol=1e-6)
  np.testing.assert_allclose(_arrays.ess_ratio(log_weights), 36 / 54, rtol=1e-6)
  with pytest.raises(ValueError, match=r"\*cap\* must be a number above 0, got cap=0"):
    _arrays.ess_ratio(log_weights, cap=0)


def test_a_mask_that_is_not_bool_is_refused():
  with pytest.raises(TypeError, match="mask.dtype=int32"):
    _arrays.ess_ratio(jnp.zeros(2), jnp.ones(2, jnp.int32))


def test_losses_and_stabilizers_have_one_ess_ratio():
  assert losses.ess_ratio is stabilizers.ess_ratio is _arrays.ess_ratio


def test_dot_and_squared_norm_are_summed_in_float32_over_all_leaves():
  x = {"a": jnp.full((1000,), 0.1, jnp.bfloat16), "b": jnp.array([[2.0]])}
  y = {"a": jnp.full((1000,), 3.0, jnp.bfloat16), "b": jnp.array([[-1.0]])}
  exact = float(jnp.bfloat16(0.1))
  assert _arrays.tree_dot(x, y).dtype == jnp.float32
  np.testing.assert_allclose(_arrays.tree_dot(x, y), 3000 * exact - 2.0, rtol=1e-5)
  np.testing.assert_allclose(_arrays.tree_squared_norm(x), 1000 * exact**2 + 4.0, rtol=1e-5)
  assert float(_arrays.tree_squared_norm({})) == 0.0
