"""A policy's trunk with a scalar head: a reward model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from async_rl.models._policy import Params
from async_rl.models._policy import Policy

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RewardModel(Policy):
  """A policy that values texts: its parameters have one more subtree, `{"value_head": {"kernel": [D], "bias": []}}`.

  The unembedding stays in the parameters and is not used.
  """

  @classmethod
  def of(cls, policy: Policy) -> RewardModel:
    """The reward model of the policy's architecture; all of it is trained, there are no adapters."""
    return cls(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(Policy)} | {"lora": None})

  def init(self, key: Array) -> Params:
    return self.with_head(super().init(key))

  def with_head(self, params: Params) -> Params:
    """Parameters of a policy with a head that values everything at 0."""
    head = {"kernel": jnp.zeros(self.config.d_model, jnp.float32), "bias": jnp.zeros([], jnp.float32)}
    return params | {"value_head": head}

  def values(self, params: Params, tokens: Array, segments: Array, positions: Array) -> Array:
    """Value of the text up to and including each token, float32 [B, T]; arguments as in `hidden`."""
    head = params["value_head"]
    hidden = self.hidden(params, tokens, segments, positions).astype(jnp.float32)
    return jnp.einsum("btd,d->bt", hidden, head["kernel"], precision="highest") + head["bias"]
