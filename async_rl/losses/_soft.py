"""Policy losses whose weight fades as the policy leaves the one that sampled, where others clip.

The signature is that of `async_rl.losses._policy_gradient`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._policy_gradient import PolicyLoss
from async_rl.losses._policy_gradient import PolicyLossFn
from async_rl.losses._policy_gradient import per_token
from async_rl.losses._policy_gradient import weighted_score
from async_rl.losses._ratios import LOG_CLAMP
from async_rl.losses._ratios import clamped_exp
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import sequence_log_weights
from async_rl.losses._trust_regions import dppo

#: VESPO's lower clamp of the sequence log-weight; the upper one is `LOG_CLAMP`.
_VESPO_LOW = math.log(1e-8)


def sapo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  positive: float = 1.0,
  negative: float = 1.05,
) -> PolicyLoss:
  """SAPO, a soft gate of the token ratio: −A · 4/τ · sigmoid(τ (ρ_t − 1)).

  Its weight 4 g (1 − g) ρ_t, with g the sigmoid, is 1 on-policy and falls on both sides.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    positive: the sharpness τ where A > 0.
    negative: the sharpness τ elsewhere.

  References:
    Gao et al., Soft Adaptive Policy Optimization, 2025, https://arxiv.org/abs/2511.20347

  >>> one = jnp.ones((1, 1))
  >>> sapo(0.0 * one, 0.0 * one, jnp.array([1.0]), one > 0).loss
  Array([[-2.]], dtype=float32)
  """
  for name, value in (("positive", positive), ("negative", negative)):
    check_number(name, value, above=0)
  advantages = per_token(advantages, mask)
  ratios = clamped_exp(log_ratios(logprobs, behavior, mask))
  sharpness = jnp.where(advantages > 0, positive, negative)
  gate = 1.0 / (1.0 + clamped_exp(-sharpness * (ratios - 1.0)))
  loss = jnp.where(mask, -advantages * 4.0 / sharpness * gate, 0.0)
  return PolicyLoss(loss, jnp.asarray(mask), jnp.zeros_like(mask))


def vespo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  shape_positive: float = 2.0,
  rate_positive: float = 3.0,
  shape_negative: float = 3.0,
  rate_negative: float = 2.0,
) -> PolicyLoss:
  """VESPO: weight φ(w) = w^k exp(λ (1 − w)) on every token of the sequence, 1 on-policy, with its peak at w = k/λ.

  The log of w is clamped to [log 1e-8, 20]. (k, λ) are those of TRL, whose docstring names others.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    shape_positive: k where A ≥ 0.
    rate_positive: λ where A ≥ 0.
    shape_negative: k where A < 0.
    rate_negative: λ where A < 0.

  References:
    VESPO, 2026, https://arxiv.org/abs/2602.10693

  >>> one = jnp.ones((1, 1))
  >>> vespo(-1.0 * one, -1.0 * one - jnp.log(2.0), jnp.array([1.0]), one > 0).loss  # w = 2: 4 e^-3
  Array([[0.19914827]], dtype=float32)
  """
  shapes = {"shape_positive": shape_positive, "shape_negative": shape_negative}
  for name, value in (shapes | {"rate_positive": rate_positive, "rate_negative": rate_negative}).items():
    check_number(name, value, at_least=0)
  positive = per_token(advantages, mask) >= 0
  shape = jnp.where(positive, shape_positive, shape_negative)
  rate = jnp.where(positive, rate_positive, rate_negative)
  log_weights = sequence_log_weights(log_ratios(logprobs, behavior, mask))[:, None]
  log_weights = jnp.clip(log_weights, _VESPO_LOW, LOG_CLAMP)
  log_phi = shape * log_weights + rate * (1.0 - jnp.exp(log_weights))
  return weighted_score(logprobs, advantages, mask, log_phi, jnp.zeros((1, 1), bool))


def log_squared(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  tau: float = 1e-3,
  inner: PolicyLossFn = dppo,
) -> PolicyLoss:
  """Adds τ (log π_θ − log μ)² to every token of another loss, a pull towards the policy that sampled.

  It also pulls on the tokens that *inner* rejects, so that none is left out of `keep`.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    tau: the strength τ.
    inner: the loss that it is added to.

  References:
    Kimi Team, Kimi K2.5, 2026, https://arxiv.org/abs/2602.02276; prime-rl, whose loss is `dppo` with this penalty

  >>> one = jnp.ones((1, 1))
  >>> log_squared(-1.0 * one, -3.0 * one, jnp.zeros(1), one > 0, tau=0.5).loss
  Array([[2.]], dtype=float32)
  """
  check_number("tau", tau, at_least=0)
  out = inner(logprobs, behavior, advantages, mask)
  penalty = tau * jnp.square(log_ratios(logprobs, behavior, mask))
  return PolicyLoss(out.loss + penalty, jnp.asarray(mask), out.clipped)
