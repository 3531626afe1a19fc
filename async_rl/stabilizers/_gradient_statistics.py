"""Float32 statistics of gradients, shared by the transformations."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl import _arrays


class GradientProducts(NamedTuple):
  """Global products of a gradient g with an earlier one h of the same tree.

  Attributes:
    norm: float32 [], the norm of g.
    cosine: float32 [], the cosine of g and h; 0 if either norm is zero or not finite.
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
  """Casts up to float32 for elementwise arithmetic; float64 stays float64."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def scaled(updates: Any, scale: jax.Array) -> Any:
  """Returns a tree times *scale*, multiplied in float32 or wider, in its own dtypes."""
  return jax.tree.map(lambda u: (scale * at_least_float32(u)).astype(u.dtype), updates)


def global_norm(x: Any) -> jax.Array:
  """Returns the Euclidean norm over all leaves of a tree, float32 [] whatever their dtypes."""
  return jnp.sqrt(_arrays.tree_squared_norm(x))


def gradient_products(gradient: Any, earlier: Any) -> GradientProducts:
  """Returns the `GradientProducts` of two gradients of the same structure."""
  dot = _arrays.tree_dot(gradient, earlier)
  norm = global_norm(gradient)
  earlier_norm = global_norm(earlier)
  finite = jnp.isfinite(norm)
  defined = finite & jnp.isfinite(earlier_norm) & (norm > 0) & (earlier_norm > 0)
  safe_norm = jnp.where(defined, norm, 1.0)
  safe_earlier_norm = jnp.where(defined, earlier_norm, 1.0)
  cosine = jnp.where(defined, dot / (safe_norm * safe_earlier_norm), 0.0)
  cosine = jnp.clip(cosine, -1.0, 1.0)
  return GradientProducts(norm, cosine, cosine * safe_norm / safe_earlier_norm, defined, finite)
