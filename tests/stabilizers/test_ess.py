"""What `scale_by_ess` does with the ESS ratio of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers

HALF = jnp.array([0.0, 0.0, -100.0, -100.0])  # two of four sequences carry all the weight


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
    ({"on_policy_ratio": 0.8}, (0.5 / 0.8) ** 0.5),
    ({"on_policy_ratio": 0.4}, 1.0),  # never scales up
    ({"power": 1.0, "on_policy_ratio": 0.8}, 0.5 / 0.8),
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


def test_an_unusable_batch_takes_no_step_and_is_counted():
  nan, rows = jnp.array([jnp.nan, 0.0]), jnp.zeros(2)
  assert scaled(nan)[0] == 0.0
  assert scaled(HALF, mask=jnp.zeros(4, bool))[0] == 0.0
  assert scaled(nan, power=0.0)[0] == 0.0  # 0 ** 0 is 1
  assert scaled(nan, update=jnp.nan)[0] == 0.0  # what made the weights NaN often made the update NaN
  transformation = stabilizers.scale_by_ess()
  state, counts = transformation.init(rows), []
  for log_weights in (rows, nan, nan, rows):
    _, state = transformation.update(rows, state, log_weights=log_weights)
    counts.append(int(state.ess_undefined_count))
  assert counts == [0, 1, 2, 2]


def test_an_update_that_is_not_finite_is_not_hidden_by_a_usable_batch():
  assert np.isnan(scaled(HALF, update=jnp.nan)[0])


def test_the_tracked_ratio_follows_on_policy_batches_only():
  on_policy_ratio = stabilizers.track_on_policy_ratio(decay=0.75)
  transformation = optax.inject_hyperparams(stabilizers.scale_by_ess)(power=1.0, on_policy_ratio=on_policy_ratio)
  state = transformation.init(jnp.zeros(1))

  def update(log_weights, on_policy):
    nonlocal state
    updates, state = transformation.update(jnp.ones(1), state, log_weights=log_weights, on_policy=on_policy)
    return float(updates[0])

  ratio = lambda: float(optax.tree.get(state, "on_policy_ess_ratio"))
  assert update(HALF, False) == pytest.approx(0.5)  # nothing measured yet: relative to 1
  assert update(HALF, True) == pytest.approx(1.0)  # the first on-policy batch sets the ratio to 0.5
  assert ratio() == pytest.approx(0.5)
  assert update(jnp.array([0.0, -100.0, -100.0, -100.0]), False) == pytest.approx(0.25 / 0.5)
  update(jnp.zeros(4), jnp.array(True))
  assert ratio() == pytest.approx(0.75 * 0.5 + 0.25 * 1.0)
  update(jnp.array([jnp.nan]), True)  # no measurement
  assert ratio() == pytest.approx(0.625)
  assert int(optax.tree.get(state, "on_policy_batch_count")) == 2


def test_the_tracked_ratio_starts_where_it_is_told_and_counts_masked_rows_out():
  tracker = stabilizers.track_on_policy_ratio(initial=0.7)
  state = tracker.init()
  assert float(tracker(state)) == pytest.approx(0.7)
  mask = jnp.array([True, True, False, True])
  state = tracker.update(state, log_weights=HALF, log_weights_mask=mask, on_policy=True)
  assert float(state.on_policy_ess_ratio) == pytest.approx(2 / 3)
  with pytest.raises(ValueError, match=r"shape \[B\]"):
    tracker.update(state, log_weights=HALF[None], on_policy=True)


def test_the_tracked_ratio_moves_by_a_tenth_by_default():
  tracker = stabilizers.track_on_policy_ratio()
  state = tracker.init()
  assert float(tracker(state)) == 1.0
  for log_weights in (HALF, jnp.zeros(4)):
    state = tracker.update(state, log_weights=log_weights, on_policy=True)
  assert float(state.on_policy_ess_ratio) == pytest.approx(0.9 * 0.5 + 0.1)


def test_the_tracked_ratio_insists_on_its_arguments():
  make = optax.inject_hyperparams(stabilizers.scale_by_ess)
  transformation = make(on_policy_ratio=stabilizers.track_on_policy_ratio(0.9))
  state = transformation.init(jnp.zeros(1))
  with pytest.raises(TypeError, match="on_policy"):
    transformation.update(jnp.ones(1), state, log_weights=HALF)


def test_the_on_policy_ratio_can_be_scheduled():
  schedule = optax.linear_schedule(1.0, 0.5, 2)
  transformation = optax.inject_hyperparams(stabilizers.scale_by_ess)(power=1.0, on_policy_ratio=schedule)
  state, factors = transformation.init(jnp.zeros(1)), []
  for _ in range(3):
    updates, state = transformation.update(jnp.ones(1), state, log_weights=HALF)
    factors.append(float(updates[0]))
  np.testing.assert_allclose(factors, [0.5, 0.5 / 0.75, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
  "ratio", [optax.constant_schedule(0.7), stabilizers.track_on_policy_ratio()], ids=["schedule", "tracked"]
)
def test_a_schedule_without_injection_is_refused_with_the_remedy(ratio):
  with pytest.raises(ValueError, match="wrap scale_by_ess in optax.inject_hyperparams"):
    stabilizers.scale_by_ess(on_policy_ratio=ratio)


def test_the_advice_for_shard_map_works_under_check_vma():
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  transformation = stabilizers.scale_by_ess(power=1.0)
  log_weights = np.random.default_rng(0).normal(size=8).astype(np.float32)
  params = jnp.ones(3)

  def update(local):
    axis = "data"
    whole = jnp.zeros((jax.lax.axis_size(axis), *local.shape), local.dtype).at[jax.lax.axis_index(axis)].set(local)
    log_weights = jax.lax.psum(whole, axis).reshape(-1)
    return transformation.update(params, transformation.init(params), log_weights=log_weights)

  sharded = jax.shard_map(update, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
  updates, state = jax.jit(sharded)(log_weights)
  expected, expected_state = transformation.update(params, transformation.init(params), log_weights=log_weights)
  np.testing.assert_allclose(updates, expected, rtol=1e-6)
  np.testing.assert_allclose(state.ess_ratio, expected_state.ess_ratio, rtol=1e-6)


def test_log_weights_must_be_one_per_sequence():
  transformation = stabilizers.scale_by_ess()
  with pytest.raises(ValueError, match=r"shape \[B\], got log_weights.shape=\(4, 1\)"):
    transformation.update(jnp.ones(1), transformation.init(jnp.zeros(1)), log_weights=HALF[:, None])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"power": -0.5}, r"\*power\* must be a number at least 0, got power=-0.5"),
    ({"on_policy_ratio": 0.0}, r"\*on_policy_ratio\* must be a number above 0, got on_policy_ratio=0.0"),
    ({"on_policy_ratio": float("inf")}, "got on_policy_ratio=inf"),
    ({"power": np.float64(-1)}, "got power=-1.0"),
    ({"power": jnp.float32(-1)}, "got power=-1.0"),
    ({"power": float("nan")}, "got power=nan"),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    stabilizers.scale_by_ess(**arguments)


@pytest.mark.parametrize(("arguments", "message"), [({"decay": 1.0}, "decay=1.0"), ({"initial": 0}, "initial=0")])
def test_bad_arguments_of_the_tracker_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    stabilizers.track_on_policy_ratio(**arguments)


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
