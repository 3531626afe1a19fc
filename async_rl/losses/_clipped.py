"""Policy losses with a clipped ratio that carries the gradient: the PPO family."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl.losses._policy import PolicyLoss
from async_rl.losses._policy import per_token
from async_rl.losses._ratios import clamped_exp
from async_rl.losses._ratios import log_ratios


def clipped_surrogate(
  log_ratio: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float,
  high: float,
  dual_clip: float | None = None,
  log_weights: ArrayLike = 0.0,
) -> PolicyLoss:
  """loss = −weight · min(rA, clip(r, 1 − low, 1 + high)A), all in log space; r and weight of shape [B, T] or [B, 1].

  With *dual_clip* c > 1 and A < 0 the ratio is also held below c.
  """
  if not 0.0 <= low <= 1.0 or high < 0.0:
    raise ValueError(f"*low* must be in [0, 1] and *high* >= 0, got low={low}, high={high}.")
  if dual_clip is not None and dual_clip <= 1.0:
    raise ValueError(f"*dual_clip* must be None or above 1, got dual_clip={dual_clip}.")
  advantages = per_token(advantages, mask)
  positive, negative = advantages > 0, advantages < 0
  above, below = positive & (log_ratio > jnp.log1p(high)), negative & (log_ratio < jnp.log1p(-low))
  log_ratio = jnp.where(above, jnp.log1p(high), jnp.where(below, jnp.log1p(-low), log_ratio))
  clipped = above | below
  if dual_clip is not None:
    dual = negative & (log_ratio > jnp.log(dual_clip))
    log_ratio = jnp.where(dual, jnp.log(dual_clip), log_ratio)
    clipped |= dual
  log_weights = jax.lax.stop_gradient(log_weights)
  loss = jnp.where(mask, -clamped_exp(log_weights + log_ratio) * advantages, 0.0)
  return PolicyLoss(loss, jnp.asarray(mask), jnp.logical_and(mask, clipped))


def ppo_clip(
  logprobs: ArrayLike,
  behaviour: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 0.2,
  high: float = 0.2,
  dual_clip: float | None = None,
) -> PolicyLoss:
  """PPO's clipped objective per token: −min(ρA, clip(ρ, 1 − low, 1 + high)A).

  DAPO's asymmetric clip is ``high=0.28``. *dual_clip* c > 1 also holds the ratio below c where A < 0. Beyond e^±20 the
  ratio is constant and its gradient zero.

  References:
    Schulman et al., PPO, 2017, https://arxiv.org/abs/1707.06347; Ye et al. (dual clip), 2019,
    https://arxiv.org/abs/1912.09729; Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476

  >>> one = jnp.ones((1, 1))
  >>> out = ppo_clip(jnp.log(1.5 * one), 0.0 * one, jnp.array([1.0]), one > 0)
  >>> float(out.loss[0, 0]), bool(out.clipped[0, 0])  # the ratio 1.5 is held at 1.2
  (-1.2000000476837158, True)
  """
  ratios = log_ratios(logprobs, behaviour, mask)
  return clipped_surrogate(ratios, advantages, mask, low=low, high=high, dual_clip=dual_clip)
