"""Rewards before advantages: penalties for length, for a missing end and for the distance to a reference policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import check_rows
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import sequence_log_weights


def overlong_penalty(lengths: ArrayLike, *, max_length: int, buffer: int) -> jax.Array:
  """DAPO's soft over-long punishment: 0 up to max_length − buffer, then linear to −1 at max_length. Add it to R.

  Args:
    lengths: [B] tokens of each completion.
    max_length: tokens at which the penalty is −1 (and stays there).
    buffer: tokens over which it falls.

  References:
    Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476, equation 13

  >>> overlong_penalty(jnp.array([10, 80, 90, 100, 200]), max_length=100, buffer=20)
  Array([ 0. ,  0. , -0.5, -1. , -1. ], dtype=float32)
  """
  check_number("max_length", max_length, above=0)
  check_number("buffer", buffer, above=0, at_most=max_length, remedy="the penalty falls over the last *buffer* tokens")
  return jnp.clip((max_length - buffer - jnp.asarray(lengths, jnp.float32)) / buffer, -1.0, 0.0)


def missing_end_rewards(rewards: ArrayLike, truncated: ArrayLike, *, reward: float = -1.0) -> jax.Array:
  """Rewards [B] with those of *truncated* completions (bool [B], no end token) replaced by *reward*.

  >>> missing_end_rewards(jnp.array([0.7, 0.7]), jnp.array([False, True]))
  Array([ 0.7, -1. ], dtype=float32)
  """
  check_number("reward", reward)
  check_rows(rewards, truncated=truncated)
  return jnp.where(truncated, reward, jnp.asarray(rewards, jnp.float32))


def kl_penalized_rewards(
  rewards: ArrayLike, logprobs: ArrayLike, reference: ArrayLike, mask: ArrayLike, *, coefficient: float = 0.05
) -> jax.Array:
  """R − coefficient · Σ_t (log π_old − log π_ref), float32 [B], without gradient: the reward of proximal RLOO.

  Args:
    rewards: [B].
    logprobs: [B, T] log π_old: the true behavior log-probabilities, or the learner's recomputed ones as in the paper.
    reference: [B, T] log π_ref.
    mask: bool [B, T].
    coefficient: weight of the KL estimate.

  >>> two = jnp.ones((1, 2))
  >>> kl_penalized_rewards(jnp.array([1.0]), -1.0 * two, -2.0 * two, two > 0)
  Array([0.9], dtype=float32)
  """
  check_number("coefficient", coefficient, at_least=0)
  _check_sequences(rewards, mask)
  penalty = sequence_log_weights(log_ratios(jax.lax.stop_gradient(logprobs), reference, mask))
  return jnp.asarray(rewards, jnp.float32) - coefficient * penalty


def final_rewards(rewards: ArrayLike, mask: ArrayLike) -> jax.Array:
  """The reward at the last trained token of each sequence and 0 at the others, float32 [B, T].

  Args:
    rewards: [B].
    mask: bool [B, T].

  >>> final_rewards(jnp.array([2.0]), jnp.array([[True, True, False]]))
  Array([[0., 2., 0.]], dtype=float32)
  """
  check_mask(mask)
  _check_sequences(rewards, mask)
  later = jnp.cumsum(jnp.asarray(mask)[:, ::-1], axis=-1)[:, ::-1]  # trained tokens from t on
  last = jnp.logical_and(mask, later == 1)
  return jnp.where(last, jnp.asarray(rewards, jnp.float32)[:, None], 0.0)


def _check_sequences(rewards: ArrayLike, mask: ArrayLike) -> None:
  if jnp.shape(rewards) != jnp.shape(mask)[:1]:
    raise ValueError(f"*rewards* must be [B] for a mask of shape {jnp.shape(mask)}, got {jnp.shape(rewards)}.")


def token_rewards(
  rewards: ArrayLike, logprobs: ArrayLike, reference: ArrayLike, mask: ArrayLike, *, coefficient: float = 0.05
) -> jax.Array:
  """The reward at the last trained token and −coefficient · (log π_old − log π_ref) at each: PPO's rewards, [B, T].

  Arguments as in `kl_penalized_rewards`, whose result is the sum of this one over the tokens (for non-empty sequences).

  >>> two = jnp.ones((1, 2))
  >>> token_rewards(jnp.array([1.0]), -1.0 * two, -2.0 * two, two > 0)
  Array([[-0.05,  0.95]], dtype=float32)
  """
  check_number("coefficient", coefficient, at_least=0)
  check_mask(mask, logprobs=logprobs, reference=reference)
  penalty = coefficient * log_ratios(jax.lax.stop_gradient(logprobs), reference, mask)
  return final_rewards(rewards, mask) - penalty
