"""Advantages per sequence: rewards minus a baseline of the sequence's group.

Every function takes `rewards` [B], `groups` int [B] (the group of each sequence, in any order) and the static
`num_groups`, and returns float32 [B]. A row whose group is `NO_GROUP` (padding, or a sample whose reward failed)
belongs to no group: it gets 0 and no statistic counts it. Any other group must be below `num_groups`, which is checked
where `groups` is concrete.
All need the whole batch: compute them before splitting it into micro-batches.

Every baseline here is a convex combination of the group's rewards, so one primitive serves them all:
b = Σ_i softmax(x)_i R_i with the softmax over the group, in log space.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl.losses._aggregation import divide_or_zero
from async_rl.losses._ratios import check_groups

#: A group whose reward standard deviation is at most this is not divided by it.
MIN_STD = 1e-8


def of_group(values: jax.Array, groups: ArrayLike) -> jax.Array:
  """Each row's entry of the per-group *values* [num_groups]; 0 for rows that belong to no group."""
  return values.at[groups].get(mode="fill", fill_value=0)


def above_group_minimum(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """Rewards minus the least of their group: equal rewards become exactly 0, whatever their rounding."""
  rewards = jnp.asarray(rewards, jnp.float32)
  return rewards - of_group(jax.ops.segment_min(rewards, groups, num_groups), groups)


def group_softmax(logits: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """Softmax of *logits* [B] within each group; uniform among the largest where these are infinite."""
  logits = jnp.asarray(logits, jnp.float32)
  top = of_group(jax.ops.segment_max(logits, groups, num_groups), groups)
  weights = jnp.exp(jnp.where(logits == top, 0.0, logits - top))
  return divide_or_zero(weights, of_group(jax.ops.segment_sum(weights, groups, num_groups), groups))


def subtract_baseline(
  rewards: ArrayLike, groups: ArrayLike, num_groups: int, logits: ArrayLike, normalize_std: bool = False
) -> jax.Array:
  """R_i − Σ_j softmax(logits)_j R_j over the group, divided by the group's (population) std where asked and > 1e-8."""
  shifted = above_group_minimum(rewards, groups, num_groups)
  mean = jax.ops.segment_sum(group_softmax(logits, groups, num_groups) * shifted, groups, num_groups)
  advantages = shifted - of_group(mean, groups)
  if normalize_std:
    std = of_group(group_std(rewards, groups, num_groups), groups)
    advantages = advantages / jnp.where(std > MIN_STD, std, 1.0)
  return _grouped_only(advantages, groups, num_groups)


def _grouped_only(advantages: jax.Array, groups: ArrayLike, num_groups: int) -> jax.Array:
  in_group = jnp.logical_and(jnp.asarray(groups) >= 0, jnp.asarray(groups) < num_groups)
  return jnp.where(in_group, advantages, 0.0)


def group_std(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """Population standard deviation of each group's rewards, [num_groups]; exactly 0 where all are equal."""
  shifted = above_group_minimum(rewards, groups, num_groups)
  sizes = jnp.maximum(jax.ops.segment_sum(jnp.ones_like(shifted), groups, num_groups), 1.0)
  mean = jax.ops.segment_sum(shifted, groups, num_groups) / sizes
  return jnp.sqrt(jax.ops.segment_sum((shifted - of_group(mean, groups)) ** 2, groups, num_groups) / sizes)


def reinforce_advantages(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """A = R: no baseline."""
  check_groups(rewards, groups, num_groups)
  return _grouped_only(jnp.asarray(rewards, jnp.float32), groups, num_groups)


def grpo_advantages(rewards: ArrayLike, groups: ArrayLike, num_groups: int, *, normalize_std: bool = True) -> jax.Array:
  """A = (R − mean) / std over the group; ``normalize_std=False`` is Dr.GRPO's R − mean.

  The std is the population one; a group with std ≤ 1e-8 is not divided. A group of one, or of equal rewards, gets 0.

  References:
    Shao et al., DeepSeekMath, 2024, https://arxiv.org/abs/2402.03300;
    Liu et al., Understanding R1-Zero-Like Training (Dr.GRPO), 2025, https://arxiv.org/abs/2503.20783

  >>> grpo_advantages(jnp.array([1.0, 5.0, 0.0, 5.0]), jnp.array([0, 1, 0, 1]), 2)
  Array([ 1.,  0., -1.,  0.], dtype=float32)
  """
  check_groups(rewards, groups, num_groups)
  return subtract_baseline(rewards, groups, num_groups, jnp.zeros(jnp.shape(rewards)), normalize_std)


def rloo_advantages(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """A_i = R_i − mean of the group's other rewards, which is (R_i − mean)·K/(K−1); 0 for a group of one.

  References:
    Ahmadian et al., Back to Basics, 2024, https://arxiv.org/abs/2402.14740

  >>> rloo_advantages(jnp.array([3.0, 0.0, 0.0]), jnp.array([0, 0, 0]), 1)
  Array([ 3. , -1.5, -1.5], dtype=float32)
  """
  centered = grpo_advantages(rewards, groups, num_groups, normalize_std=False)
  size = of_group(jax.ops.segment_sum(jnp.ones_like(centered), groups, num_groups), groups)
  return centered * divide_or_zero(size, size - 1.0)


def maxrl_advantages(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """MaxRL: A = (R − mean) / mean over the group, 0 where the mean is 0. Rewards must not be negative.

  With rewards of 0 and 1 its expected gradient is a truncated series of the gradient of log(success rate), so that hard
  prompts weigh more.

  References:
    Maximum Likelihood Reinforcement Learning, 2026, https://arxiv.org/abs/2602.02710

  >>> maxrl_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 0, 0]), 1)
  Array([ 3., -1., -1., -1.], dtype=float32)
  """
  centered = grpo_advantages(rewards, groups, num_groups, normalize_std=False)
  return divide_or_zero(centered, jnp.asarray(rewards, jnp.float32) - centered)


def opo_advantages(rewards: ArrayLike, groups: ArrayLike, num_groups: int, *, lengths: ArrayLike) -> jax.Array:
  """OPO: A = R − Σ_j L_j R_j / Σ_j L_j over the group, with *lengths* [B] in trained tokens.

  References:
    Hao et al., On-Policy RL with Optimal Reward Baseline, 2025, https://arxiv.org/abs/2505.23585

  >>> opo_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), 1, lengths=jnp.array([3, 1])).round(4)
  Array([ 0.25, -0.75], dtype=float32)
  """
  check_groups(rewards, groups, num_groups, lengths=lengths)
  return subtract_baseline(rewards, groups, num_groups, jnp.log(jnp.asarray(lengths, jnp.float32)))


def importance_mean_advantages(
  rewards: ArrayLike, groups: ArrayLike, num_groups: int, *, log_weights: ArrayLike
) -> jax.Array:
  """A = R − Σ_j w_j R_j / Σ_j w_j over the group: the mean reward that the current policy would have.

  Args:
    rewards: [B].
    groups: int [B].
    num_groups: static number of groups.
    log_weights: [B] sequence log-weights, raw (untruncated).

  >>> log_weights = jnp.log(jnp.array([3.0, 1.0]))
  >>> importance_mean_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), 1, log_weights=log_weights).round(4)
  Array([ 0.25, -0.75], dtype=float32)
  """
  check_groups(rewards, groups, num_groups, log_weights=log_weights)
  return subtract_baseline(rewards, groups, num_groups, log_weights)


def informative_rows(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """bool [B], False for the rows of a group whose rewards are all equal: DAPO drops them (mask them out).

  >>> informative_rows(jnp.array([1.0, 5.0, 0.0, 5.0]), jnp.array([0, 1, 0, 1]), 2)
  Array([ True, False,  True, False], dtype=bool)
  """
  check_groups(rewards, groups, num_groups)
  spread = jax.ops.segment_max(above_group_minimum(rewards, groups, num_groups), groups, num_groups)
  return of_group(spread, groups) > 0


def zero_variance_fraction(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """Share of the groups (those with a member) whose rewards are all equal: they give no gradient under GRPO.

  >>> float(zero_variance_fraction(jnp.array([1.0, 5.0, 0.0, 5.0]), jnp.array([0, 1, 0, 1]), 2))
  0.5
  """
  present = jax.ops.segment_max(jnp.ones_like(groups), groups, num_groups) > 0
  informative = jax.ops.segment_max(informative_rows(rewards, groups, num_groups).astype(int), groups, num_groups) > 0
  flat = jnp.sum(present & ~informative, dtype=jnp.float32)
  return divide_or_zero(flat, jnp.sum(present, dtype=jnp.float32))
