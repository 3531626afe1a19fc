"""Float32 statistics of weights and gradients, shared by the transformations and by metrics."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def ess_ratio(log_weights: ArrayLike, where: ArrayLike | None = None) -> jax.Array:
  r"""Effective sample size of importance weights, as a share of their number.

  .. math:: \rho = \frac{1}{B} \frac{(\sum_i w_i)^2}{\sum_i w_i^2}, \qquad w_i = \exp(\mathrm{log\_weights}_i)

  It is 1 when all weights are equal and :math:`1/B` when one weight dominates, and does not depend on a common factor.
  The sums are formed in log space, so no log-weight is too large or too small. Give it raw weights: those of already
  truncated ones stay high while a run collapses.

  Args:
    log_weights: log importance weights, of any shape: [B] for sequences, [B, T] for tokens.
    where: bool, same shape; entries that count. All of them if None.

  Returns:
    float32 [], between 0 and 1. It is 0 where the ratio is undefined: no entry counts, all weights are zero, or some
    log-weight is NaN or +inf.

  Examples:
    >>> import jax.numpy as jnp
    >>> from async_rl import stabilizers
    >>> print(stabilizers.ess_ratio(jnp.zeros(4)))
    1.0
    >>> print(stabilizers.ess_ratio(jnp.array([1e4, 0.0, 0.0, -1e4])))
    0.25

  References:
    Kong, A note on importance sampling using standardized weights, University of Chicago technical report 348, 1992.
  """
  log_weights = jnp.asarray(log_weights, jnp.float32)
  if where is None:
    count = jnp.float32(log_weights.size)
  else:
    where = jnp.asarray(where, bool)
    if where.shape != log_weights.shape:
      raise ValueError(f"where must have the shape of log_weights, got {where.shape} and {log_weights.shape}")
    count = jnp.sum(where, dtype=jnp.float32)
    log_weights = jnp.where(where, log_weights, -jnp.inf)
  largest = jnp.max(log_weights, initial=-jnp.inf)
  defined = jnp.isfinite(largest)  # NaN, +inf, and -inf (nothing but zero weights) all fail
  weights = jnp.exp(log_weights - jnp.where(defined, largest, 0.0))
  ratio = jnp.square(jnp.sum(weights)) / (jnp.sum(jnp.square(weights)) * count)
  return jnp.where(defined, jnp.minimum(ratio, 1.0), 0.0)


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


def global_dot(x: Any, y: Any) -> jax.Array:
  """Inner product of two trees, in float32.

  The leaves are not flattened on the way (as `jnp.vdot` would), so sharded leaves stay where they are.

  Args:
    x: tree of arrays.
    y: tree of the same structure and shapes.

  Returns:
    float32 [].
  """
  terms = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), x, y)
  return sum(jax.tree.leaves(terms), start=jnp.float32(0.0))


def global_norm(x: Any) -> jax.Array:
  """Euclidean norm over all leaves of a tree, in float32 whatever their dtype."""
  return jnp.sqrt(global_dot(x, x))


def gradient_products(gradient: Any, reference: Any) -> GradientProducts:
  """All that alignment needs of two gradients, in one pass over them. See `GradientProducts`."""
  dot = global_dot(gradient, reference)
  norm, reference_norm = global_norm(gradient), global_norm(reference)
  finite = jnp.isfinite(norm)
  defined = finite & jnp.isfinite(reference_norm) & (norm > 0) & (reference_norm > 0)
  safe = lambda x: jnp.where(defined, x, 1.0)
  cosine = jnp.clip(jnp.where(defined, dot, 0.0) / safe(norm * reference_norm), -1.0, 1.0)
  projection = cosine * safe(norm) / safe(reference_norm)
  return GradientProducts(norm, cosine, projection, defined, finite)
