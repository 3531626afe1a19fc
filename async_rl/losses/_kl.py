"""Estimators of KL(π_θ ‖ π_ref) per token, as a metric and as a loss term.

With d = log π_θ − log π_ref at a token drawn from π_θ: k1 = d (unbiased), k2 = d²/2 (biased, never negative),
k3 = exp(−d) − 1 + d (unbiased, never negative).

References:
  Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_choice
from async_rl._validation import check_number
from async_rl.losses._ratios import LOG_CLAMP
from async_rl.losses._ratios import check_mask
from async_rl.losses._ratios import clamped_exp
from async_rl.losses._ratios import log_ratios

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
  logprobs: ArrayLike, reference: ArrayLike, mask: ArrayLike, *, estimator: KLEstimator = "k3"
) -> jax.Array:
  """The estimator's value per token, float32 [B, T], 0 where masked.

  k3 is constant below d = −20 (clamping only its exponent would turn the gradient's sign there).

  Args:
    logprobs: [B, T] log π_θ; the (path-wise) gradient flows, but see `kl_loss`.
    reference: [B, T] log π_ref; no gradient flows.
    mask: bool [B, T].
    estimator: `k1`, `k2` or `k3`.

  >>> kl_estimate(jnp.array([[0.0]]), jnp.array([[2.0]]), jnp.array([[True]]), estimator="k2")
  Array([[2.]], dtype=float32)
  """
  check_choice("estimator", estimator, get_args(KLEstimator))
  difference = log_ratios(logprobs, reference, mask)
  if estimator == "k1":
    return difference
  if estimator == "k2":
    return jnp.square(difference) / 2.0
  difference = jnp.maximum(difference, -LOG_CLAMP)
  return jnp.expm1(-difference) + difference  # exp(−d) − 1 would be rounded below −d for small d


def kl_loss(
  logprobs: ArrayLike,
  reference: ArrayLike,
  behavior: ArrayLike,
  mask: ArrayLike,
  *,
  estimator: KLEstimator = "k3",
  cap: float | None = None,
) -> jax.Array:
  """A loss term whose gradient is that of the estimator's expectation under π_θ, from tokens drawn by μ.

  The value is ρ k and the gradient ρ (∇k + k ∇log π_θ), with ρ = π_θ/μ. The second part is the score-function term:
  without it the gradient of k1 has mean zero and that of k3 is another divergence's. On-policy ρ is 1 and the term
  remains. (The tokens before a token are taken as drawn by π_θ.)

  Args:
    logprobs: [B, T] log π_θ.
    reference: [B, T] log π_ref.
    behavior: [B, T] log μ.
    mask: bool [B, T].
    estimator: `k1`, `k2` or `k3`.
    cap: truncates ρ, which is otherwise only clamped at e^20; None for no cap.

  Returns:
    float32 [B, T], 0 where masked; to be aggregated like the policy loss and added to it with a coefficient.

  >>> x = jnp.array([[-1.0]])
  >>> jax.grad(lambda p: kl_loss(p, x - 1.0, x, jnp.array([[True]]), estimator="k1").sum())(x)  # 1 + d
  Array([[2.]], dtype=float32)
  """
  if cap is not None:
    check_number("cap", cap, above=0, finite=False, remedy="None for no cap")
  check_mask(mask, logprobs=logprobs, reference=reference, behavior=behavior)
  estimate = kl_estimate(logprobs, reference, mask, estimator=estimator)
  log_weights = log_ratios(logprobs, behavior, mask)
  weights = clamped_exp(log_weights if cap is None else jnp.minimum(log_weights, jnp.log(cap)))
  score = log_ratios(logprobs, logprobs, mask)  # 0 in value, ∇log π in gradient
  return jax.lax.stop_gradient(weights) * (estimate + jax.lax.stop_gradient(estimate) * score)
