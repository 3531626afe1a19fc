"""Trust regions: losses that reject tokens or sequences by how far the policy has moved from the one that drew them.

By the token's own probability (`dppo`), by its ratio in proportion to the entropy (`estr`), by the divergence of whole
sequences (`trm`). How rejection works is said in `async_rl.losses._rejection`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_number
from async_rl.losses._clipped import ppo_clip
from async_rl.losses._kl import kl_estimate
from async_rl.losses._policy_gradient import PolicyLoss
from async_rl.losses._policy_gradient import PolicyLossFn
from async_rl.losses._policy_gradient import per_token
from async_rl.losses._policy_gradient import token_tis
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import mean_log_ratios
from async_rl.losses._rejection import restrict

_TOKEN_TIS_20 = functools.partial(token_tis, cap=20.0)


def dppo(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  bound: float = 0.2,
  kl: bool = False,
  inner: PolicyLossFn = _TOKEN_TIS_20,
) -> PolicyLoss:
  """DPPO: weight min(ρ_t, 20), without the tokens whose probability has moved by more than *bound* the way A pushes.

  What has moved is the token's own probability: π_θ − μ > bound where A > 0, π_θ − μ < −bound elsewhere. A rare token's
  ratio may be far from 1 while the distribution has hardly changed. With ``kl=True`` the distance is KL(μ ‖ π_θ) of the
  two outcomes, this token or any other, published with the bound 0.05.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    bound: the largest distance of a token that is kept; of probabilities, or in nats with ``kl=True``.
    kl: whether the distance is that divergence.
    inner: the loss of the tokens that are kept.

  References:
    DPPO, 2026, https://arxiv.org/abs/2602.04879

  >>> mask = jnp.ones((1, 2), bool)  # both ratios are 2
  >>> dppo(jnp.log(jnp.array([[0.8, 0.2]])), jnp.log(jnp.array([[0.4, 0.1]])), jnp.ones(1), mask).keep
  Array([[False,  True]], dtype=bool)
  """
  check_number("bound", bound, at_least=0, finite=False, remedy="inf keeps all")
  log_p = jnp.where(mask, jax.lax.stop_gradient(jnp.asarray(logprobs, jnp.float32)), 0.0)
  log_q = log_p - jax.lax.stop_gradient(log_ratios(logprobs, behavior, mask))
  log_p, log_q = (jnp.minimum(x, 0.0) for x in (log_p, log_q))
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  distance = _binary_kl(log_q, log_p) if kl else jnp.abs(p - q)
  outwards = jnp.where(per_token(advantages, mask) > 0, p > q, p < q)
  return restrict(inner(logprobs, behavior, advantages, mask), ~(outwards & (distance > bound)))


def _binary_kl(log_q: jax.Array, log_p: jax.Array) -> jax.Array:
  """Returns q log(q/p) + (1 − q) log((1 − q)/(1 − p)); what float32 rounds to p = 1 counts as 1 − p = 1.2e-7."""
  other_q, other_p = (jnp.maximum(-jnp.expm1(x), jnp.finfo(jnp.float32).eps) for x in (log_q, log_p))
  return jnp.exp(log_q) * (log_q - log_p) + other_q * (jnp.log(other_q) - jnp.log(other_p))


def estr(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  entropy: ArrayLike,
  tau: float = 1.0,
  eps: float = 0.01,
  inner: PolicyLossFn = ppo_clip,
) -> PolicyLoss:
  """ESTR, the entropy-scaled trust region: keeps a token iff (log ρ_t)² / (H_t + eps) ≤ tau.

  H_t is the entropy of the behavior policy at token t: the same log-ratio is allowed where the sampler was unsure and
  rejected where it was sure. Our sampler records no entropy, so in the trainer that of the policy being trained, at the
  start of the step, stands in for it; at a small lag they are close. The paper's *tau* is not known to us: the default
  is ours, and of 0.25, 1 and 4 our task chose 4 or 1 (experiments/reproductions/every_lag.md). 0.01 is reported for
  *eps*. The loss is averaged over all tokens of the batch, the rejected ones included: aggregate by `token_mean` with
  the batch's mask.

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    entropy: [B, T], H_t in nats, of the whole distribution that each token was drawn from; below 0, as by rounding, it
      counts as 0. No gradient flows.
    tau: the largest squared log-ratio over entropy of a token that is kept.
    eps: what is added to the entropy, in nats, above 0.
    inner: the loss of the tokens that are kept.

  References:
    Zhao et al., Deconstructing Off-Policy Ratios, 2026, https://arxiv.org/abs/2607.22186

  >>> mask = jnp.ones((1, 2), bool)  # both (log ρ)² are .25
  >>> estr(jnp.full((1, 2), -1.0), jnp.full((1, 2), -1.5), jnp.ones(1), mask, entropy=jnp.array([[0.1, 0.5]])).keep
  Array([[False,  True]], dtype=bool)
  """
  check_number("tau", tau, at_least=0, finite=False, remedy="inf keeps all")
  check_number("eps", eps, above=0, remedy="the entropy may be 0")
  check_mask(mask, entropy=entropy)
  scale = jnp.maximum(jnp.asarray(entropy, jnp.float32), 0.0) + eps
  keep = log_ratios(logprobs, behavior, mask) ** 2 <= tau * scale
  return restrict(inner(logprobs, behavior, advantages, mask), keep)


def trm(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  max_bound: float = 0.05,
  mean_bound: float = 0.001,
  inner: PolicyLossFn = ppo_clip,
) -> PolicyLoss:
  """Trust region masking: keeps a sequence iff max_t D_t ≤ max_bound and mean_t D_t ≤ mean_bound.

  D_t is KL(μ ‖ π_θ) at token t, in the paper over the whole vocabulary. Here only the sampled token is known, so D_t is
  the estimate ρ_t − 1 − log ρ_t (k3 of `kl_estimate`): never negative, and its mean under μ is that divergence. The
  default bounds are reported of the paper's runs, for the mismatch of two engines: they drop nearly all stale data. On
  our task bounds 10 to 100 times as wide were chosen at lags 4 to 128 (experiments/reproductions/every_lag.md).

  Args:
    logprobs: [B, T] log π_θ of each token, under the policy being trained; the gradient flows.
    behavior: [B, T] log μ of each token, under the weights that drew it.
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    max_bound: the largest divergence of one token of a sequence that is kept, in nats; inf for no bound.
    mean_bound: the largest mean divergence of a sequence that is kept, in nats; inf for no bound.
    inner: the loss of the sequences that are kept.

  References:
    Li et al., Trust Region Masking for Long-Horizon LLM Reinforcement Learning, 2025, https://arxiv.org/abs/2512.23075

  >>> behavior, mask = jnp.array([[-1.01, -1.01], [-1.01, -1.1]]), jnp.ones((2, 2), bool)
  >>> trm(jnp.full((2, 2), -1.0), behavior, jnp.ones(2), mask).keep
  Array([[ True,  True],
         [False, False]], dtype=bool)
  """
  for name, bound in (("max_bound", max_bound), ("mean_bound", mean_bound)):
    check_number(name, bound, at_least=0, finite=False, remedy="inf for no bound")
  divergence = kl_estimate(behavior, logprobs, mask, estimator="k3")
  largest = jnp.max(divergence, axis=-1, initial=0.0)
  keep = (largest <= max_bound) & (mean_log_ratios(divergence, mask) <= mean_bound)
  return restrict(inner(logprobs, behavior, advantages, mask), keep[:, None])
