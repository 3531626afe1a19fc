"""Losses that reject tokens or sequences: a rule that says which to keep, around any inner policy loss.

Rejected tokens have loss 0 and are absent from `PolicyLoss.keep`; whether they stay in the denominator is decided where
the loss is aggregated. The inner loss sees the whole mask, so its sequence weights do not depend on the rejection.
The signature is that of `async_rl.losses._policy_gradient`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._clipped import ppo_clip
from async_rl.losses._policy_gradient import PolicyLoss
from async_rl.losses._policy_gradient import PolicyLossFn
from async_rl.losses._policy_gradient import per_token
from async_rl.losses._policy_gradient import reinforce
from async_rl.losses._policy_gradient import sequence_tis
from async_rl.losses._policy_gradient import token_tis
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import mean_log_ratios
from async_rl.losses._ratios import sequence_log_weights

_TOKEN_IS = functools.partial(token_tis, cap=math.inf)
_SEQUENCE_IS = functools.partial(sequence_tis, cap=math.inf)


def restrict(policy_loss: PolicyLoss, keep: ArrayLike) -> PolicyLoss:
  """The same loss with the tokens outside *keep* (bool, [B, T] or [B, 1]) rejected.

  >>> true = jnp.ones((1, 2), bool)
  >>> out = restrict(PolicyLoss(jnp.ones((1, 2)), true, true), jnp.array([[True, False]]))
  >>> out.loss, out.keep
  (Array([[1., 0.]], dtype=float32), Array([[ True, False]], dtype=bool))
  """
  return PolicyLoss(
    jnp.where(keep, policy_loss.loss, 0.0),
    jnp.logical_and(policy_loss.keep, keep),
    jnp.logical_and(policy_loss.clipped, keep),
  )


def _within(log_values: jax.Array, low: float, high: float) -> jax.Array:
  check_number("low", low, at_least=0, remedy="0 for no lower bound")
  check_number(
    "high", high, above=0, at_least=low, finite=False, remedy="*low* to *high* is kept; inf for no upper bound"
  )
  return (log_values >= jnp.log(low)) & (log_values <= jnp.log(high))


def icepop(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 0.5,
  high: float = 5.0,
  inner: PolicyLossFn = _TOKEN_IS,
) -> PolicyLoss:
  """IcePop, a token mask: weight ρ_t · 1[low ≤ ρ_t ≤ high].

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the smallest ratio of a token that is kept.
    high: the largest ratio of a token that is kept.
    inner: the loss of the tokens that are kept.

  References:
    Ling team, Every Step Evolves (Ring-1T), 2025, https://arxiv.org/abs/2510.18855

  >>> mask = jnp.ones((1, 2), bool)
  >>> icepop(jnp.log(jnp.array([[0.9, 0.5]])), jnp.log(jnp.array([[0.1, 0.5]])), jnp.ones(1), mask).keep
  Array([[False,  True]], dtype=bool)
  """
  keep = _within(log_ratios(logprobs, behavior, mask), low, high)
  return restrict(inner(logprobs, behavior, advantages, mask), keep)


def sequence_mask(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 0.125,
  high: float = 8.0,
  inner: PolicyLossFn = _SEQUENCE_IS,
) -> PolicyLoss:
  """Masked importance sampling (MIS): weight w · 1[low ≤ w ≤ high] on every token of the sequence.

  The default band is ours: 8 is the cap of `sequence_tis`, and the band is symmetric in log space.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the smallest weight of a sequence that is kept.
    high: the largest weight of a sequence that is kept.
    inner: the loss of the sequences that are kept.

  References:
    Liu et al., When Speed Kills Stability, 2025

  >>> mask = jnp.ones((2, 1), bool)
  >>> sequence_mask(jnp.array([[-1.0], [-1.0]]), jnp.array([[-1.5], [-4.0]]), jnp.ones(2), mask).keep
  Array([[ True],
         [False]], dtype=bool)
  """
  keep = _within(sequence_log_weights(log_ratios(logprobs, behavior, mask)), low, high)[:, None]
  return restrict(inner(logprobs, behavior, advantages, mask), keep)


def geometric_mask(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  low: float = 0.9,
  high: float = 1.1,
  inner: PolicyLossFn = reinforce,
) -> PolicyLoss:
  """Keeps a sequence iff its geometric-mean ratio w^(1/L) lies in [low, high]: a pure filter with weight 1.

  Pass ``inner=sequence_tis`` (or `token_tis`) to weigh what is kept. The default band is ours; the 0.99 … 1.001 in
  public use are for the numerical mismatch of two engines at lag 0 and reject nearly all stale data.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    low: the smallest mean ratio of a sequence that is kept.
    high: the largest mean ratio of a sequence that is kept.
    inner: the loss of the sequences that are kept.

  References:
    Li et al., RL Collapse (part 3), 2025

  >>> behavior = jnp.array([[-1.1, -0.9], [-1.5, -1.5]])
  >>> geometric_mask(jnp.full((2, 2), -1.0), behavior, jnp.ones(2), jnp.ones((2, 2), bool)).keep
  Array([[ True,  True],
         [False, False]], dtype=bool)
  """
  keep = _within(mean_log_ratios(log_ratios(logprobs, behavior, mask), mask), low, high)[:, None]
  return restrict(inner(logprobs, behavior, advantages, mask), keep)


def opsm(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  delta: float = 0.1,
  inner: PolicyLossFn = ppo_clip,
) -> PolicyLoss:
  """Off-policy sequence masking: drops a sequence iff A < 0 and mean_t(log μ − log π_θ) > delta.

  Published without a value for *delta*; 0.1 is ours.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    delta: the largest mean of log μ − log π_θ, in nats, at which a sequence with A < 0 is kept.
    inner: the loss of the sequences that are kept.

  References:
    DeepSeek-AI, DeepSeek-V3.2, 2025, https://arxiv.org/abs/2512.02556

  >>> mask = jnp.ones((2, 1), bool)
  >>> opsm(jnp.array([[-2.0], [-2.0]]), jnp.array([[-1.0], [-1.0]]), jnp.array([1.0, -1.0]), mask).keep
  Array([[ True],
         [False]], dtype=bool)
  """
  check_number("delta", delta, at_least=0, finite=False, remedy="inf keeps all")
  drift = -mean_log_ratios(log_ratios(logprobs, behavior, mask), mask)[:, None]
  keep = ~((per_token(advantages, mask) < 0) & (drift > delta))
  return restrict(inner(logprobs, behavior, advantages, mask), keep)


def second_moment_threshold(log_ratios: ArrayLike, mask: ArrayLike, *, budget: float = 0.04) -> jax.Array:
  """M2PO's trust region over the whole batch: the (log ρ)² from which on tokens are rejected.

  The largest (log ρ)² are rejected until the mean of the rest is at most *budget*; equal values are rejected together.

  Args:
    log_ratios: [B, T] of the whole optimizer batch, not of one micro-batch.
    mask: bool [B, T].
    budget: bound on the second moment, 0.04 in the paper; inf keeps all.

  Returns:
    float32 scalar: tokens with (log ρ)² below it stay; inf when all do. It lies halfway between the last value that
    stays and the first that does not, so the rounding of another program does not move a token across.

  >>> ratios = jnp.array([[0.1, 0.2, 0.3, 0.5]])  # .01 and .04 fit, with .09 the mean would be .047
  >>> print(f"{second_moment_threshold(ratios, jnp.ones((1, 4), bool)):.3f}")
  0.065
  """
  check_number("budget", budget, at_least=0, finite=False, remedy="inf keeps all")
  check_mask(mask, log_ratios=log_ratios)
  squares = jnp.sort(jnp.where(mask, jnp.asarray(log_ratios, jnp.float32) ** 2, jnp.inf), axis=None)
  means = jnp.cumsum(squares) / jnp.arange(1, squares.size + 1)
  within = jnp.isfinite(squares) & (means <= budget)
  # The first value that does not fit; beyond the last token the sorted array holds inf already.
  rejected = jnp.append(squares, jnp.inf)[jnp.argmin(jnp.append(within, False))]
  kept = jnp.max(jnp.where(squares < rejected, squares, 0.0), initial=0.0)
  return 0.5 * (kept + rejected)


def m2po(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  threshold: ArrayLike,
  signed: bool = False,
  inner: PolicyLossFn = _TOKEN_IS,
) -> PolicyLoss:
  """M2PO: weight ρ_t on the tokens with (log ρ_t)² below *threshold*, made by `second_moment_threshold` for the batch.

  With ``signed=True`` a token above the threshold is kept where its update moves the ratio back towards 1, that is
  unless A > 0 and ρ_t > 1 or A < 0 and ρ_t < 1: the final paper's Algorithm 1 as open trainers describe it (Trinity-RFT
  #615); we have not seen it. The threshold is the same. The paper keeps the rejected tokens in the denominator:
  aggregate by `token_mean` with the batch's mask.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    threshold: [], the (log ρ)² from which on tokens are rejected.
    signed: whether only tokens that move away from the policy that sampled are rejected.
    inner: the loss of the tokens that are kept.

  References:
    Zheng et al., Prosperity before Collapse, 2025, https://arxiv.org/abs/2510.01161

  >>> mask = jnp.ones((1, 2), bool)
  >>> m2po(jnp.array([[-1.0, -1.0]]), jnp.array([[-1.1, -2.0]]), jnp.ones(1), mask, threshold=0.09).keep
  Array([[ True, False]], dtype=bool)
  """
  check_number("threshold", threshold, at_least=0, finite=False, remedy="`second_moment_threshold` makes it")
  ratios = log_ratios(logprobs, behavior, mask)
  keep = ratios**2 < threshold
  if signed:
    keep |= per_token(advantages, mask) * ratios <= 0
  return restrict(inner(logprobs, behavior, advantages, mask), keep)
