"""A reward model: a policy's trunk with a scalar head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from async_rl.models._policy import Params
from async_rl.models._policy import Policy

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RewardModel(Policy):
  """Values texts: a policy whose parameters have one more subtree, `{"value_head": {"kernel": [D], "bias": []}}`.

  The unembedding stays in the parameters and is not used.
  """

  @classmethod
  def of(cls, policy: Policy) -> RewardModel:
    """Returns the reward model of the policy's architecture, without adapters: all of it is trained."""
    return cls(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(Policy)} | {"lora": None})

  def init(self, key: Array) -> Params:
    return self.with_head(super().init(key))

  def with_head(self, params: Params) -> Params:
    """Adds a head that values everything at 0 to a policy's parameters."""
    head = {"kernel": jnp.zeros(self.config.d_model, jnp.float32), "bias": jnp.zeros([], jnp.float32)}
    return params | {"value_head": head}

  def values(self, params: Params, tokens: Array, segments: Array, positions: Array) -> Array:
    """Returns the value of the text up to and including each token, float32 [B, T]; the arguments are `hidden`'s."""
    head = params["value_head"]
    hidden = self.hidden(params, tokens, segments, positions).astype(jnp.float32)
    return jnp.einsum("btd,d->bt", hidden, head["kernel"], precision="highest") + head["bias"]
