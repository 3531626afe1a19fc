"""Losses on the best and the worst completion of each group: Online DPO, IPO and best-of-N fine-tuning.

References:
  Noukhovitch et al., Asynchronous RLHF, 2024, https://arxiv.org/abs/2410.18252
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._aggregation import divide_or_zero
from async_rl.losses._policy_gradient import PolicyLoss
from async_rl.losses._ratios import check_groups
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import check_rows


class PreferencePairs(NamedTuple):
  """Row indices into the batch, one pair per group.

  Attributes:
    best: int32 [num_groups], row of the highest reward; the lowest row among equals.
    worst: int32 [num_groups], row of the lowest reward; the lowest row among equals.
    valid: bool [num_groups], False for a group without rows or without a preference (all rewards equal): mask it out.
  """

  best: jax.Array
  worst: jax.Array
  valid: jax.Array


def _first_row_where(rows: jax.Array, groups: ArrayLike, num_groups: int) -> jax.Array:
  """Per group, the lowest row index where *rows* is True; 0 for a group without any."""
  size = rows.shape[0]
  first = jax.ops.segment_min(jnp.where(rows, jnp.arange(size), size), groups, num_groups)
  return jnp.where(first < size, first, 0)


def preference_pairs(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> PreferencePairs:
  """The rows of the best and worst completion of each group. Gather them before splitting into micro-batches.

  >>> pairs = preference_pairs(jnp.array([0.0, 3.0, 1.0, 3.0]), jnp.array([0, 1, 0, 1]), 2)
  >>> pairs.best, pairs.worst, pairs.valid
  (Array([2, 1], dtype=int32), Array([0, 1], dtype=int32), Array([ True, False], dtype=bool))
  """
  check_groups(rewards, groups, num_groups)
  rewards = jnp.asarray(rewards, jnp.float32)
  top = jax.ops.segment_max(rewards, groups, num_groups)
  bottom = jax.ops.segment_min(rewards, groups, num_groups)
  best = _first_row_where(rewards == top.at[groups].get(mode="fill", fill_value=jnp.nan), groups, num_groups)
  worst = _first_row_where(rewards == bottom.at[groups].get(mode="fill", fill_value=jnp.nan), groups, num_groups)
  return PreferencePairs(best, worst, top > bottom)


def _margin(best: ArrayLike, worst: ArrayLike, reference_best: ArrayLike, reference_worst: ArrayLike) -> jax.Array:
  check_rows(best, worst=worst, reference_best=reference_best, reference_worst=reference_worst)
  best, worst, reference_best, reference_worst = (
    jnp.asarray(x, jnp.float32) for x in (best, worst, reference_best, reference_worst)
  )
  return best - worst - jax.lax.stop_gradient(reference_best - reference_worst)


def dpo_loss(
  best: ArrayLike, worst: ArrayLike, reference_best: ArrayLike, reference_worst: ArrayLike, *, beta: float = 0.1
) -> jax.Array:
  """Online DPO per pair: −log σ(β [(log π(y⁺) − log π(y⁻)) − (log π_ref(y⁺) − log π_ref(y⁻))]).

  Args:
    best: [N] sequence log-probabilities (sums over tokens) of the preferred completions; the gradient flows.
    worst: [N] those of the rejected completions; the gradient flows.
    reference_best: [N] the same under the reference policy.
    reference_worst: [N].
    beta: inverse temperature of the implicit reward.

  Returns:
    float32 [N]; average it over `PreferencePairs.valid`.

  >>> zero = jnp.zeros(1)
  >>> dpo_loss(zero, zero, zero, zero)
  Array([0.6931472], dtype=float32)
  """
  check_number("beta", beta, above=0)
  return jax.nn.softplus(-beta * _margin(best, worst, reference_best, reference_worst))


def ipo_loss(
  best: ArrayLike, worst: ArrayLike, reference_best: ArrayLike, reference_worst: ArrayLike, *, beta: float = 0.1
) -> jax.Array:
  """IPO per pair: (margin − 1/(2β))², arguments as in `dpo_loss`.

  References:
    Azar et al., A General Theoretical Paradigm, 2023, https://arxiv.org/abs/2310.12036

  >>> zero = jnp.zeros(1)
  >>> ipo_loss(zero, zero, zero, zero)
  Array([25.], dtype=float32)
  """
  check_number("beta", beta, above=0)
  return jnp.square(_margin(best, worst, reference_best, reference_worst) - 1.0 / (2.0 * beta))


def preference_advantages(
  rewards: ArrayLike,
  groups: ArrayLike,
  num_groups: int,
  *,
  logprobs: ArrayLike,
  reference: ArrayLike,
  mask: ArrayLike,
  loss: Callable[..., jax.Array] = dpo_loss,
  beta: float = 0.1,
) -> jax.Array:
  """Advantages with which `reinforce` has the gradient of a preference loss, whose pairs may then be torn apart.

  The loss of the batch is a function of the sequence log-probabilities s_i, so its gradient is Σ_i (∂loss/∂s_i) ∇s_i.
  The coefficients need the whole batch, scored under the weights that are trained; ∇s_i needs one sequence at a time,
  in any micro-batch. With A_i = −N ∂loss/∂s_i, N the sequences with trained tokens, the gradients agree exactly if
  `reinforce` is aggregated by `constant` with ``max_length=1``. The loss is the mean over the groups that have a
  preference (best and worst completion differ in reward); sequences outside of the pairs get 0.

  Args:
    rewards: [B].
    groups: int [B].
    num_groups: static number of groups.
    logprobs: [B, T] under the weights that are trained, at their current value.
    reference: [B, T] under the reference policy.
    mask: bool [B, T].
    loss: `dpo_loss` or `ipo_loss`.
    beta: of the loss.

  Returns:
    float32 [B], without gradient.

  >>> two = jnp.zeros((2, 1))
  >>> arguments = dict(logprobs=two, reference=two, mask=two == 0)
  >>> preference_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), 1, **arguments)  # 2 · beta · sigmoid(0)
  Array([ 0.1, -0.1], dtype=float32)
  """
  pairs = preference_pairs(rewards, groups, num_groups)
  check_mask(mask, logprobs=logprobs, reference=reference)
  sums = lambda x: jnp.sum(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0), axis=-1)
  chosen = sums(reference)[pairs.best], sums(reference)[pairs.worst]

  def mean_loss(sequences: jax.Array) -> jax.Array:
    per_pair = loss(sequences[pairs.best], sequences[pairs.worst], *chosen, beta=beta)
    return divide_or_zero(jnp.sum(jnp.where(pairs.valid, per_pair, 0.0)), jnp.sum(pairs.valid, dtype=jnp.float32))

  trained = jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.float32)
  return -trained * jax.grad(mean_loss)(jax.lax.stop_gradient(sums(logprobs)))


def best_rows(rewards: ArrayLike, groups: ArrayLike, num_groups: int) -> jax.Array:
  """bool [B], True for one row of the highest reward in each group (the lowest row among equals).

  >>> best_rows(jnp.array([0.0, 3.0, 1.0, 3.0]), jnp.array([0, 1, 0, 1]), 2)
  Array([False,  True,  True, False], dtype=bool)
  """
  best = preference_pairs(rewards, groups, num_groups).best
  rows = jnp.arange(jnp.shape(rewards)[0])
  return best.at[groups].get(mode="fill", fill_value=-1) == rows


def best_of_n(logprobs: ArrayLike, best: ArrayLike, mask: ArrayLike) -> PolicyLoss:
  """Best-of-N fine-tuning: −log π on the tokens of the rows in *best* (bool [B], `best_rows`).

  Aggregated by `constant` with ``max_length=1`` over `PolicyLoss.keep` it is the published −Σ_t log π(y_best), averaged
  over the groups.

  >>> best_of_n(jnp.array([[-1.0], [-2.0]]), jnp.array([False, True]), jnp.ones((2, 1), bool)).loss
  Array([[0.],
         [2.]], dtype=float32)
  """
  check_mask(mask, logprobs=logprobs)
  keep = jnp.logical_and(mask, jnp.asarray(best)[:, None])
  loss = jnp.where(keep, -jnp.asarray(logprobs, jnp.float32), 0.0)
  return PolicyLoss(loss, keep, jnp.zeros_like(keep))
