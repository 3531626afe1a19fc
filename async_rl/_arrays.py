"""Array functions that several folders share. Needs jax only."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl import _validation


def ess_ratio(log_weights: ArrayLike, mask: ArrayLike | None = None, *, cap: float | None = None) -> jax.Array:
  r"""Returns the effective sample size of importance weights, as a share of their number.

  .. math:: \rho = \frac{1}{B} \frac{(\sum_i w_i)^2}{\sum_i w_i^2}, \qquad w_i = \exp(\mathrm{log\_weights}_i)

  It is 1 when all weights are equal and :math:`1/B` when one weight dominates, and does not depend on a common factor.
  The sums are formed in log space, so no log-weight is too large or too small. Give it raw weights: those of already
  truncated ones stay high while a run collapses.

  Args:
    log_weights: log importance weights, of any shape: [B] for sequences, [B, T] for tokens.
    mask: bool, same shape; the entries that count. `None` counts all of them.
    cap: the truncation of the weights, above 0. `None` leaves them as they are.

  Returns:
    float32 [], between 0 and 1. It is 0 where the ratio is undefined: no entry counts, all weights are zero, or some
    log-weight is NaN or +inf (after truncation).

  Raises:
    TypeError: if *mask* is not bool.
    ValueError: if *mask* has another shape than *log_weights*, or *cap* is not a number above 0.

  Examples:
    >>> import jax.numpy as jnp
    >>> print(ess_ratio(jnp.zeros(4)))
    1.0
    >>> print(ess_ratio(jnp.array([1e4, 0.0, 0.0, -1e4])))
    0.25
    >>> print(ess_ratio(jnp.array([0.0, -100.0, 5.0]), jnp.array([True, True, False])))
    0.5

  References:
    Kong, A note on importance sampling using standardized weights, University of Chicago technical report 348, 1992.
  """
  log_weights = jnp.asarray(log_weights, jnp.float32)
  if cap is not None:
    _validation.check_number("cap", cap, above=0)
    log_weights = jnp.minimum(log_weights, jnp.log(cap))
  if mask is None:
    count = jnp.float32(log_weights.size)
  else:
    check_mask(mask, log_weights=log_weights)
    count = jnp.sum(mask, dtype=jnp.float32)
    log_weights = jnp.where(mask, log_weights, -jnp.inf)
  largest = jnp.max(log_weights, initial=-jnp.inf)
  defined = jnp.isfinite(largest)  # NaN, +inf, and -inf (nothing but zero weights) all fail
  weights = jnp.exp(log_weights - jnp.where(defined, largest, 0.0))
  ratio = jnp.square(jnp.sum(weights)) / (jnp.sum(jnp.square(weights)) * count)
  return jnp.where(defined, jnp.minimum(ratio, 1.0), 0.0)


def check_mask(mask: ArrayLike, **arrays: ArrayLike) -> None:
  """Raises unless *mask* is bool and every array has its shape; costs nothing under jit."""
  if jnp.result_type(mask) != jnp.bool_:
    raise TypeError(f"*mask* must be bool, got mask.dtype={jnp.result_type(mask)}; pass mask.astype(bool).")
  for name, array in arrays.items():
    if jnp.shape(array) != jnp.shape(mask):
      raise ValueError(f"*{name}* must have the mask's shape {jnp.shape(mask)}, got {name}.shape={jnp.shape(array)}.")


def tree_dot(x: Any, y: Any) -> jax.Array:
  """Returns the inner product of two trees of arrays of the same structure and shapes, float32 [].

  The leaves are not flattened on the way (as `jnp.vdot` would), so sharded leaves stay where they are.
  """
  terms = jax.tree.map(lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), x, y)
  return sum(jax.tree.leaves(terms), start=jnp.float32(0.0))


def tree_squared_norm(tree: Any) -> jax.Array:
  """Returns the sum of the squares of all leaves, float32 []."""
  return tree_dot(tree, tree)


def sum_of_bits(x: jax.Array) -> jax.Array:
  """Returns a checksum of an array, uint32 []: a hash of every element and its place, summed modulo 2^32.

  Neither the order of the sum nor how the array is sharded changes it. A change of one element always does, other
  changes do but for one in 2^32.
  """
  mixed = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
  for axis in range(x.ndim):
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA6B) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
  return jnp.sum((mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35), dtype=jnp.uint32)
