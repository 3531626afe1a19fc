"""OPOB, the minimum-variance off-policy baseline of VCPO.

Per group b* = Σ_i w_i² n_i² R_i / Σ_i w_i² n_i² with n_i = ‖∇_θ log π_θ(τ_i)‖, the sample itself included, on raw
rewards and untruncated sequence weights w. The norms are either exact (`opob_gradient`, which makes them while it makes
the gradient) or estimated (`squared_norms_by_length`, `squared_norms_by_logits`) and given to `opob_advantages`.

References:
  VCPO: Stable Asynchrony, 2026, https://arxiv.org/abs/2602.17616, equations 7 and 13
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._arrays import check_mask
from async_rl._arrays import tree_squared_norm
from async_rl._validation import check_number
from async_rl.losses._advantages import MIN_STD
from async_rl.losses._advantages import above_group_minimum
from async_rl.losses._advantages import group_std
from async_rl.losses._advantages import of_group
from async_rl.losses._advantages import subtract_baseline
from async_rl.losses._aggregation import divide_or_zero
from async_rl.losses._ratios import check_groups
from async_rl.losses._ratios import clamped_exp


def _log_square(log_weights: ArrayLike, code_cap: float | None) -> jax.Array:
  """log of w², or of the released code's w² · min(w, cap)²."""
  if code_cap is not None:
    check_number("code_cap", code_cap, above=0, finite=False, remedy="None for the published baseline")
  log_weights = jnp.asarray(log_weights, jnp.float32)
  return 2.0 * (log_weights if code_cap is None else log_weights + jnp.minimum(log_weights, jnp.log(code_cap)))


def opob_advantages(
  rewards: ArrayLike,
  groups: ArrayLike,
  num_groups: int,
  *,
  log_weights: ArrayLike,
  squared_norms: ArrayLike,
  normalize_std: bool = False,
  code_cap: float | None = None,
) -> jax.Array:
  """A = R − b*, float32 [B], computed in log space.

  Args:
    rewards: [B], raw.
    groups: int [B], the group of each sequence.
    num_groups: static number of groups.
    log_weights: [B] sequence log-weights, raw (untruncated).
    squared_norms: [B] n_i², exact or estimated; only their ratios within a group matter.
    normalize_std: divide by the group's reward std (all released scripts do), unless it is at most 1e-8.
    code_cap: None is the published w². A cap c is the released code's form, whose norms are those of gradients already
      multiplied by min(w, c): w² · min(w, c)², that is w⁴ where not truncated (c = 8 there).

  >>> log_weights, squares = jnp.log(jnp.array([2.0, 1.0])), jnp.array([1.0, 4.0])
  >>> opob_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), 1, log_weights=log_weights, squared_norms=squares)
  Array([ 0.5, -0.5], dtype=float32)
  """
  check_groups(rewards, groups, num_groups, log_weights=log_weights, squared_norms=squared_norms)
  logits = _log_square(log_weights, code_cap) + jnp.log(jnp.asarray(squared_norms, jnp.float32))
  return subtract_baseline(rewards, groups, num_groups, logits, normalize_std)


def opob_by_length_advantages(
  rewards: ArrayLike,
  groups: ArrayLike,
  num_groups: int,
  *,
  log_weights: ArrayLike,
  lengths: ArrayLike,
  **options: Any,
) -> jax.Array:
  """`opob_advantages` with the *lengths* [B], in trained tokens, as the estimate of the squared norms."""
  return opob_advantages(rewards, groups, num_groups, log_weights=log_weights, squared_norms=lengths, **options)


def opob_by_logits_advantages(
  rewards: ArrayLike,
  groups: ArrayLike,
  num_groups: int,
  *,
  log_weights: ArrayLike,
  squared_logit_norms: ArrayLike,
  **options: Any,
) -> jax.Array:
  """`opob_advantages` with the squared norms estimated at the logits, [B]: `squared_norms_by_logits`."""
  return opob_advantages(
    rewards, groups, num_groups, log_weights=log_weights, squared_norms=squared_logit_norms, **options
  )


def squared_norms_by_length(mask: ArrayLike) -> jax.Array:
  """n² ∝ L: the number of trained tokens, float32 [B]. With it and w = 1, OPOB is OPO."""
  check_mask(mask)
  return jnp.sum(mask, axis=-1, dtype=jnp.float32)


def squared_norms_by_logits(
  logprobs: ArrayLike, sum_squared_probs: ArrayLike, mask: ArrayLike, *, hidden_squared_norms: ArrayLike | None = None
) -> jax.Array:
  """n² estimated by the gradient at the logits, Σ_t ‖e_a − p_t‖², where ‖e_a − p‖² = 1 − 2 p_a + Σ_v p_v².

  With the norms of the last hidden states it is Σ_t ‖e_a − p_t‖² ‖h_t‖²: the squared gradient norm of the output
  matrix, if the tokens' gradients were orthogonal.

  Args:
    logprobs: [B, T] log p_a of the drawn tokens.
    sum_squared_probs: [B, T] Σ_v p_v² of each token's distribution.
    mask: bool [B, T].
    hidden_squared_norms: [B, T] ‖h_t‖² of the states the logits were made from; None for 1.

  Returns:
    float32 [B].

  >>> mask = jnp.array([[True]])  # p = (0.5, 0.5): ‖(0.5, -0.5)‖² = 0.5
  >>> squared_norms_by_logits(jnp.log(jnp.array([[0.5]])), jnp.array([[0.5]]), mask)
  Array([0.5], dtype=float32)
  """
  check_mask(mask, logprobs=logprobs, sum_squared_probs=sum_squared_probs)
  drawn = jnp.exp(jnp.asarray(logprobs, jnp.float32))
  squares = jnp.maximum(1.0 - 2.0 * drawn + jnp.asarray(sum_squared_probs, jnp.float32), 0.0)
  if hidden_squared_norms is not None:
    check_mask(mask, hidden_squared_norms=hidden_squared_norms)
    squares = squares * jnp.asarray(hidden_squared_norms, jnp.float32)
  return jnp.sum(jnp.where(mask, squares, 0.0), axis=-1)


class OpobGradient(NamedTuple):
  """Result of `opob_gradient`.

  Attributes:
    gradient: tree, float32, −Σ_i min(w_i, cap) scale_i A_i ∇log π(τ_i): a numerator, to be divided by the number of
      sequences.
    advantages: float32 [B], A_i = R_i − b* of its group (divided by the std where asked).
    squared_norms: float32 [B], the exact n_i².
    log_weights: float32 [B], as *score* gave them.
  """

  gradient: Any
  advantages: jax.Array
  squared_norms: jax.Array
  log_weights: jax.Array


class _Carry(NamedTuple):
  """Scan state: both gradient-sized buffers, and the open group's baseline as a running weighted mean in log space."""

  gradient: Any  # −Σ c A g; the open group's part still lacks its baseline
  scores: Any  # Σ c g of the open group
  top: jax.Array  # float32 [], largest log(w² n²) of the open group
  weight: jax.Array  # float32 [], Σ w² n² / exp(top)
  reward: jax.Array  # float32 [], Σ w² n² R / exp(top)


class _Row(NamedTuple):
  """What the scan needs of a trajectory besides itself, float32 []."""

  reward: jax.Array  # above the least of its group
  mean: jax.Array  # of these over the group: the baseline where no weight is left
  factor: jax.Array  # scale / std


def opob_gradient(
  score: Callable[[Any], tuple[jax.Array, Any]],
  trajectories: Any,
  rewards: ArrayLike,
  groups: ArrayLike,
  num_groups: int,
  *,
  scale: ArrayLike,
  cap: float = 8.0,
  normalize_std: bool = False,
  code_cap: float | None = None,
  squared_norm: Callable[[Any], jax.Array] = tree_squared_norm,
) -> OpobGradient:
  """The `sequence_tis` gradient under the exact OPOB baseline, from one backward pass per trajectory.

  The gradient is linear in the advantage, so neither the norms nor the weights need be known beforehand: each
  trajectory's score g_i adds R_i c_i g_i to one gradient-sized buffer and c_i g_i to another, and when its group ends
  b* times the second is subtracted.

  Under `jit` the parameters may be sharded in any way. To process one trajectory per data shard at a time, call it
  inside `jax.shard_map` with whole groups on each shard, on parameters that are marked as varying over the data axis
  (`jax.lax.pcast`; otherwise JAX sums their gradient over the shards), with a *squared_norm* that also sums over the
  mesh axes which shard the parameters, and `psum` the resulting gradient over the data axis.

  Args:
    score: maps one trajectory to its raw log-weight Σ_t (log π_θ − log μ) and the gradient of that, which is
      ∇log π_θ(τ), a tree like the parameters: `jax.value_and_grad` of the log-weight.
    trajectories: tree of arrays with leading axis B; *score* sees it without that axis.
    rewards: [B], raw.
    groups: int [B], any order.
    num_groups: static number of groups.
    scale: [B] factor of each sequence in the loss: 1/L_i for VCPO, whose aggregation is `sequence_mean`.
    cap: truncation of the sequence weight in the loss (not in the baseline).
    normalize_std: as in `opob_advantages`.
    code_cap: as in `opob_advantages`.
    squared_norm: squared norm of a gradient tree over all of its shards.

  Returns:
    `OpobGradient`.
  """
  check_number("cap", cap, above=0, finite=False, remedy="inf does not truncate")
  check_groups(rewards, groups, num_groups, scale=scale)
  order = jnp.argsort(groups, stable=True)
  sorted_groups = jnp.asarray(groups)[order]
  closes = jnp.append(sorted_groups[1:] != sorted_groups[:-1], True)
  inputs = jax.tree.map(
    lambda x: jnp.asarray(x)[order], (trajectories, _rows(rewards, groups, num_groups, scale, normalize_std))
  )

  def body(carry: _Carry, inputs: Any) -> tuple[_Carry, tuple[jax.Array, jax.Array]]:
    trajectory, row, closing = inputs
    log_weight, gradient = jax.tree.map(lambda x: x.astype(jnp.float32), score(trajectory))
    square = squared_norm(gradient).astype(jnp.float32)
    factor = row.factor * clamped_exp(jnp.minimum(log_weight, jnp.log(cap)))
    top, weight, reward = _add_to_mean(carry, _log_square(log_weight, code_cap) + jnp.log(square), row.reward)
    baseline = jnp.where(closing, jnp.where(weight > 0, divide_or_zero(reward, weight), row.mean), 0.0)
    scores = jax.tree.map(lambda s, g: s + factor * g, carry.scores, gradient)
    total = jax.tree.map(lambda t, s, g: t - factor * row.reward * g + baseline * s, carry.gradient, scores, gradient)
    still = jnp.where(closing, 0.0, 1.0)
    scores = jax.tree.map(lambda s: still * s, scores)
    top = jnp.where(closing, -jnp.inf, top)
    return _Carry(total, scores, top, still * weight, still * reward), (square, log_weight)

  # Zeros like the first step's results, so that under `shard_map` they vary over the same mesh axes.
  first = jax.tree.map(lambda x: x[0], inputs)
  shapes = jax.eval_shape(lambda trajectory, row: ((g := score(trajectory)[1]), squared_norm(g) * row.reward), *first)
  zeros, zero = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), shapes)
  start = _Carry(zeros, zeros, zero - jnp.inf, zero, zero)
  carry, per_row = jax.lax.scan(body, start, (*inputs, closes))
  squares, log_weights = (jnp.zeros_like(x).at[order].set(x) for x in per_row)
  advantages = opob_advantages(
    rewards,
    groups,
    num_groups,
    log_weights=log_weights,
    squared_norms=squares,
    normalize_std=normalize_std,
    code_cap=code_cap,
  )
  return OpobGradient(carry.gradient, advantages, squares, log_weights)


def _rows(rewards: ArrayLike, groups: ArrayLike, num_groups: int, scale: ArrayLike, normalize_std: bool) -> _Row:
  shifted = above_group_minimum(rewards, groups, num_groups)
  sizes = of_group(jax.ops.segment_sum(jnp.ones_like(shifted), groups, num_groups), groups)
  means = divide_or_zero(of_group(jax.ops.segment_sum(shifted, groups, num_groups), groups), sizes)
  std = of_group(group_std(rewards, groups, num_groups), groups) if normalize_std else jnp.zeros_like(shifted)
  return _Row(shifted, means, jnp.asarray(scale, jnp.float32) / jnp.where(std > MIN_STD, std, 1.0))


def _add_to_mean(carry: _Carry, log_term: jax.Array, reward: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The running (top, Σ weight, Σ weight · reward) with one more term; a term of −inf adds nothing."""
  top = jnp.maximum(carry.top, log_term)
  finite = jnp.where(jnp.isneginf(top), 0.0, top)
  decay, term = jnp.exp(carry.top - finite), jnp.exp(log_term - finite)
  return top, carry.weight * decay + term, carry.reward * decay + term * reward
