"""PPO with a value head: per-token rewards, generalised advantage estimation and the value loss.

The policy loss is `ppo_clip` with the [B, T] advantages made here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl.losses._ratios import check_mask


def gae(
  rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, discount: float = 1.0, trace: float = 0.95
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimation over the trained tokens of each sequence; the value after the last is 0.

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
  check_mask(mask, rewards=rewards, values=values)
  rewards, values = (jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)) for x in (rewards, values))

  def step(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]):
    next_advantage, next_value = carry
    reward, value, trained = inputs
    delta = reward + discount * next_value - value
    advantage = delta + discount * trace * next_advantage
    carry = jnp.where(trained, advantage, next_advantage), jnp.where(trained, value, next_value)
    return carry, jnp.where(trained, advantage, 0.0)

  start = jnp.zeros_like(rewards[:, 0]), jnp.zeros_like(values[:, 0])
  _, advantages = jax.lax.scan(step, start, (rewards.T, values.T, jnp.asarray(mask).T), reverse=True)
  return advantages.T, jnp.where(mask, advantages.T + values, 0.0)


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
  check_mask(mask, values=values, old_values=old_values, returns=returns)
  values = jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
  old_values, returns = (
    jax.lax.stop_gradient(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)) for x in (old_values, returns)
  )
  error = jnp.square(values - returns)
  if clip is not None:
    error = jnp.maximum(error, jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns))
  return error / 2.0
