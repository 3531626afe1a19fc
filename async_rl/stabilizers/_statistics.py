"""Float32 statistics of gradients, shared by the transformations."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl import _arrays


class GradientProducts(NamedTuple):
  """Global products of a gradient g with a reference h of the same tree.

  Attributes:
    norm: float32 [], norm of g.
    cosine: float32 [], cosine of g and h; 0 if either norm is zero or not finite.
    projection: float32 [], the p for which p h is the part of g parallel to h; 0 where the cosine is.
    defined: bool [], whether both norms are finite and above zero.
    finite: bool [], whether g has a finite norm.
  """

  norm: jax.Array
  cosine: jax.Array
  projection: jax.Array
  defined: jax.Array
  finite: jax.Array


def at_least_float32(x: jax.Array) -> jax.Array:
  """Casts up for elementwise arithmetic; float64 stays what it is."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def global_norm(x: Any) -> jax.Array:
  """Euclidean norm over all leaves of a tree, in float32 whatever their dtype."""
  return jnp.sqrt(_arrays.tree_squared_norm(x))


def gradient_products(gradient: Any, reference: Any) -> GradientProducts:
  """All that alignment needs of two gradients, in one pass over them. See `GradientProducts`."""
  dot = _arrays.tree_dot(gradient, reference)
  norm, reference_norm = global_norm(gradient), global_norm(reference)
  finite = jnp.isfinite(norm)
  defined = finite & jnp.isfinite(reference_norm) & (norm > 0) & (reference_norm > 0)
  safe = lambda x: jnp.where(defined, x, 1.0)
  cosine = jnp.clip(jnp.where(defined, dot, 0.0) / safe(norm * reference_norm), -1.0, 1.0)
  projection = cosine * safe(norm) / safe(reference_norm)
  return GradientProducts(norm, cosine, projection, defined, finite)
