"""The ESS ratio against float64 numpy, and what `scale_by_ess` does with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers

HALF = jnp.array([0.0, 0.0, -100.0, -100.0])  # two of four sequences carry all the weight


def slow_ess_ratio(log_weights):
  weights = np.exp(np.asarray(log_weights, np.float64))
  return weights.sum() ** 2 / (weights**2).sum() / weights.size


@pytest.mark.parametrize("shape", [(1,), (2,), (37,), (8, 5)])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
def test_ratio_is_that_of_the_formula(shape, spread):
  log_weights = np.random.default_rng(0).normal(size=shape) * spread
  np.testing.assert_allclose(stabilizers.ess_ratio(log_weights), slow_ess_ratio(log_weights), rtol=1e-5)


def test_worked_example():
  # Weights 1, 2, 3: (1 + 2 + 3)^2 = 36 over 1 + 4 + 9 = 14, over B = 3: 36 / 42 = 6 / 7.
  np.testing.assert_allclose(stabilizers.ess_ratio(jnp.log(jnp.array([1.0, 2.0, 3.0]))), 6 / 7, rtol=1e-6)


def test_common_factor_cancels_even_where_exp_would_overflow():
  log_weights = np.random.default_rng(1).normal(size=16)
  for shift in (-1e4, -100.0, 100.0, 1e4):
    np.testing.assert_allclose(stabilizers.ess_ratio(log_weights + shift), slow_ess_ratio(log_weights), rtol=1e-2)


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
  assert float(stabilizers.ess_ratio(jnp.array(log_weights, jnp.float32))) == pytest.approx(expected)


def test_mask_equals_leaving_rows_out():
  log_weights = np.random.default_rng(2).normal(size=(6, 4))
  where = np.arange(24).reshape(6, 4) % 3 > 0
  np.testing.assert_allclose(
    stabilizers.ess_ratio(np.where(where, log_weights, np.nan), where), slow_ess_ratio(log_weights[where]), rtol=1e-5
  )
  assert float(stabilizers.ess_ratio(log_weights, np.zeros_like(where))) == 0.0


def test_mask_of_another_shape_is_refused():
  with pytest.raises(ValueError, match=r"shape of log_weights, got \(3,\) and \(4,\)"):
    stabilizers.ess_ratio(HALF, jnp.ones(3, bool))


def test_ratio_does_not_depend_on_dtype_or_order():
  log_weights = np.random.default_rng(3).normal(size=64).astype(jnp.bfloat16)
  expected = slow_ess_ratio(log_weights.astype(np.float64))
  assert stabilizers.ess_ratio(log_weights).dtype == jnp.float32
  np.testing.assert_allclose(stabilizers.ess_ratio(log_weights), expected, rtol=1e-5)
  np.testing.assert_allclose(stabilizers.ess_ratio(log_weights[::-1]), expected, rtol=1e-5)


def scaled(log_weights, update=1.0, mask=None, **arguments):
  transformation = stabilizers.scale_by_ess(**arguments)
  state = transformation.init(jnp.zeros(1))
  updates, state = transformation.update(
    jnp.array([update]), state, log_weights=log_weights, log_weights_mask=mask, on_policy=False
  )
  return float(updates[0]), state


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    ({}, 0.5**0.5),
    ({"power": 1.0}, 0.5),
    ({"power": 0.0}, 1.0),
    ({"reference": 0.8}, (0.5 / 0.8) ** 0.5),
    ({"reference": 0.4}, 1.0),  # never scales up
    ({"power": 1.0, "reference": 0.8}, 0.5 / 0.8),
  ],
)
def test_scale_is_that_of_equation_5(arguments, expected):
  update, state = scaled(HALF, update=-3.0, **arguments)
  assert update == pytest.approx(-3.0 * expected)
  assert float(state.ess_scale) == pytest.approx(expected)
  assert float(state.ess_ratio) == pytest.approx(0.5)


def test_rows_without_trained_tokens_do_not_count():
  assert scaled(HALF)[0] == pytest.approx(0.5**0.5)
  assert scaled(HALF, mask=jnp.array([True, True, False, False]))[0] == pytest.approx(1.0)


def test_an_unusable_batch_takes_no_step():
  assert scaled(jnp.array([jnp.nan, 0.0]))[0] == 0.0
  assert scaled(HALF, mask=jnp.zeros(4, bool))[0] == 0.0


def test_running_reference_follows_on_policy_batches_only():
  transformation = stabilizers.scale_by_ess(power=1.0, reference_decay=0.75)
  state = transformation.init(jnp.zeros(1))

  def update(log_weights, on_policy):
    nonlocal state
    updates, state = transformation.update(jnp.ones(1), state, log_weights=log_weights, on_policy=on_policy)
    return float(updates[0])

  assert update(HALF, False) == pytest.approx(0.5)  # nothing measured yet: relative to 1
  assert update(HALF, True) == pytest.approx(1.0)  # the first on-policy batch sets the reference to 0.5
  assert float(state.ess_reference) == pytest.approx(0.5)
  assert update(jnp.array([0.0, -100.0, -100.0, -100.0]), False) == pytest.approx(0.25 / 0.5)
  update(jnp.zeros(4), jnp.array(True))
  assert float(state.ess_reference) == pytest.approx(0.75 * 0.5 + 0.25 * 1.0)
  update(jnp.array([jnp.nan]), True)  # no measurement
  assert float(state.ess_reference) == pytest.approx(0.625)
  assert int(state.ess_reference_count) == 2


def test_running_reference_insists_on_its_argument():
  transformation = stabilizers.scale_by_ess(reference_decay=0.9)
  with pytest.raises(TypeError, match="needs the extra argument on_policy"):
    transformation.update(jnp.ones(1), transformation.init(jnp.zeros(1)), log_weights=HALF)


def test_log_weights_must_be_one_per_sequence():
  transformation = stabilizers.scale_by_ess()
  with pytest.raises(ValueError, match=r"shape \[B\], got shape \(4, 1\)"):
    transformation.update(jnp.ones(1), transformation.init(jnp.zeros(1)), log_weights=HALF[:, None])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"power": -0.5}, "power must be at least 0, got power=-0.5"),
    ({"reference": 0.0}, "reference must be above 0, got reference=0.0"),
    ({"reference_decay": 1.0}, r"reference_decay must be in \[0, 1\), got reference_decay=1.0"),
    ({"power": float("nan")}, "got power=nan"),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    stabilizers.scale_by_ess(**arguments)


def train(optimizer, log_weights, steps=20):
  params = jnp.array([1.0, -2.0])
  state = optimizer.init(params)
  for step in range(steps):
    gradient = params + 0.1 * jnp.sin(jnp.arange(2.0) + step)
    updates, state = optimizer.update(gradient, state, params, log_weights=log_weights)
    params = optax.apply_updates(params, updates)
  return params


def test_before_adam_the_scale_cancels():
  # epsilon is set small, as it is the only thing in Adam that knows the size of a gradient.
  adam = optax.adam(1e-2, eps=1e-12)
  plain = train(optax.chain(adam, stabilizers.scale_by_ess(power=0.0)), HALF)
  before = train(optax.chain(stabilizers.scale_by_ess(), adam), HALF)
  after = train(optax.chain(adam, stabilizers.scale_by_ess()), HALF)
  np.testing.assert_allclose(before, plain, rtol=1e-5)
  assert np.all(np.abs(np.asarray(after - plain)) > 1e-2)


def test_after_adamw_it_is_a_learning_rate_and_scales_the_weight_decay():
  scale = 0.5**0.5
  np.testing.assert_allclose(
    train(optax.chain(optax.adamw(1e-2, weight_decay=0.1), stabilizers.scale_by_ess()), HALF),
    train(optax.adamw(1e-2 * scale, weight_decay=0.1), HALF),
    rtol=1e-5,
  )
  between = optax.chain(
    optax.scale_by_adam(),
    stabilizers.scale_by_ess(),
    optax.add_decayed_weights(0.1),
    optax.scale_by_learning_rate(1e-2),
  )
  np.testing.assert_allclose(
    train(between, HALF), train(optax.adamw(1e-2 * scale, weight_decay=0.1 / scale), HALF), rtol=1e-5
  )


def test_ratio_of_a_sharded_batch_is_that_of_the_whole():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  log_weights = np.random.default_rng(4).normal(size=64).astype(np.float32)
  sharded = jax.device_put(log_weights, jax.NamedSharding(mesh, jax.P("data")))
  ratio = jax.jit(stabilizers.ess_ratio)(sharded)
  assert ratio.sharding.is_fully_replicated
  np.testing.assert_allclose(ratio, slow_ess_ratio(log_weights), rtol=1e-5)
