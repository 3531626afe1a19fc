"""Log-ratios between the policy being trained and the one that sampled, and shape checks shared by the losses.

Letters: B sequences, T tokens. ℓ[b, t] = log π_θ(a_t) − log μ(a_t), where μ is the behavior policy, that is the
weights that drew the token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from async_rl._arrays import check_mask

#: The group of rows that belong to none; `async_rl.types.NO_GROUP`.
NO_GROUP = 2**31 - 1

#: Log-ratios are clamped to ±LOG_CLAMP before `exp`: e^20 ≈ 4.9e8, whose square is still finite in float32.
LOG_CLAMP = 20.0


def check_rows(rewards: ArrayLike, **arrays: ArrayLike) -> None:
  """Raises unless *rewards* is a vector [B] and every array has its shape."""
  if jnp.ndim(rewards) != 1:
    raise ValueError(f"*rewards* must be a vector [B], got rewards.shape={jnp.shape(rewards)}.")
  for name, array in arrays.items():
    if jnp.shape(array) != jnp.shape(rewards):
      raise ValueError(f"*{name}* must have the shape of rewards {jnp.shape(rewards)}, got {jnp.shape(array)}.")


def check_groups(rewards: ArrayLike, groups: ArrayLike, num_groups: int, **arrays: ArrayLike) -> None:
  """Raises unless all arrays are vectors [B] and every group is below *num_groups* or `NO_GROUP`, where concrete."""
  check_rows(rewards, groups=groups, **arrays)
  if isinstance(groups, jax.core.Tracer):
    return
  named = np.asarray(groups)[np.asarray(groups) != NO_GROUP]
  if named.size and not 0 <= named.min() <= named.max() < num_groups:
    raise ValueError(
      f"*groups* must be in [0, num_groups) or NO_GROUP, got groups from {named.min()} to {named.max()} and "
      f"num_groups={num_groups}; raise num_groups."
    )


def clamped_exp(x: ArrayLike) -> jax.Array:
  """exp(x) with x clamped to ±`LOG_CLAMP`: never inf, and with zero gradient beyond the clamp."""
  return jnp.exp(jnp.clip(jnp.asarray(x, jnp.float32), -LOG_CLAMP, LOG_CLAMP))


def log_ratios(logprobs: ArrayLike, behavior: ArrayLike, mask: ArrayLike) -> jax.Array:
  """Per-token log-ratios ℓ = log π_θ − log μ, raw (not clamped).

  Args:
    logprobs: [B, T] log-probabilities under the policy being trained; the gradient flows through them.
    behavior: [B, T] log-probabilities the tokens had when they were drawn; no gradient flows.
    mask: bool [B, T], True on trained tokens. What the arrays hold elsewhere is never read.

  Returns:
    float32 [B, T], exactly 0 where *mask* is False.

  >>> log_ratios(jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, 0.0]]), jnp.array([[True, False]]))
  Array([[0.5, 0. ]], dtype=float32)
  """
  check_mask(mask, logprobs=logprobs, behavior=behavior)
  behavior = jax.lax.stop_gradient(jnp.asarray(behavior, jnp.float32))
  return jnp.where(mask, jnp.asarray(logprobs, jnp.float32) - behavior, 0.0)


def sequence_log_weights(log_ratios: ArrayLike) -> jax.Array:
  """Log of the sequence weight w = Π_t π_θ/μ: the sum of the masked log-ratios [B, T], raw. float32 [B]."""
  return jnp.sum(jnp.asarray(log_ratios, jnp.float32), axis=-1)


def mean_log_ratios(log_ratios: ArrayLike, mask: ArrayLike) -> jax.Array:
  """Log of the length-normalized weight w^(1/L), float32 [B]; 0 for a sequence without trained tokens."""
  check_mask(mask, log_ratios=log_ratios)
  return sequence_log_weights(log_ratios) / jnp.maximum(jnp.sum(mask, axis=-1), 1)
