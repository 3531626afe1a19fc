"""Advantages, aggregations and rewards against float64 references, with their edge cases."""

import functools

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from async_rl import losses

GROUPS = np.array([2, 0, 1, 0, 2, 1, 2, 0])  # interleaved, uneven (3, 2, 3)


def rows(seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=8).astype(np.float32), rng.normal(0, 1.0, 8).astype(np.float32), rng.integers(1, 9, 8)


def close(got, expected):
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_against_the_reference(seed):
  rewards, log_weights, lengths = rows(seed)
  squares = np.random.default_rng(seed + 9).uniform(0.1, 5.0, 8).astype(np.float32)
  weights = np.exp(log_weights.astype(np.float64))
  r, of_group = rewards.astype(np.float64), functools.partial(reference.group_advantages, rewards, GROUPS)
  close(losses.reinforce_advantages(rewards, GROUPS, 3), r)
  close(losses.grpo_advantages(rewards, GROUPS, 3), of_group(normalize_std=True))
  close(losses.grpo_advantages(rewards, GROUPS, 3, normalize_std=False), of_group())
  close(losses.rloo_advantages(rewards, GROUPS, 3), reference.rloo_advantages(rewards, GROUPS))
  positive = np.abs(rewards)
  close(losses.maxrl_advantages(positive, GROUPS, 3), reference.maxrl_advantages(positive.astype(np.float64), GROUPS))
  close(losses.opo_advantages(rewards, GROUPS, 3, lengths=lengths), of_group(lengths))
  close(losses.importance_mean_advantages(rewards, GROUPS, 3, log_weights=log_weights), of_group(weights))
  opob = functools.partial(losses.opob_advantages, rewards, GROUPS, 3, log_weights=log_weights, squared_norms=squares)
  close(opob(), of_group(weights**2 * squares))
  close(opob(normalize_std=True), of_group(weights**2 * squares, normalize_std=True))
  code = weights**2 * np.minimum(weights, 0.7) ** 2 * squares
  close(opob(code_cap=0.7), of_group(code))
  assert not np.allclose(opob(code_cap=0.7), opob(code_cap=np.inf))
  close(opob(code_cap=np.inf), of_group(weights**4 * squares))


def test_worked_examples():
  # Two groups, interleaved: rewards 3, 0, 0 (mean 1, std √2) and 1, 0 (mean ½, std ½).
  rewards, groups = jnp.array([3.0, 1.0, 0.0, 0.0, 0.0]), jnp.array([0, 1, 0, 1, 0])
  s = np.sqrt(2.0)
  close(losses.grpo_advantages(rewards, groups, 2), [2 / s, 1, -1 / s, -1, -1 / s])
  close(losses.grpo_advantages(rewards, groups, 2, normalize_std=False), [2, 0.5, -1, -0.5, -1])
  close(losses.rloo_advantages(rewards, groups, 2), [3, 1, -1.5, -1, -1.5])
  close(losses.maxrl_advantages(rewards, groups, 2), [2, 1, -1, -1, -1])  # over the means 1 and ½
  close(losses.maxrl_advantages(jnp.zeros(5), groups, 2), np.zeros(5))
  # Lengths 1, 1, 2, 3, 3: baselines 3·1/6 and 1·1/4.
  lengths = jnp.array([1, 1, 2, 3, 3])
  close(losses.opo_advantages(rewards, groups, 2, lengths=lengths), [2.5, 0.75, -0.5, -0.25, -0.5])
  # w = 2, 1, 1, 1, 1 and n² = 1, 4, 1, 1, 1: baselines 3·4/6 = 2 and 1·4/5.
  w, n = jnp.log(jnp.array([2.0, 1.0, 1.0, 1.0, 1.0])), jnp.array([1.0, 4.0, 1.0, 1.0, 1.0])
  close(losses.opob_advantages(rewards, groups, 2, log_weights=w, squared_norms=n), [1, 0.2, -2, -0.8, -2])
  # The code's form with cap 8: w⁴ = 16, baseline 3·16/18.
  got = losses.opob_advantages(rewards, groups, 2, log_weights=w, squared_norms=n, code_cap=8.0)
  close(got, [1 / 3, 0.2, -8 / 3, -0.8, -8 / 3])
  # Importance-weighted means: 3·2/4 and 1·1/2.
  close(losses.importance_mean_advantages(rewards, groups, 2, log_weights=w), [1.5, 0.5, -1.5, -0.5, -1.5])


@pytest.mark.parametrize("name", losses.ADVANTAGES)
def test_edge_cases_give_zero(name):
  """Equal rewards, whatever their rounding, and a group of one: exactly zero, for every method with a baseline."""
  rewards = np.array([0.1] * 7 + [1e6 + 0.1] * 3 + [5.0], np.float32)
  groups = np.array([0] * 7 + [1] * 3 + [2])
  extras = dict(lengths=np.arange(11), log_weights=np.linspace(-1e4, 1e4, 11), squared_norms=np.arange(11) * 1e-3)
  extras["squared_logit_norms"] = extras["squared_norms"]
  function = losses.ADVANTAGES[name]
  needed = {k: jnp.asarray(extras[k], jnp.float32) for k in losses.needs(function)}
  got = function(rewards, groups, 3, **needed)
  np.testing.assert_array_equal(got, rewards if name == "reinforce" else 0.0)
  single = function(rewards[:1], groups[:1], 1, **{k: v[:1] for k, v in needed.items()})
  np.testing.assert_array_equal(single, rewards[:1] if name == "reinforce" else 0.0)


def test_extreme_weights_pick_the_largest_and_stay_finite():
  rewards, groups = jnp.array([1.0, 0.0, 0.0]), jnp.array([0, 0, 0])
  weights = jnp.array([1e4, -1e4, 0.0])
  # w² n² of the first dwarfs the rest: the baseline is its reward.
  close(losses.importance_mean_advantages(rewards, groups, 1, log_weights=weights), [0, -1, -1])
  squares = jnp.array([1e-30, 1e30, 1.0])
  close(losses.opob_advantages(rewards, groups, 1, log_weights=weights, squared_norms=squares), [0, -1, -1])
  # No norm at all (nothing trained in the group): the plain mean.
  zero = jnp.zeros(3)
  close(losses.opob_advantages(rewards, groups, 1, log_weights=weights, squared_norms=zero), [2 / 3, -1 / 3, -1 / 3])
  close(losses.opo_advantages(rewards, groups, 1, lengths=zero), [2 / 3, -1 / 3, -1 / 3])


def test_standard_deviation_is_skipped_below_its_floor():
  rewards, groups = jnp.array([0.0, 1e-8]), jnp.array([0, 0])
  close(losses.grpo_advantages(rewards, groups, 1) / 1e-9, [-5, 5])  # std 5e-9
  close(losses.grpo_advantages(rewards * 10, groups, 1), [-1, 1])


def test_opob_is_opo_by_length_and_the_mean_for_equal_norms():
  rewards, _, lengths = rows()
  mask = np.arange(9) < lengths[:, None]
  zero = np.zeros(8, np.float32)
  by_length = losses.opob_advantages(
    rewards, GROUPS, 3, log_weights=zero, squared_norms=losses.squared_norms_by_length(mask)
  )
  close(by_length, losses.opo_advantages(rewards, GROUPS, 3, lengths=lengths))
  equal = losses.opob_advantages(rewards, GROUPS, 3, log_weights=zero + 3, squared_norms=zero + 2)
  close(equal, losses.grpo_advantages(rewards, GROUPS, 3, normalize_std=False))


def test_zero_variance_groups():
  rewards, groups = jnp.array([1.0, 5.0, 0.0, 5.0, 2.0]), jnp.array([0, 1, 0, 1, 3])
  np.testing.assert_array_equal(losses.informative_rows(rewards, groups, 5), [True, False, True, False, False])
  assert float(losses.zero_variance_fraction(rewards, groups, 5)) == pytest.approx(2 / 3)  # groups 2 and 4 are absent
  assert float(losses.zero_variance_fraction(rewards[:0], groups[:0], 5)) == 0
  padded = losses.zero_variance_fraction(rewards, jnp.array([0, 1, 0, 1, losses.NO_GROUP]), 5)
  assert float(padded) == 0.5


@pytest.mark.parametrize("count_empty", [False, True])
@pytest.mark.parametrize(("method", "max_length"), [("token_mean", None), ("sequence_mean", None), ("constant", 9)])
def test_aggregation_against_the_reference(method, max_length, count_empty):
  rng = np.random.default_rng(0)
  loss, mask = rng.normal(size=(5, 4)).astype(np.float32), rng.random((5, 4)) < 0.6
  mask[2], mask[3] = False, True
  loss = np.where(mask, loss, np.nan)  # what is masked is never read
  options = dict(max_length=max_length, count_empty=count_empty)
  numerator, denominator = losses.aggregate(loss, mask, method, **options)
  expected = reference.aggregate(loss.astype(np.float64), mask, method, **options)
  close(losses.divide_or_zero(numerator, denominator), expected)


def test_aggregation_options_change_the_result():
  loss, mask = jnp.array([[1.0, 3.0], [5.0, 0.0], [0.0, 0.0]]), jnp.array([[True, True], [True, False], [False, False]])
  value = lambda *args, **kwargs: float(losses.divide_or_zero(*losses.aggregate(loss, *args, **kwargs)))
  assert value(mask, "token_mean") == 3  # 9/3
  assert value(mask, "sequence_mean") == 3.5  # (2 + 5)/2
  assert value(mask, "sequence_mean", count_empty=True) == pytest.approx(7 / 3)
  assert value(mask, "constant", max_length=1) == 4.5  # 9/2
  assert value(mask, "constant", max_length=3) == 1.5
  assert value(mask, "constant", max_length=3, count_empty=True) == 1
  keep = mask.at[0, 0].set(False)  # a rejected token (its loss would be 0) leaves the denominator with `keep`
  rejected = jnp.where(keep, loss, 0)
  assert float(losses.divide_or_zero(*losses.aggregate(rejected, mask, "token_mean"))) == pytest.approx(8 / 3)
  assert float(losses.divide_or_zero(*losses.aggregate(rejected, keep, "token_mean"))) == 4
  with pytest.raises(ValueError, match="method='mean'"):
    losses.aggregate(loss, mask, "mean")
  with pytest.raises(ValueError, match="max_length=None"):
    losses.aggregate(loss, mask, "constant")
  with pytest.raises(ValueError, match="max_length=3"):
    losses.aggregate(loss, mask, "token_mean", max_length=3)


def test_division_by_an_empty_batch_is_zero_with_zero_gradient():
  assert float(losses.divide_or_zero(0.0, 0.0)) == 0
  assert jax.grad(losses.divide_or_zero)(3.0, 0.0) == 0
  assert jax.grad(losses.divide_or_zero, argnums=1)(3.0, 0.0) == 0
  close(losses.divide_or_zero(jnp.array([3.0, 1.0]), jnp.float32(2.0)), [1.5, 0.5])


def test_overlong_penalty():
  got = losses.overlong_penalty(np.array([0, 60, 80, 85, 100, 1000]), max_length=100, buffer=20)
  close(got, [0, 0, 0, -0.25, -1, -1])
  close(losses.overlong_penalty(np.array([80]), max_length=100, buffer=40), [-0.5])
  close(losses.overlong_penalty(np.array([80]), max_length=90, buffer=20), [-0.5])
  with pytest.raises(ValueError, match="buffer=0"):
    losses.overlong_penalty(np.array([1]), max_length=10, buffer=0)


def test_rewards_with_penalties():
  rewards, truncated = jnp.array([0.5, 0.5, 0.5]), jnp.array([False, True, False])
  close(losses.missing_end_rewards(rewards, truncated), [0.5, -1, 0.5])
  close(losses.missing_end_rewards(rewards, truncated, reward=0.0), [0.5, 0, 0.5])
  mask = jnp.array([[True, False, True, False], [False, True, False, False], [False] * 4])
  lp, ref = jnp.full((3, 4), -1.0), jnp.full((3, 4), -3.0)
  # d = 2 per trained token: 0.5 − 0.05·4, 0.5 − 0.05·2, 0.5.
  close(losses.kl_penalized_rewards(rewards, lp, ref, mask), [0.3, 0.4, 0.5])
  close(losses.kl_penalized_rewards(rewards, lp, ref, mask, coefficient=0.1), [0.1, 0.3, 0.5])
  per_token = losses.token_rewards(rewards, lp, ref, mask)
  close(per_token, [[-0.1, 0, 0.4, 0], [0, 0.4, 0, 0], [0, 0, 0, 0]])
  close(losses.token_rewards(rewards, lp, ref, mask, coefficient=1.0)[0], [-2, 0, -1.5, 0])
  grad = jax.grad(lambda x: losses.kl_penalized_rewards(rewards, x, ref, mask).sum())(lp)
  assert not grad.any()  # a reward is data


def test_rewards_and_masks_of_other_shapes_are_refused():
  two, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
  for rewards in (jnp.ones((2, 1)), jnp.ones((2, 3)), jnp.ones(3)):
    for call in (losses.kl_penalized_rewards, losses.token_rewards):
      with pytest.raises(ValueError, match=r"\*rewards\* must be \[B\] for a mask of shape \(2, 3\)"):
        call(rewards, two, two, mask)
    with pytest.raises(ValueError, match=r"\*rewards\* must be \[B\] for a mask of shape \(2, 3\)"):
      losses.final_rewards(rewards, mask)
  with pytest.raises(ValueError, match=r"truncated.*\(2,\).*\(2, 1\)"):
    losses.missing_end_rewards(jnp.ones(2), jnp.zeros((2, 1), bool))
  for call in (losses.squared_norms_by_length, lambda mask: losses.final_rewards(jnp.ones(2), mask)):
    with pytest.raises(TypeError, match="mask"):
      call(2 * mask.astype(int))


def test_an_infinite_weight_is_all_of_a_group():
  rewards, groups = jnp.array([3.0, 1.0, 2.0]), jnp.zeros(3, int)
  for log_weights, baseline in (([jnp.inf, 0, 0], 3), ([jnp.inf, jnp.inf, -jnp.inf], 2), ([-jnp.inf] * 3, 2)):
    found = losses.importance_mean_advantages(rewards, groups, 1, log_weights=jnp.array(log_weights))
    close(found, rewards - baseline)


def test_errors_name_the_value():
  with pytest.raises(ValueError, match=r"rewards.*vector.*\(2, 1\)"):
    losses.grpo_advantages(jnp.ones((2, 1)), jnp.zeros((2, 1), int), 1)
  with pytest.raises(ValueError, match=r"lengths.*\(2,\).*\(3,\)"):
    losses.opo_advantages(jnp.ones(2), jnp.zeros(2, int), 1, lengths=jnp.ones(3))
