"""Policy losses with a clipped ratio that carries the gradient: the PPO family."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._policy_gradient import PolicyLoss
from async_rl.losses._policy_gradient import per_token
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import clamped_exp
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import mean_log_ratios
from async_rl.losses._ratios import sequence_log_weights


def _check_clip(low: float | jax.Array, high: float | jax.Array, dual_clip: float | None = None) -> None:
  """The ends may differ by token; only single numbers are checked."""
  if np.ndim(low) == 0:
    check_number("low", low, at_least=0, at_most=1, remedy="the ratio is held above 1 - low")
  if np.ndim(high) == 0:
    check_number("high", high, at_least=0, finite=False, remedy="the ratio is held below 1 + high")
  if dual_clip is not None:
    check_number("dual_clip", dual_clip, above=1, finite=False, remedy="None for no bound")


def clipped_surrogate(
  log_ratio: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float | jax.Array,
  high: float | jax.Array,
  dual_clip: float | None = None,
  log_weights: ArrayLike = 0.0,
) -> PolicyLoss:
  """loss = −weight · min(rA, clip(r, 1 − low, 1 + high)A), all in log space; r and weight of shape [B, T] or [B, 1].

  *low* and *high* are numbers, or of r's shape.

  With *dual_clip* c > 1 and A < 0 the ratio is also held below c.
  """
  _check_clip(low, high, dual_clip)
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
  behavior: ArrayLike,
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

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the ratio is held above 1 − low where A < 0.
    high: the ratio is held below 1 + high where A > 0.
    dual_clip: where A < 0, the ratio is also held below this; None for no bound.

  References:
    Schulman et al., PPO, 2017, https://arxiv.org/abs/1707.06347; Ye et al. (dual clip), 2019,
    https://arxiv.org/abs/1912.09729; Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476

  >>> one = jnp.ones((1, 1))
  >>> out = ppo_clip(jnp.log(1.5 * one), 0.0 * one, jnp.array([1.0]), one > 0)
  >>> float(out.loss[0, 0]), bool(out.clipped[0, 0])  # the ratio 1.5 is held at 1.2
  (-1.2000000476837158, True)
  """
  ratios = log_ratios(logprobs, behavior, mask)
  return clipped_surrogate(ratios, advantages, mask, low=low, high=high, dual_clip=dual_clip)


def log_ratio_quantile(log_ratios: ArrayLike, mask: ArrayLike, *, share: float = 0.9) -> jax.Array:
  """SAT's scale of staleness over the whole batch: the *share* quantile of |log ρ| over its tokens.

  Args:
    log_ratios: [B, T] of the whole optimizer batch, not of one micro-batch.
    mask: bool [B, T].
    share: the share of the tokens that lie at or below it, in (0, 1].

  Returns:
    float32 scalar: the value of rank ⌈share · N⌉ of the N tokens, so that it is one of them; 0 without tokens.

  >>> print(log_ratio_quantile(jnp.array([[-0.3, 0.1, 0.2, 9.0]]), jnp.array([[True, True, True, False]]), share=0.5))
  0.2
  """
  check_number("share", share, above=0, at_most=1)
  check_mask(mask, log_ratios=log_ratios)
  sizes = jnp.sort(jnp.where(mask, jnp.abs(jnp.asarray(log_ratios, jnp.float32)), jnp.inf), axis=None)
  count = jnp.sum(mask)
  rank = jnp.ceil(share * count - 1e-4).astype(int)
  return jnp.where(count > 0, sizes[jnp.maximum(rank, 1) - 1], 0.0)


def sat(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  log_ratio_scale: ArrayLike,
  low: float = 0.2,
  high: float = 0.2,
  exponent: float = 2.0,
) -> PolicyLoss:
  """SAT, a staleness-adaptive trust region: `ppo_clip` with a narrower clip for the tokens of the largest |log ρ|.

  The end of the clip on the token's side is contracted, 1 + c·high where ρ_t > 1 and 1 − c·low where ρ_t < 1. Up to the
  scale Q, made by `log_ratio_quantile` for the batch, c = 1; beyond it c = Qⁿ / (Qⁿ + |log ρ_t|ⁿ), the Hill function
  with its half at Q. Of the paper we know the quantile .9, "a Hill kernel" and n = 2; this form is our reading.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    log_ratio_scale: [], the scale Q, in nats.
    low: as of `ppo_clip`, where c = 1.
    high: as of `ppo_clip`, where c = 1.
    exponent: n.

  References:
    Yang et al., Stale but Stable, 2026, https://arxiv.org/abs/2607.18722

  >>> one = jnp.ones((1, 1))
  >>> sat(jnp.log(1.5 * one), 0.0 * one, jnp.ones(1), one > 0, log_ratio_scale=jnp.log(1.4999)).loss.round(2)  # c = 1/2
  Array([[-1.1]], dtype=float32)
  """
  _check_clip(low, high)
  check_number("log_ratio_scale", log_ratio_scale, at_least=0, finite=False, remedy="`log_ratio_quantile` makes it")
  check_number("exponent", exponent, above=0)
  ratios = log_ratios(logprobs, behavior, mask)
  fixed, scale = (jax.lax.stop_gradient(jnp.asarray(x, jnp.float32)) for x in (ratios, log_ratio_scale))
  tail = (jnp.abs(fixed) > scale) & (scale > 0)
  contraction = jnp.where(tail, 1.0 / (1.0 + (jnp.abs(fixed) / jnp.where(scale > 0, scale, 1.0)) ** exponent), 1.0)
  lower = jnp.where(fixed < 0, contraction * low, low)
  upper = jnp.where(fixed > 0, contraction * high, high)
  return clipped_surrogate(ratios, advantages, mask, low=lower, high=upper)


def gspo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 3e-4,
  high: float = 4e-4,
  token: bool = False,
) -> PolicyLoss:
  """GSPO: the clipped objective of the length-normalized sequence ratio s = w^(1/L), the same value on every token.

  With ``token=True`` (GSPO-token) each token has s_t = sg(s)·π_t/sg(π_t): equal in value, and equal in gradient where
  the advantage does not differ by token. Aggregate by `sequence_mean`.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the sequence ratio is held above 1 − low where A < 0.
    high: the sequence ratio is held below 1 + high where A > 0.
    token: whether each token has a ratio of its own (GSPO-token).

  References:
    Zheng et al., Group Sequence Policy Optimization, 2025, https://arxiv.org/abs/2507.18071

  >>> mask = jnp.array([[True, True]])
  >>> gspo(jnp.array([[-1.0, -2.0]]), jnp.array([[-1.0, -2.0]]), jnp.array([0.5]), mask).loss
  Array([[-0.5, -0.5]], dtype=float32)
  """
  ratios = log_ratios(logprobs, behavior, mask)
  log_s = mean_log_ratios(ratios, mask)[:, None]
  if token:
    log_s = jax.lax.stop_gradient(log_s - ratios) + ratios
  return clipped_surrogate(log_s, advantages, mask, low=low, high=high)


def proximal_rloo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 0.2,
  high: float = 0.2,
) -> PolicyLoss:
  """Proximal RLOO: PPO's clipped objective of the whole sequence ratio w, the same value on every token.

  Aggregate by `sequence_mean`, which makes it max(−A·w, −A·clip(w)) per sequence; the advantages are
  `rloo_advantages` of `kl_penalized_rewards`. The paper's trainer recomputes the denominator with its own weights;
  here *behavior* is what the caller passes, normally the true behavior log-probabilities.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the sequence ratio is held above 1 − low where A < 0.
    high: the sequence ratio is held below 1 + high where A > 0.

  References:
    Noukhovitch et al., Asynchronous RLHF, 2024, https://arxiv.org/abs/2410.18252

  >>> mask = jnp.array([[True, True]])
  >>> proximal_rloo(jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -2.0]]), jnp.array([1.0]), mask).loss
  Array([[-1.2, -1.2]], dtype=float32)
  """
  log_weights = sequence_log_weights(log_ratios(logprobs, behavior, mask))[:, None]
  return clipped_surrogate(log_weights, advantages, mask, low=low, high=high)
