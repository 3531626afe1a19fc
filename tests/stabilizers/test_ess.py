"""What `scale_by_ess` does with the ESS ratio of a batch."""

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
    ({"power": -0.5}, r"\*power\* must be a number at least 0, got power=-0.5"),
    ({"reference": 0.0}, r"\*reference\* must be a number above 0, got reference=0.0"),
    ({"reference_decay": 1.0}, r"\*reference_decay\* must be a number at least 0 and below 1, got reference_decay=1.0"),
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
