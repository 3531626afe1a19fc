"""A value head: one number for every hidden state, a linear function of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Params = dict[str, Any]

#: The part of the parameters that holds a value head.
VALUE_HEAD = "value_head"


def init_value_head(width: int) -> Params:
  """Returns a head that values everything at 0, `{"value_head": {"kernel": [D], "bias": []}}`, float32.

  Args:
    width: D, the width of the hidden states.
  """
  return {VALUE_HEAD: {"kernel": jnp.zeros(width, jnp.float32), "bias": jnp.zeros([], jnp.float32)}}


def head_values(params: Params, hidden: Array) -> Array:
  """Returns the values of hidden states [B, T, D], float32 [B, T].

  Args:
    params: the parameters, of which the head matters alone.
    hidden: the hidden states, in any dtype.
  """
  head = params[VALUE_HEAD]
  return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), head["kernel"], precision="highest") + head["bias"]
