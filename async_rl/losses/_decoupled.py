"""Decoupled PPO: a proximal policy between the behavior policy and the one being trained, clips around the former.

Per token J = sg(π_prox/μ) · min(r A, clip(r, 1 − low, 1 + high) A) with r = π_θ / sg(π_prox). Four proximal policies:

  recompute     `decoupled_ppo` with the log-probabilities of the weights at the batch's start (one extra forward pass)
  interpolate   `a3po`: between μ and π_θ by the token's lag, at no cost
  linear        `a3po` with ``linear=True``: the same in probabilities
  behavior     π_prox = μ, which is `ppo_clip`

References:
  Hilton et al., Batch size-invariance for policy optimization, 2021, https://arxiv.org/abs/2110.00641;
  A-3PO, 2025, https://arxiv.org/abs/2512.06547
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._clipped import clipped_surrogate
from async_rl.losses._policy_gradient import PolicyLoss
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import log_ratios
from async_rl.losses._rejection import restrict


def decoupled_ppo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  proximal: ArrayLike,
  low: float = 0.2,
  high: float = 0.2,
  dual_clip: float | None = None,
  weighted: bool = True,
  weight_cap: float | None = None,
  weight_reject: float | None = None,
) -> PolicyLoss:
  """Decoupled PPO around given proximal log-probabilities.

  Unclipped, weight and ratio multiply to the full ratio π_θ/μ; only where the clip sets in depends on π_prox.

  Args:
    logprobs: [B, T] log π_θ.
    behavior: [B, T] log μ.
    advantages: [B] or [B, T].
    mask: bool [B, T].
    proximal: [B, T] log π_prox; no gradient flows.
    low: the ratio r is held above 1 − low where A < 0.
    high: the ratio r is held below 1 + high where A > 0.
    dual_clip: where A < 0, r is also held below this; None for no bound.
    weighted: False drops the behavior weight π_prox/μ, as AReaL does unless rejection is configured.
    weight_cap: truncates the behavior weight; None for no cap.
    weight_reject: rejects the tokens whose behavior weight is above it (5 in AReaL's example); None keeps all.

  >>> one = jnp.ones((1, 1))  # π_θ = 0.6, π_prox = 0.4, μ = 0.2: r = 1.5 is held at 1.2, times the weight 2
  >>> p, q, m = jnp.log(0.6 * one), jnp.log(0.4 * one), jnp.log(0.2 * one)
  >>> decoupled_ppo(p, m, jnp.array([1.0]), one > 0, proximal=q).loss
  Array([[-2.4]], dtype=float32)
  """
  if weight_cap is not None and not weighted:
    raise ValueError(f"*weight_cap* caps the weight that weighted=False drops; give one of them, got {weight_cap=}.")
  for name, bound in (("weight_cap", weight_cap), ("weight_reject", weight_reject)):
    if bound is not None:
      check_number(name, bound, above=0, finite=False, remedy="None for no bound")
  proximal = jax.lax.stop_gradient(jnp.asarray(proximal, jnp.float32))
  log_weights = log_ratios(proximal, behavior, mask)
  keep = mask if weight_reject is None else log_weights <= jnp.log(weight_reject)
  log_cap = jnp.inf if weight_cap is None else jnp.log(weight_cap)
  out = clipped_surrogate(
    log_ratios(logprobs, proximal, mask),
    advantages,
    mask,
    low=low,
    high=high,
    dual_clip=dual_clip,
    log_weights=jnp.minimum(log_weights, log_cap) if weighted else 0.0,
  )
  return restrict(out._replace(clipped=out.clipped | (mask & (log_weights > log_cap))), keep)


def interpolated_proximal(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  lag: ArrayLike,
  *,
  linear: bool = False,
  behavior_at_zero: bool = False,
) -> jax.Array:
  """A-3PO's proximal policy: log π_prox = α log μ + (1 − α) sg(log π_θ), with α = 1/lag per token and 0 at lag 0.

  Args:
    logprobs: [B, T] log π_θ.
    behavior: [B, T] log μ.
    lag: int [B, T], the learner's version minus the version that drew the token.
    linear: interpolate the probabilities instead: π_prox = α μ + (1 − α) π_θ.
    behavior_at_zero: α = 1 at lag 0, that is π_prox = μ, as in the released code. It differs from π_prox = π_θ where
      the learner takes several updates per batch or the two engines' numerics differ.

  Returns:
    float32 [B, T], without gradient.

  >>> interpolated_proximal(jnp.full((1, 3), -3.0), jnp.full((1, 3), -1.0), jnp.array([[0, 1, 4]]))
  Array([[-3. , -1. , -2.5]], dtype=float32)
  """
  logprobs, behavior = (jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)) for x in (logprobs, behavior))
  lag = jnp.asarray(lag, jnp.float32)
  alpha = jnp.where(lag >= 1, 1.0 / jnp.maximum(lag, 1.0), float(behavior_at_zero))
  if linear:
    return jnp.logaddexp(jnp.log(alpha) + behavior, jnp.log1p(-alpha) + logprobs)
  return alpha * behavior + (1.0 - alpha) * logprobs


def a3po(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  lag: ArrayLike,
  linear: bool = False,
  behavior_at_zero: bool = False,
  low: float = 0.2,
  high: float = 0.2,
  dual_clip: float | None = None,
  weighted: bool = True,
  weight_cap: float | None = None,
  weight_reject: float | None = None,
) -> PolicyLoss:
  """Decoupled PPO whose proximal policy is interpolated by the lag [B, T] of each token: `interpolated_proximal`.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    lag: int [B, T], the learner's version minus the version that drew the token.
    linear: whether probabilities are interpolated, not log-probabilities.
    behavior_at_zero: whether π_prox is μ at lag 0, as in the released code.
    low: the ratio r is held above 1 − low where A < 0.
    high: the ratio r is held below 1 + high where A > 0.
    dual_clip: where A < 0, r is also held below this; None for no bound.
    weighted: False drops the behavior weight π_prox/μ.
    weight_cap: truncates the behavior weight; None for no cap.
    weight_reject: rejects the tokens whose behavior weight is above it; None keeps all.

  >>> one = jnp.ones((1, 1))  # α = 1/2 between μ = 0.1 and π_θ = 0.9: r = 3 is held at 1.2, times the weight 3
  >>> a3po(jnp.log(0.9 * one), jnp.log(0.1 * one), jnp.array([1.0]), one > 0, lag=jnp.array([[2]])).loss.round(4)
  Array([[-3.6]], dtype=float32)
  """
  check_mask(mask, logprobs=logprobs, behavior=behavior, lag=lag)
  proximal = interpolated_proximal(logprobs, behavior, lag, linear=linear, behavior_at_zero=behavior_at_zero)
  return decoupled_ppo(
    logprobs,
    behavior,
    advantages,
    mask,
    proximal=proximal,
    low=low,
    high=high,
    dual_clip=dual_clip,
    weighted=weighted,
    weight_cap=weight_cap,
    weight_reject=weight_reject,
  )
