"""PPO with a value head: generalized advantage estimation and the value loss.

The policy loss is `ppo_clip`, or any other correction, with the [B, T] advantages made here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._aggregation import divide_or_zero
from async_rl.losses._ratios import check_mask

#: A standard deviation below this share of the mean is rounding.
_SMALL = 1e-6


def gae(
  rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, discount: float = 1.0, trace: float = 0.95
) -> tuple[jax.Array, jax.Array]:
  """Generalized advantage estimation over the trained tokens of each sequence; the value after the last is 0.

  δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}, where t + 1 is the next token in *mask* (tool output between
  them is skipped).

  Args:
    rewards: [B, T] reward of each token.
    values: [B, T] value V_t of the state in which token t was drawn.
    mask: bool [B, T].
    discount: γ.
    trace: λ.

  Returns:
    Advantages and returns (advantage + value), both float32 [B, T], without gradient, 0 where masked.

  References:
    Schulman et al., High-Dimensional Continuous Control Using GAE, 2015, https://arxiv.org/abs/1506.02438

  >>> gae(jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.5]]), jnp.ones((1, 2), bool), trace=1.0)[0]
  Array([[0.5, 0.5]], dtype=float32)
  """
  check_number("discount", discount, at_least=0, at_most=1)
  check_number("trace", trace, at_least=0, at_most=1)
  check_mask(mask, rewards=rewards, values=values)
  rewards, values = (jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)) for x in (rewards, values))

  trained = jnp.asarray(mask)
  next_values = _from_later(values, jnp.where(trained, 0.0, 1.0), trained)
  next_values = jnp.pad(next_values[:, 1:], ((0, 0), (0, 1)))
  deltas = rewards + discount * next_values - values
  advantages = jnp.where(trained, _from_later(deltas, jnp.where(trained, discount * trace, 1.0), trained), 0.0)
  return advantages, jnp.where(trained, advantages + values, 0.0)


def _from_later(added: jax.Array, decays: jax.Array, mask: jax.Array) -> jax.Array:
  """y_t = added_t [where *mask*] + decays_t y_{t+1}, float32 [B, T], in a number of steps logarithmic in T."""

  def after(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

  return jax.lax.associative_scan(after, (decays, jnp.where(mask, added, 0.0)), reverse=True, axis=1)[1]


def whiten(values: ArrayLike, mask: ArrayLike) -> jax.Array:
  """Shifts and scales the entries in *mask* to mean 0 and standard deviation 1, float32 [B, T], 0 where masked.

  Entries that are all equal become 0.

  >>> whiten(jnp.array([[1.0, 3.0], [5.0, 9.0]]), jnp.array([[True, True], [True, False]])).round(2)
  Array([[-1.22,  0.  ],
         [ 1.22,  0.  ]], dtype=float32)
  """
  check_mask(mask, values=values)
  count = jnp.sum(mask, dtype=jnp.float32)
  mean = divide_or_zero(jnp.sum(jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)), count)
  centered = jnp.where(mask, values - mean, 0.0)
  deviation = jnp.sqrt(divide_or_zero(jnp.sum(jnp.square(centered)), count))
  return jnp.where(deviation > _SMALL * jnp.abs(mean), divide_or_zero(centered, deviation), 0.0)


def value_loss(
  values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, mask: ArrayLike, *, clip: float | None = 0.2
) -> jax.Array:
  """PPO's value loss per token: ½ max((V − R)², (clip(V, V_old ± clip) − R)²), float32 [B, T], 0 where masked.

  Args:
    values: [B, T] predictions; the gradient flows.
    old_values: [B, T] predictions that the returns were made with.
    returns: [B, T] targets.
    mask: bool [B, T].
    clip: how far the prediction may move from the old one; None for the plain squared error.

  >>> one = jnp.ones((1, 1))
  >>> value_loss(1.0 * one, 0.0 * one, 1.0 * one, one > 0)  # clipped at 0.2: 0.5 * 0.8²
  Array([[0.32000002]], dtype=float32)
  """
  if clip is not None:
    check_number("clip", clip, at_least=0, finite=False, remedy="None for the plain squared error")
  check_mask(mask, values=values, old_values=old_values, returns=returns)
  values = jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
  old_values, returns = (
    jax.lax.stop_gradient(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)) for x in (old_values, returns)
  )
  error = jnp.square(values - returns)
  if clip is not None:
    error = jnp.maximum(error, jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns))
  return error / 2.0
