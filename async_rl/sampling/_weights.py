"""The form of the weights that the sampler runs on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import unstack_layers


def prepare_weights(policy: Policy, params: Params) -> Params:
  """The sampler's copy of float32 master weights: layers unstacked, matrices and biases in the compute dtype.

  Scales of norms stay float32, as the learner uses them, so that the two agree on every log-probability as far as
  the dtype allows. Traceable: run it under `jit` where the master weights live, and half of the bytes travel.
  Nothing of the result aliases `params`, which may be donated afterwards.

  Args:
    policy: the architecture.
    params: from `Policy.init`.
  """

  def copy(path, leaf):
    dtype = leaf.dtype if path[-1].key == "scale" else jnp.dtype(policy.dtype)
    return jnp.array(leaf, dtype, copy=True)

  return jax.tree_util.tree_map_with_path(copy, unstack_layers(params))
