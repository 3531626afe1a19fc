"""Score centering: takes the mean of the weighted score under the sampler out of a policy loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._arrays import check_mask
from async_rl.losses._policy_gradient import per_token
from async_rl.losses._ratios import clamped_exp

#: The least probability that the policy is taken to give to tokens outside of the head.
_MIN_TAIL = 1e-6


def score_centering(
  logprobs: ArrayLike,
  behavior: ArrayLike,
  advantages: ArrayLike,
  mask: ArrayLike,
  *,
  weight: Callable[[jax.Array], jax.Array] = jnp.ones_like,
) -> jax.Array:
  r"""Returns what to add to the loss −A f(ρ_t) log π_θ so that its expected gradient is 0 wherever A is constant.

  Stale data make the score's mean under the sampler nonzero, and an advantage that does not average to 0 at every
  position then pushes along it. Over the H most probable tokens of the sampler, p = π_θ(v) and q = μ(v):

  .. math:: A_t \sum_{v \in H} \mathrm{sg}(q f(p/q) - \rho f(1/\rho) p) \log p

  with ρ = (1 − Σ_H q) / (1 − Σ_H p), which stands for the tokens outside of H. Over the whole vocabulary it is exact.

  Args:
    logprobs: [B, T, H] log π_θ of the head's tokens, under the policy being trained; the gradient flows. Tokens that
      neither policy can draw may have −inf.
    behavior: [B, T, H] log μ of the same tokens, of the whole vocabulary's distribution (not renormalized).
    advantages: [B], or [B, T] where they differ by token; no gradient flows.
    mask: bool [B, T], the trained tokens.
    weight: f, the weight that the loss gives to a token of ratio π_θ/μ, elementwise: 1 by default (`reinforce`);
      ``lambda ratio: jnp.minimum(ratio, 2.0)`` for `token_tis`.

  Returns:
    float32 [B, T], to be added to the per-token loss; 0 where masked. Only its gradient has a meaning.

  References:
    Score Centering Stabilizes Off-policy Reinforcement Learning, 2026, https://arxiv.org/abs/2609.20807

  >>> p, q = jnp.log(jnp.array([[[0.6, 0.4]]])), jnp.log(jnp.array([[[0.5, 0.5]]]))
  >>> centering = lambda logits: score_centering(jax.nn.log_softmax(logits), q, jnp.ones(1), jnp.ones((1, 1), bool))
  >>> gradient = jax.grad(lambda logits: centering(logits).sum())(p)
  >>> [round(float(x), 4) for x in gradient.ravel()]  # the mean score q − p
  [-0.1, 0.1]
  """
  mask = jnp.asarray(mask)
  logprobs = jnp.asarray(logprobs, jnp.float32)
  check_mask(mask, logprobs=logprobs[..., 0], behavior=jnp.asarray(behavior)[..., 0])
  inside = mask[..., None]
  logprobs = jnp.where(inside, logprobs, 0.0)
  fixed = jax.lax.stop_gradient(logprobs)
  log_q = jax.lax.stop_gradient(jnp.where(inside, jnp.asarray(behavior, jnp.float32), 0.0))
  p, q = jnp.exp(fixed), jnp.exp(log_q)
  tail_p, tail_q = (1.0 - jnp.sum(x, axis=-1, keepdims=True) for x in (p, q))
  rho = jnp.maximum(tail_q, 0.0) / jnp.maximum(tail_p, _MIN_TAIL)
  rest = jnp.where(rho > 0, rho * weight(1.0 / jnp.where(rho > 0, rho, 1.0)), 0.0)
  ratios = clamped_exp(jnp.where(q > 0, fixed - log_q, 0.0))
  coefficients = jax.lax.stop_gradient(q * weight(ratios) - rest * p)
  terms = coefficients * jnp.where(coefficients == 0, 0.0, logprobs)
  centering = per_token(advantages, mask) * jnp.sum(terms, axis=-1)
  return jnp.where(mask, centering, 0.0)
