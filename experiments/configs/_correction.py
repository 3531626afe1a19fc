"""The objective of reinforcement learning on stale samples, as the configs share it."""

from __future__ import annotations

import dataclasses

from async_rl import learning


@dataclasses.dataclass(frozen=True)
class Correction:
  """A policy loss, its advantages, and how both are averaged."""

  #: Policy loss, a name in `losses.CORRECTIONS`; its constants may follow, as in trm:max_bound=0.5.
  objective: str = "topr"
  #: Advantages, a name in `learning.ADVANTAGES`.
  advantages: str = "dr_grpo"
  #: Mean of the token losses, a name in `learning.AGGREGATIONS`; None: the one that the objective was published with.
  aggregate: str | None = "sequence_mean"
  gae: learning.GAE = learning.GAE()

  def build(self) -> learning.Objective:
    """Returns the objective."""
    return learning.objective(self.objective, advantages=self.advantages, aggregate=self.aggregate, gae=self.gae)
