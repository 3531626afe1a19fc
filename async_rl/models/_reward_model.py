"""A reward model: a transformer with a scalar head."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from async_rl.models._param_forms import Params
from async_rl.models._policy import Policy
from async_rl.models._value_head import head_values
from async_rl.models._value_head import init_value_head

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RewardModel:
  """Values texts by a linear head on a policy's hidden states; hashable, so it can be a static argument.

  The parameters are the policy's and one more subtree, `{"value_head": {"kernel": [D], "bias": []}}`. The unembedding
  stays in them and is not used.

  Attributes:
    policy: the policy whose hidden states are valued, without adapters: all of it is trained.
  """

  policy: Policy

  @classmethod
  def of(cls, policy: Policy) -> RewardModel:
    """Returns the reward model of the policy's architecture."""
    return cls(dataclasses.replace(policy, lora=None))

  def with_mesh(self, mesh: Mesh | None) -> RewardModel:
    """Returns the reward model with its activations laid out on a mesh."""
    return RewardModel(dataclasses.replace(self.policy, mesh=mesh))

  def init(self, key: Array) -> Params:
    """Returns the random parameters of the policy, with a new head."""
    return self.with_head(self.policy.init(key))

  def abstract(self) -> Params:
    """Returns the shapes and dtypes of `init`, without computing anything."""
    return jax.eval_shape(self.with_head, self.policy.abstract())

  def with_head(self, params: Params) -> Params:
    """Adds a head that values everything at 0 to a policy's parameters."""
    return params | init_value_head(self.policy.config.d_model)

  def values(self, params: Params, tokens: Array, segments: Array, positions: Array) -> Array:
    """Returns the value of the text up to and including each token, float32 [B, T]; arguments as of `Policy.hidden`."""
    return head_values(params, self.policy.hidden(params, tokens, segments, positions))
