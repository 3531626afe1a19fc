"""The methods of Asynchronous RLHF as objectives.

Each but PPO has the learner's plain form, a per-sequence number times the gradient of that sequence's log-probability,
so that a pair or a group may be spread over micro-batches.

References:
  Noukhovitch et al., Asynchronous RLHF, 2024, https://arxiv.org/abs/2410.18252
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp

from async_rl import losses
from async_rl._validation import check_choice
from async_rl._validation import check_number
from async_rl.learning._gae import GAE
from async_rl.learning._gae import check_unused
from async_rl.learning._objective import AGGREGATIONS
from async_rl.learning._objective import Objective

Array = jax.Array

Method = Literal["online_dpo", "ipo", "rloo", "proximal_rloo", "best_of_n", "ppo"]
KL = Literal["reward", "reward_current", "loss"]


def rlhf_objective(
  method: Method,
  *,
  beta: float = 0.1,
  kl_coefficient: float = 0.05,
  kl: KL = "reward",
  clip: float = 0.2,
  kl_cap: float = 2.0,
  gae: GAE | None = None,
) -> Objective:
  """Returns a method of Asynchronous RLHF with its distance to the reference policy.

  The losses are summed over tokens and averaged over sequences; those of best-of-N and of pairs are averaged over
  groups, those of PPO over tokens.

  Args:
    method: `online_dpo` or `ipo` train on the best and the worst sample of a group, with the reference in the loss.
      `rloo` has a leave-one-out baseline and no correction for stale samples; `proximal_rloo` adds PPO's clip of the
      sequence ratio. `best_of_n` is maximum likelihood of the best sample of a group. `ppo` clips the ratios of tokens,
      whose advantages come from a value head.
    beta: the inverse temperature of the implicit reward of `online_dpo` and `ipo`.
    kl_coefficient: the weight of the KL to the reference policy in `rloo`, `proximal_rloo` and `ppo`.
    kl: the place of that KL. `reward` subtracts the sequence's log mu - log pi_ref from its reward, or in `ppo` each
      token's from the token's reward, with mu as recorded by the sampler. `reward_current` has the weights at the start
      of the step in place of mu, as the paper's trainer recomputes it. `loss` is the k3 estimator as a loss term, with
      importance weights up to `kl_cap`.
    clip: the half-width of the clip of `proximal_rloo` and `ppo`.
    kl_cap: the largest importance weight of a token for `kl="loss"`.
    gae: the estimator of the advantages of `ppo`; by default `GAE()`.

  Raises:
    ValueError: if a name is unknown, a number out of range, or `gae` has options and the method is not `ppo`.
  """
  check_choice("method", method, get_args(Method))
  check_choice("kl", kl, get_args(KL))
  check_number("beta", beta, above=0)
  check_number("kl_coefficient", kl_coefficient, at_least=0)
  check_number("clip", clip, above=0, at_most=1)
  check_number("kl_cap", kl_cap, above=0, finite=False, remedy="inf does not truncate")
  if method == "ppo":
    return _ppo(gae or GAE(), kl_coefficient, kl, clip, kl_cap)
  check_unused(gae, "*method*='ppo'", method)
  loss: losses.PolicyLossFn = losses.reinforce
  advantages: Callable[..., Array] = _best_of_n
  if method in ("online_dpo", "ipo"):
    pair_loss = losses.ipo_loss if method == "ipo" else losses.dpo_loss
    advantages = functools.partial(_of_pairs, pair_loss=pair_loss, beta=beta)
  elif method in ("rloo", "proximal_rloo"):
    penalized: dict[str, Callable[..., Array]] = {
      "reward": _penalized_by_behavior,
      "reward_current": _penalized_by_current,
    }
    advantages = losses.rloo_advantages
    if kl in penalized:
      advantages = functools.partial(penalized[kl], coefficient=kl_coefficient)
    if method == "proximal_rloo":
      loss = functools.partial(_proximal_rloo, clip=clip)
    if kl == "loss":
      loss = functools.partial(_with_kl, inner=loss, coefficient=kl_coefficient, cap=kl_cap)
  return Objective(loss, advantages, AGGREGATIONS["sum"])


def _ppo(gae: GAE, kl_coefficient: float, kl: KL, clip: float, kl_cap: float) -> Objective:
  loss: losses.PolicyLossFn = functools.partial(losses.ppo_clip, low=clip, high=clip)
  if kl == "loss":
    loss = functools.partial(_with_kl, inner=loss, coefficient=kl_coefficient, cap=kl_cap)
    return Objective(loss, gae, AGGREGATIONS["token_mean"])
  rewards = _tokens_by_behavior if kl == "reward" else _tokens_by_current
  token_rewards = functools.partial(rewards, coefficient=kl_coefficient)
  return Objective(loss, gae, AGGREGATIONS["token_mean"], token_rewards=token_rewards)


# Rewards of tokens.


def _tokens_by_behavior(
  rewards: Array, *, behavior: Array, reference: Array, mask: Array, coefficient: float = 0.05
) -> Array:
  return losses.token_rewards(rewards, behavior, reference, mask, coefficient=coefficient)


def _tokens_by_current(
  rewards: Array, *, proximal: Array, reference: Array, mask: Array, coefficient: float = 0.05
) -> Array:
  return losses.token_rewards(rewards, proximal, reference, mask, coefficient=coefficient)


# Advantages.


def _best_of_n(rewards: Array, groups: Array, num_groups: int, *, lengths: Array) -> Array:
  best = losses.best_rows(rewards, groups, num_groups)
  present = jax.ops.segment_max(jnp.ones_like(groups), groups, num_groups) > 0
  trained = jnp.sum(lengths > 0, dtype=jnp.float32)
  return best * trained / jnp.sum(present, dtype=jnp.float32)


def _of_pairs(
  rewards: Array,
  groups: Array,
  num_groups: int,
  *,
  proximal: Array,
  reference: Array,
  mask: Array,
  pair_loss: Callable[..., Array] = losses.dpo_loss,
  beta: float = 0.1,
) -> Array:
  return losses.preference_advantages(
    rewards, groups, num_groups, logprobs=proximal, reference=reference, mask=mask, loss=pair_loss, beta=beta
  )


def _penalized_by_behavior(
  rewards: Array,
  groups: Array,
  num_groups: int,
  *,
  behavior: Array,
  reference: Array,
  mask: Array,
  coefficient: float = 0.05,
) -> Array:
  penalized = losses.kl_penalized_rewards(rewards, behavior, reference, mask, coefficient=coefficient)
  return losses.rloo_advantages(penalized, groups, num_groups)


def _penalized_by_current(
  rewards: Array,
  groups: Array,
  num_groups: int,
  *,
  proximal: Array,
  reference: Array,
  mask: Array,
  coefficient: float = 0.05,
) -> Array:
  penalized = losses.kl_penalized_rewards(rewards, proximal, reference, mask, coefficient=coefficient)
  return losses.rloo_advantages(penalized, groups, num_groups)


# Losses, to be summed over the tokens of a sequence.


def _proximal_rloo(
  logprobs: Array, behavior: Array, advantages: Array, mask: Array, *, clip: float = 0.2
) -> losses.PolicyLoss:
  out = losses.proximal_rloo(logprobs, behavior, advantages, mask, low=clip, high=clip)
  # Every token carries the whole sequence loss, so divide by the length.
  return out._replace(loss=out.loss / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1))


def _with_kl(
  logprobs: Array,
  behavior: Array,
  advantages: Array,
  mask: Array,
  *,
  reference: Array,
  inner: losses.PolicyLossFn = losses.reinforce,
  coefficient: float = 0.05,
  cap: float = 2.0,
) -> losses.PolicyLoss:
  out = inner(logprobs, behavior, advantages, mask)
  distance = losses.kl_loss(logprobs, reference, behavior, mask, cap=cap)
  return out._replace(loss=out.loss + coefficient * distance)
