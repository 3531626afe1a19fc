"""The methods of Asynchronous RLHF as what a learner takes: advantages, a loss and its aggregation.

Every one has the learner's plain form, a per-sequence number times the gradient of that sequence's log-probability, so
a pair or a group may be spread over micro-batches.

References:
  Noukhovitch et al., Asynchronous RLHF, 2024, https://arxiv.org/abs/2410.18252
"""

from __future__ import annotations

import dataclasses
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp

from async_rl import losses
from async_rl.learning._learner import AdvantageInputs
from async_rl.learning._learner import LossInputs

Array = jax.Array

Method = Literal["online_dpo", "ipo", "rloo", "proximal_rloo", "best_of_n"]
KL = Literal["reward", "reward_current", "loss"]


@dataclasses.dataclass(frozen=True)
class RLHF:
  """A method with its distance to the reference policy; the learner must have one, and `score_first`.

  The losses are summed over tokens and averaged over sequences, best-of-N's and the pair losses over groups.

  Attributes:
    method: `online_dpo` or `ipo`: on the best and the worst sample of a group; the reference is in the loss.
      `rloo`: leave-one-out baseline, no correction for stale samples. `proximal_rloo`: the same with PPO's clip of the
      sequence ratio. `best_of_n`: maximum likelihood of the best sample of a group.
    groups: in a batch.
    beta: of `online_dpo` and `ipo`.
    kl_coefficient: weight of the KL to the reference policy in `rloo` and `proximal_rloo`.
    kl: where that stands. `reward`: the sequence's log mu - log pi_ref is taken off its reward, mu as recorded by the
      sampler. `reward_current`: the same with the weights at the start of the step in place of mu, as the paper's
      trainer recomputes it. `loss`: the k3 estimator as a loss term, with importance weights up to `kl_cap`.
    clip: half-width of the clip of `proximal_rloo`.
    kl_cap: largest importance weight of a token in `kl="loss"`.
  """

  method: Method
  groups: int
  beta: float = 0.1
  kl_coefficient: float = 0.05
  kl: KL = "reward"
  clip: float = 0.2
  kl_cap: float = 2.0

  def __post_init__(self):
    for field, names in (("method", get_args(Method)), ("kl", get_args(KL))):
      if getattr(self, field) not in names:
        raise ValueError(f"{field} must be one of {', '.join(names)}, got {field}={getattr(self, field)!r}.")

  def advantages(self, x: AdvantageInputs) -> Array:
    """float32 [B]."""
    if x.reference is None or x.stats is None:
      raise ValueError(f"{self.method} needs a learner with a reference policy (set_reference) and score_first=True.")
    if self.method == "best_of_n":
      best = losses.best_rows(x.rewards, x.groups, self.groups)
      return best * jnp.sum(jnp.any(x.mask, axis=1), dtype=jnp.float32) / self.groups
    if self.method in ("online_dpo", "ipo"):
      return losses.preference_advantages(
        x.rewards,
        x.groups,
        self.groups,
        logprobs=x.stats.logprobs,
        reference=x.reference,
        mask=x.mask,
        loss=losses.ipo_loss if self.method == "ipo" else losses.dpo_loss,
        beta=self.beta,
      )
    rewards = x.rewards
    if self.kl != "loss":
      old = x.behavior if self.kl == "reward" else x.stats.logprobs
      rewards = losses.kl_penalized_rewards(rewards, old, x.reference, x.mask, coefficient=self.kl_coefficient)
    return losses.rloo_advantages(rewards, x.groups, self.groups)

  def loss(self, x: LossInputs) -> losses.PolicyLoss:
    """Per-token loss, to be summed over tokens."""
    if self.method == "proximal_rloo":
      out = losses.proximal_rloo(x.logprobs, x.behavior, x.advantages, x.mask, low=self.clip, high=self.clip)
      # It stands whole on every token of the sequence.
      out = out._replace(loss=out.loss / jnp.maximum(jnp.sum(x.mask, axis=1, keepdims=True), 1))
    else:
      out = losses.reinforce(x.logprobs, x.behavior, x.advantages, x.mask)
    if self.kl == "loss" and self.method in ("rloo", "proximal_rloo"):
      assert x.reference is not None  # or `advantages` would have refused
      distance = losses.kl_loss(x.logprobs, x.reference, x.behavior, x.mask, cap=self.kl_cap)
      out = out._replace(loss=out.loss + self.kl_coefficient * distance)
    return out

  def aggregate(self, loss: Array, mask: Array) -> tuple[Array, Array]:
    """Sum over tokens, mean over sequences."""
    return losses.aggregate(loss, mask, "constant", max_length=1)
