"""Loss scaling: gradients through float16 without those that are too small for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def pull_back(pull: Callable[[Any], Any], cotangent: Any, dtype: str) -> Any:
  """Returns the gradient of parameters from that of what was computed with them.

  Between the two, float16 rounds all below 6e-5 coarsely and all below 3e-8 to zero. So the cotangent is multiplied by
  the power of two that brings its largest entry to 0.5..1, and the gradient, in float32, is divided by it: exact, and
  no scale to be found by trial. Where a sum over tokens still exceeds 65504, the step is skipped; fewer tokens in a
  micro-batch help. The other dtypes have the exponents of float32.

  Args:
    pull: the linear map from a cotangent to a tree of gradients.
    cotangent: a tree of float32 arrays of any shape; zero is allowed.
    dtype: the compute dtype of what `pull` differentiates.

  References:
    Micikevicius et al., Mixed Precision Training, 2018, section 3.2
  """
  if dtype != "float16":
    return pull(cotangent)
  largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(cotangent)]))
  exponent = jnp.frexp(largest)[1]
  scaled = jax.tree.map(lambda x: jnp.ldexp(x, -exponent), cotangent)
  return jax.tree.map(lambda g: jnp.ldexp(g.astype(jnp.float32), exponent), pull(scaled))
