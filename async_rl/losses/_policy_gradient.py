"""Policy losses whose gradient is weight · A · ∇log π with a weight that carries no gradient.

All policy losses of this package share one signature: `loss(logprobs, behavior, advantages, mask, *, options)` with

  logprobs    [B, T]  log π_θ of each token, under the policy being trained; the gradient flows through it
  behavior   [B, T]  log μ of each token, under the weights that drew it
  advantages  [B], or [B, T] where they differ by token (GAE); no gradient flows
  mask        bool [B, T], True on trained tokens

and one result, `PolicyLoss`. Rows are independent of each other, so any split of the batch gives the same losses.
Notation: ρ_t = exp ℓ_t is the token ratio, w = exp Σ_t ℓ_t the sequence weight, L the number of trained tokens. All
log-ratios are clamped to ±20 before exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import clamped_exp
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import sequence_log_weights


class PolicyLoss(NamedTuple):
  """What a policy loss returns, per token; `aggregate` turns it into a number.

  Attributes:
    loss: float32 [B, T], to be minimized; exactly 0 where masked or rejected.
    keep: bool [B, T], trained tokens that were not rejected. Always within the mask.
    clipped: bool [B, T], trained tokens whose ratio or weight was cut by a clip or a cap.
  """

  loss: jax.Array
  keep: jax.Array
  clipped: jax.Array


PolicyLossFn = Callable[..., PolicyLoss]


def per_token(advantages: ArrayLike, mask: ArrayLike) -> jax.Array:
  """Advantages as [B, 1] or [B, T], without gradient; 0 for tokens outside the mask, whatever they have."""
  advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
  if advantages.shape not in (jnp.shape(mask), jnp.shape(mask)[:1]):
    raise ValueError(
      f"*advantages* must be [B] or [B, T] for a mask of shape {jnp.shape(mask)}, got {advantages.shape}."
    )
  return advantages[:, None] if advantages.ndim == 1 else jnp.where(mask, advantages, 0.0)


def weighted_score(
  logprobs: ArrayLike, advantages: ArrayLike, mask: ArrayLike, log_weights: ArrayLike, clipped: ArrayLike
) -> PolicyLoss:
  """loss = −sg(weight) · A · log π, with log-weights and *clipped* of shape [B, T] or [B, 1]."""
  check_mask(mask, logprobs=logprobs)
  weights = jax.lax.stop_gradient(clamped_exp(log_weights))
  logprobs = jnp.where(mask, jnp.asarray(logprobs, jnp.float32), 0.0)
  loss = jnp.where(mask, -weights * per_token(advantages, mask) * logprobs, 0.0)
  return PolicyLoss(loss, jnp.asarray(mask), jnp.logical_and(mask, clipped))


def reinforce(logprobs: ArrayLike, behavior: ArrayLike, advantages: ArrayLike, mask: ArrayLike) -> PolicyLoss:
  """REINFORCE without any off-policy correction: weight 1.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
  """
  check_mask(mask, behavior=behavior)
  return weighted_score(logprobs, advantages, mask, jnp.zeros((1, 1)), jnp.zeros((1, 1), bool))


def cispo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 0.0,
  high: float = 5.0,
) -> PolicyLoss:
  """CISPO: weight clip(ρ_t, low, high), so that no token loses its gradient.

  The paper sets no lower bound and tunes the upper one without naming it; 5 is from the range that ScaleRL reports.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the lower bound of the ratio, as a weight.
    high: the upper bound of the ratio, as a weight.

  References:
    MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585; Khatri et al., ScaleRL, 2025, https://arxiv.org/abs/2510.13786

  >>> pi, mu = jnp.array([[0.9, 0.5, 0.1]]), jnp.array([[0.1, 0.5, 0.5]])  # ratios 9, 1 and 0.2
  >>> cispo(jnp.log(pi), jnp.log(mu), jnp.ones(1), jnp.ones((1, 3), bool), low=0.5).clipped
  Array([[ True, False,  True]], dtype=bool)
  """
  check_number("low", low, at_least=0, remedy="0 for no lower bound")
  check_number("high", high, above=0, at_least=low, finite=False, remedy="inf for no upper bound")
  ratios = log_ratios(logprobs, behavior, mask)
  log_low, log_high = jnp.log(low), jnp.log(high)
  return weighted_score(
    logprobs, advantages, mask, jnp.clip(ratios, log_low, log_high), (ratios < log_low) | (ratios > log_high)
  )


def token_tis(
  logprobs: ArrayLike, behavior: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, cap: float = 2.0
) -> PolicyLoss:
  """Token-level truncated importance sampling: weight min(ρ_t, cap). ``cap=inf`` does not truncate.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    cap: the largest weight of a token.

  References:
    Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025 (cap 2)

  >>> token_tis(jnp.array([[-1.0]]), jnp.array([[-3.0]]), jnp.array([1.0]), jnp.array([[True]])).loss
  Array([[2.]], dtype=float32)
  """
  check_number("cap", cap, above=0, finite=False, remedy="inf does not truncate")
  return cispo(logprobs, behavior, advantages, mask, low=0.0, high=cap)


def sequence_tis(
  logprobs: ArrayLike, behavior: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, cap: float = 8.0
) -> PolicyLoss:
  """Sequence-level truncated importance sampling: weight min(w, cap) on every token of the sequence.

  The published loss averages over tokens, then over sequences: aggregate it by `sequence_mean`. With ``cap=inf`` the
  weights are not truncated (but for the clamp at e^20).

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    cap: the largest weight of a sequence.

  References:
    VCPO: Stable Asynchrony, 2026, https://arxiv.org/abs/2602.17616

  >>> mask = jnp.array([[True, True]])
  >>> out = sequence_tis(jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -3.0]]), jnp.array([0.5]), mask)
  >>> out.loss  # w = e^3 = 20.1, capped at 8: -8 * 0.5 * -1
  Array([[4., 4.]], dtype=float32)
  """
  check_number("cap", cap, above=0, finite=False, remedy="inf does not truncate")
  log_weights = sequence_log_weights(log_ratios(logprobs, behavior, mask))[:, None]
  log_cap = jnp.log(cap)
  return weighted_score(logprobs, advantages, mask, jnp.minimum(log_weights, log_cap), log_weights > log_cap)


def topr(
  logprobs: ArrayLike, behavior: ArrayLike, advantages: ArrayLike, mask: ArrayLike, *, cap: float = 1.0
) -> PolicyLoss:
  """TOPR: weight 1 where A ≥ 0, sequence weight min(w, cap) where A < 0 (cap 1 in the paper).

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    cap: the largest weight of a sequence with a negative advantage; 0 trains on the others alone.

  References:
    Le Roux et al., Tapered Off-Policy REINFORCE, 2025, https://arxiv.org/abs/2503.14286

  >>> two = jnp.ones((2, 1))
  >>> topr(-1.0 * two, 0.0 * two, jnp.array([1.0, -1.0]), two > 0).loss  # w = e^-1 on the negative
  Array([[ 1.        ],
         [-0.36787945]], dtype=float32)
  """
  check_number("cap", cap, at_least=0, finite=False, remedy="inf does not truncate")
  log_weights = sequence_log_weights(log_ratios(logprobs, behavior, mask))[:, None]
  negative, log_cap = per_token(advantages, mask) < 0, jnp.log(cap)
  return weighted_score(
    logprobs,
    jnp.where(cap > 0, advantages, jnp.maximum(advantages, 0)),  # no weight is as small as 0
    mask,
    jnp.where(negative, jnp.minimum(log_weights, log_cap), 0.0),
    negative & (log_weights > log_cap),
  )
