"""The lag controller cuts on alarm, waits for the cut to show, and recovers slowly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import stabilizers

GOOD, BAD = 0.8, 0.05


def run(controller, ess_ratios, cosines=None):
  cosines = [0.0] * len(ess_ratios) if cosines is None else cosines
  state, allowed = controller.init(), []
  update = jax.jit(controller.update)
  for ess_ratio, cosine in zip(ess_ratios, cosines, strict=True):
    lag, state = update(state, ess_ratio=ess_ratio, cosine=cosine)
    allowed.append(int(lag))
  return allowed


def test_healthy_training_keeps_the_largest_lag():
  assert run(stabilizers.control_lag(8, patience=2), [GOOD] * 10) == [8] * 10


def test_low_ess_halves_the_lag_and_waits_before_the_next_cut():
  # The first cut is followed by 8 + 1 updates without another, the second by 4 + 1, the third by 2 + 1.
  allowed = run(stabilizers.control_lag(8, decay=0.0), [BAD] * 30)
  assert allowed == [4] * 10 + [2] * 6 + [1] * 4 + [0] * 10


@pytest.mark.parametrize("signal", ["ess", "cosine"])
def test_means_restart_after_a_cut(signal):
  """What was seen before the cut must not count towards the next one."""
  values = [GOOD] * 10 + [BAD] * 6 + [GOOD] * 9 + [GOOD, BAD, BAD]  # the cut, then as many updates as it holds, then
  if signal == "ess":  # running means of 0.8, 0.43, 0.3; the old mean, 0.247, would go on to 0.36, 0.3, 0.248
    allowed = run(stabilizers.control_lag(8, decay=0.8, patience=100), values)
  else:
    controller = stabilizers.control_lag(8, cosine_ceiling=0.75, decay=0.8, patience=100)
    allowed = run(controller, [1.0] * len(values), [1 - value for value in values])
  assert allowed == [8] * 15 + [4] * 13


def test_the_first_observation_after_a_cut_stands_alone():
  controller = stabilizers.control_lag(8)
  assert run(controller, [BAD] + [GOOD] * 9 + [0.26] * 3) == [4] * 13
  assert run(controller, [GOOD] * 13, [0.9] + [0.0] * 9 + [0.49] * 3) == [4] * 13


def test_never_below_the_smallest_lag():
  assert run(stabilizers.control_lag(8, 3, decay=0.0), [BAD] * 20)[-1] == 3


def test_high_cosine_halves_the_lag_too():
  controller = stabilizers.control_lag(8, decay=0.0)
  assert run(controller, [GOOD] * 3, [0.9, 0.0, 0.0]) == [4, 4, 4]
  assert run(controller, [GOOD] * 3, [-0.9, 0.4, 0.0]) == [8, 8, 8]


def test_recovers_one_step_per_patience():
  controller = stabilizers.control_lag(4, decay=0.0, patience=3)
  assert run(controller, [BAD] + [GOOD] * 14) == [2] * 8 + [3] * 3 + [4] * 4


def test_one_outlier_among_good_batches_is_smoothed_away():
  assert run(stabilizers.control_lag(8, decay=0.8), [GOOD] * 5 + [BAD] + [GOOD] * 5) == [8] * 11


def test_unmeasured_signals_are_no_evidence():
  controller = stabilizers.control_lag(8, decay=0.0, patience=100)
  assert run(controller, [jnp.nan] * 5, [jnp.nan] * 5) == [8] * 5
  assert run(controller, [BAD, jnp.nan], [jnp.nan, 0.0]) == [4, 4]


def test_limits_can_be_switched_off():
  assert run(stabilizers.control_lag(8, ess_floor=0.0, decay=0.0), [BAD] * 3) == [8] * 3
  assert run(stabilizers.control_lag(8, cosine_ceiling=1.0, decay=0.0), [GOOD] * 3, [1.0] * 3) == [8] * 3


def test_defaults_cut_at_a_quarter_and_a_half_and_recover_after_twenty():
  controller = stabilizers.control_lag(8)
  assert run(controller, [0.26] * 5, [0.49] * 5) == [8] * 5
  assert run(controller, [0.24] * 5) == [4] * 5
  assert run(controller, [GOOD] * 5, [0.51] * 5) == [4] * 5
  assert run(controller, [0.24] + [GOOD] * 30).index(5) == 1 + 8 + 20  # the cut, 8 + 1 ignored, 20 without alarm
  # The newest weighs at least a fifth: 0.8 * 0.3 + 0.2 * 0.01 = 0.242 after many, and 0.8 * 0.3 + 0.2 * 0.1 = 0.26.
  assert run(controller, [0.3] * 10 + [0.01])[-1] == 4
  assert run(controller, [0.3] * 10 + [0.1])[-1] == 8


def test_closes_the_loop():
  """Where the ESS ratio falls with lag, the controller finds the lag that training bears."""
  controller = stabilizers.control_lag(64, decay=0.5, patience=10)

  def step(state, _):
    ess_ratio = jnp.exp(-state.allowed_lag / 8.0)  # below 0.25 from lag 11.1 on
    allowed, state = controller.update(state, ess_ratio=ess_ratio, cosine=0.0)
    return state, allowed

  _, allowed = jax.lax.scan(step, controller.init(), length=600)
  assert int(allowed[0]) == 32
  assert 5 <= int(jnp.min(allowed[200:])) <= int(jnp.max(allowed[200:])) <= 12


def test_same_under_vmap_as_one_by_one():
  controller = stabilizers.control_lag(16, decay=0.0)
  ess = np.random.default_rng(0).uniform(size=(3, 20)).astype(np.float32)

  def scan(ratios):
    return jax.lax.scan(lambda s, r: controller.update(s, ess_ratio=r, cosine=0.0)[::-1], controller.init(), ratios)[1]

  np.testing.assert_array_equal(jax.vmap(scan)(ess), [run(controller, row) for row in ess])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"min_lag": 9}, r"\*min_lag\* must be an integer at least 0 and at most 8, got min_lag=9"),
    ({"ess_floor": 1.5}, r"\*ess_floor\* must be a number at least 0 and at most 1"),
    ({"cosine_ceiling": -1.0}, r"\*cosine_ceiling\* must be a number at least 0 and at most 1"),
    ({"decay": 1.0}, r"\*decay\* must be a number at least 0 and below 1"),
    ({"patience": 0}, r"\*patience\* must be an integer at least 1, got patience=0"),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    stabilizers.control_lag(8, **arguments)
