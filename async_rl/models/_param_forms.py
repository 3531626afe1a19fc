"""The forms of parameters: layers stacked for the learner or listed for the sampler, in the dtypes of their use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
#: The parts of the parameters that have a leading axis of layers.
_STACKED = ("layers", "adapters")


def as_used(params: Params, dtype: str | jnp.dtype) -> Params:
  """Copies parameters in the dtypes of their use: the compute dtype, but float32 for norm scales and value heads.

  Traceable. The copy shares no memory with `params`, which may be donated.
  """

  def copy(path, x):
    small = path[-1].key == "scale" or path[0].key == "value_head"
    return jnp.array(x, jnp.float32 if small else jnp.dtype(dtype), copy=True)

  return jax.tree_util.tree_map_with_path(copy, params)


def unstack_layers(params: Params) -> Params:
  """Turns stacked layers and adapters, as far as there are any, into lists of per-layer dicts."""

  def unstack(stacked: Params) -> list[Params]:
    return list_layers(stacked, jax.tree.leaves(stacked)[0].shape[0])

  return {k: unstack(v) if k in _STACKED and not isinstance(v, list) else v for k, v in params.items()}


def list_layers(layers: Any, depth: int) -> list[Any]:
  """Returns what each of `depth` layers has of arrays with a leading axis of layers."""
  return [jax.tree.map(lambda a, i=i: a[i], layers) for i in range(depth)]
