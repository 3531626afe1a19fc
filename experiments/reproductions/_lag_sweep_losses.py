"""Defines the losses of the sweep, so that one program computes the gradient of the one that a run has.

The gradient of every policy loss is Σ_t c_t ∇log π(a_t), so the losses differ only in the coefficients
c = ∂loss/∂log π, [B, T] numbers that are cheap to compute for all of them and to choose from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from async_rl import learning
from async_rl import losses
from async_rl import stabilizers

Array = jax.Array

#: Effective sample size, as a share of the batch, that the servo holds and that tempering reaches at least.
ESS_TARGET = 0.5


def _prefix_tis(
  logprobs: Array, behavior: Array, advantages: Array, mask: Array, *, cap: float = 8.0
) -> losses.PolicyLoss:
  """Weights token t by min(Π_{s≤t} ρ_s, cap), the part of the sequence weight that the token's own past explains."""
  ratios = losses.log_ratios(jax.lax.stop_gradient(logprobs), behavior, mask)
  weights = losses.clamped_exp(jnp.minimum(jnp.cumsum(ratios, axis=1), jnp.log(cap)))
  return losses.reinforce(logprobs, behavior, weights * advantages, mask)


def _tempered_is(
  logprobs: Array, behavior: Array, advantages: Array, mask: Array, *, log_weights: Array
) -> losses.PolicyLoss:
  """Weights by w^α, mean 1, with the largest α (of 33 in [0, 1]) whose ESS is at least `ESS_TARGET` of the batch."""
  tempered = jnp.linspace(0.0, 1.0, 33)[:, None] * log_weights[None, :]
  reached = jax.vmap(stabilizers.ess_ratio)(tempered) >= ESS_TARGET
  logs = tempered[jnp.max(jnp.where(reached, jnp.arange(33), 0))]
  weights = jax.nn.softmax(logs) * logs.size
  return losses.reinforce(logprobs, behavior, weights[:, None] * advantages, mask)


def _times_length(loss: losses.PolicyLossFn, power: float) -> losses.PolicyLossFn:
  """Returns a loss times (a sequence's number of tokens)^*power*: at 1 its mean over tokens becomes a sum."""

  def scaled(logprobs: Array, behavior: Array, advantages: Array, mask: Array) -> losses.PolicyLoss:
    out = loss(logprobs, behavior, advantages, mask)
    return out._replace(loss=out.loss * jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32) ** power)

  return scaled


_sequence_ppo = functools.partial(losses.proximal_rloo, low=0.5, high=1.0)

#: Losses as objectives take them. There is one update per batch, so that of the weights of `decoupled_ppo`, whose
#: proximal policy is the one at the batch's start, only the behavior weight remains.
LOSSES: dict[str, losses.PolicyLossFn] = {
  "reinforce": losses.reinforce,
  "token_tis": losses.token_tis,
  "sequence_tis": losses.sequence_tis,
  "ppo": losses.ppo_clip,
  "recompute": losses.decoupled_ppo,
  "a3po": losses.a3po,
  "gspo": losses.gspo,
  "cispo": losses.cispo,
  "topr": losses.topr,
  "m2po": losses.m2po,
  # Not from a paper of the list.
  "sequence_tis_1": functools.partial(losses.sequence_tis, cap=1.0),
  "gspo_wide": functools.partial(losses.gspo, low=0.03, high=0.03),
  "sequence_ppo": _sequence_ppo,
  "prefix_tis": _prefix_tis,
  "tempered_is": _tempered_is,
  # Of later papers.
  "dppo": losses.dppo,
  "sapo": losses.sapo,
  "vespo": losses.vespo,
  "sat": losses.sat,
  "log_squared": losses.log_squared,
  "m2po_signed": functools.partial(losses.m2po, signed=True),
  # Parts of TOPR and of PPO on sequence ratios: successes alone; sums over tokens, which the clip of the gradient's
  # norm makes steps of one length; means, which it leaves alone.
  "topr_successes": functools.partial(losses.topr, cap=0.0),
  "topr_sum": _times_length(losses.topr, 1.0),
  "sequence_ppo_mean": _times_length(_sequence_ppo, -1.0),
  # Trust regions: the bound on a token by its entropy, and the bounds on a sequence times 1, 10 and 100.
  "estr_low": functools.partial(losses.estr, tau=0.25),
  "estr": losses.estr,
  "estr_high": functools.partial(losses.estr, tau=4.0),
  "trm": losses.trm,
  "trm_10": functools.partial(losses.trm, max_bound=0.5, mean_bound=0.01),
  "trm_100": functools.partial(losses.trm, max_bound=5.0, mean_bound=0.1),
}


BASELINES: dict[str, Callable[..., Array]] = {
  "mean": losses.ADVANTAGES["dr_grpo"],
  "opob": losses.opob_advantages,
  "importance_mean": losses.importance_mean_advantages,
  "maxrl": losses.maxrl_advantages,
}

#: What is added to a loss so that its score has mean 0 under the sampler, by the weight that the loss gives a ratio.
CENTERINGS: dict[str, Callable[[Array], Array] | None] = {
  "none": None,
  "plain": jnp.ones_like,
  "token_tis": lambda ratio: jnp.minimum(ratio, 2.0),
}


def coefficients(loss: int | Array, logprobs: Array, advantages: Array, batch: learning.BatchQuantities) -> Array:
  """Returns ∂(mean over sequences of token means)/∂logprobs under the loss with index *loss*, [B, T]."""

  def one(fn):
    objective = learning.Objective(fn, losses.reinforce_advantages)
    options = objective.loss_options(batch)

    def mean_loss(logprobs):
      out = objective.loss(logprobs, batch.behavior, advantages, batch.mask, **options)
      return objective.mean(out.loss, batch.mask)

    return jax.grad(mean_loss)(logprobs)

  return jnp.stack([one(fn) for fn in LOSSES.values()])[loss]


def centering(
  index: int | Array, log_p: Array, log_q: Array, advantages: Array, batch: learning.BatchQuantities
) -> Array:
  """Returns ∂(the same mean of `losses.score_centering`)/∂log_p under the centering with this index, [B, T, V]."""
  objective = learning.Objective(losses.reinforce, losses.reinforce_advantages)

  def one(weight):
    if weight is None:
      return jnp.zeros_like(log_p)

    def mean_loss(log_p):
      added = losses.score_centering(log_p, log_q, advantages, batch.mask, weight=weight)
      return objective.mean(added, batch.mask)

    return jax.grad(mean_loss)(log_p)

  return jnp.stack([one(weight) for weight in CENTERINGS.values()])[index]
