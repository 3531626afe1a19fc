"""Advantages of single tokens from a value head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from async_rl import losses
from async_rl._validation import check_number

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class GAE:
  """Generalized advantage estimation, and the value head that it is made with; takes the place of advantages.

  The head is a linear function of the policy's last hidden states. It starts at 0 and is trained in the same step and
  by the same optimizer, towards the returns, at a learning rate of its own: Adam's steps are the same whatever the
  weight of the value loss, which only says how much of it the policy's layers learn. Values are those of the weights at
  the start of the step, however old the samples are: one scoring pass over the whole batch. There is one update per
  batch, so PPO's clip of a value around the old one could never act, and there is none.

  References:
    Schulman et al., High-Dimensional Continuous Control Using GAE, 2015, https://arxiv.org/abs/1506.02438
    Schulman et al., Proximal Policy Optimization Algorithms, 2017, https://arxiv.org/abs/1707.06347
  """

  #: Of gae: discount of the rewards of later tokens, per token.
  discount: float = 1.0
  #: Of gae: decay of the temporal differences of later tokens; 1 is the return minus the value.
  trace_decay: float = 0.95
  #: Of gae: weight of the value loss beside the policy loss.
  value_coefficient: float = 0.1
  #: Of gae: learning rate of the value head, in multiples of the policy's.
  value_rate: float = 1.0
  #: Of gae: bring the advantages of all tokens of a batch to mean 0 and deviation 1.
  whiten: bool = True

  def __post_init__(self):
    check_number("discount", self.discount, at_least=0, at_most=1)
    check_number("trace_decay", self.trace_decay, at_least=0, at_most=1)
    check_number("value_coefficient", self.value_coefficient, above=0)
    check_number("value_rate", self.value_rate, above=0)

  def estimate(self, rewards: Array, values: Array, mask: Array) -> tuple[Array, Array]:
    """Returns the advantages of a whole batch, and the returns towards which values are trained, float32 [B, C] each.

    Args:
      rewards: float32 [B, C], the reward of each token.
      values: float32 [B, C], the value of the text before each token.
      mask: bool [B, C], the trained tokens.
    """
    advantages, returns = losses.gae(rewards, values, mask, discount=self.discount, trace=self.trace_decay)
    return losses.whiten(advantages, mask) if self.whiten else advantages, returns


def check_unused(gae: GAE | None, used: str, chosen: Any) -> None:
  """Raises a ValueError if an estimator that nothing uses was given options.

  Args:
    gae: the estimator.
    used: what would use it, in the words of an option.
    chosen: what was chosen instead.
  """
  for field in dataclasses.fields(gae) if gae is not None else ():
    if (value := getattr(gae, field.name)) != field.default:
      raise ValueError(f"*{field.name}*={value} acts with {used} only, got {chosen!r}; leave it out.")
