"""Taps in the backward pass of packed rows, which take the norm of every sequence's own gradient.

The gradient of a linear map x W over a sequence is the sum of x_t g_t^T over its tokens t, with g_t the gradient at the
output. Its squared norm is the sum of (x_t . x_u) (g_t . g_u) over pairs of tokens, which needs no gradient of W. A tap
in the backward pass of each map makes these sums of what is there anyway and hands g_t on.

References:
  Goodfellow, Efficient Per-Example Gradient Computations, 2015. https://arxiv.org/abs/1510.01799
  Li et al., Large Language Models Can Be Strong Differentially Private Learners, 2021 (sequences).
    https://arxiv.org/abs/2110.05679

Letters of shapes: R rows, T tokens of a row, S sequences of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl.models._layers import Norms
from async_rl.models._layers import RMSNorm

Array = jax.Array
#: Products of pairs [R, blocks, block, block] of the tokens of two blocks, by the distance of the blocks.
Gram = Callable[[int], Array]

#: Blocks that the longest sequence fills: more of them skip more pairs of different sequences, in smaller products.
_BLOCKS = 2


class SequenceBounds(NamedTuple):
  """Bounds of the sequences of packed rows, each in one piece.

  Attributes:
    most: the most sequences of a row, S; they are its segments 1 to S.
    longest: the most tokens of a sequence, L.
    scored: the most tokens from the first scored one of a sequence to the last one, C.
  """

  most: int
  longest: int
  scored: int


class Taps:
  """Adds to the gradient of a probe the squared norms of the gradients of a policy's parameters, by sequence.

  Args:
    bounds: those of the rows' sequences.
    segments: int32 [R, T], the sequence of each token from 1 on, 0 on padding.
    probe: float32 [R, S], zeros.
    embedded: [R, T, D], zeros, whose gradient is that at the embedded tokens.
  """

  def __init__(self, bounds: SequenceBounds, segments: Array, probe: Array, embedded: Array):
    self._bounds, self._segments, self._probe, self.embedded = bounds, segments, probe, embedded

  def product(self, x: Array, y: Array, bias: bool = False) -> Array:
    """Returns y [R, T, out], the product of x [R, T, in] with a matrix, to which a trained bias may be added."""
    return _tap(functools.partial(_product_norms, self._bounds, bias), y, self._probe, self._segments, x)

  def norms(self) -> Norms:
    """Returns how to compute norms with a trained scale."""
    return _TappedNorms(self)

  def scale(self, x: Array, y: Array, eps: float) -> Array:
    """Returns y, x [R, T, ..., d] over its root mean square, times a trained scale."""
    return _tap(functools.partial(_scale_norms, self._bounds, eps), y, self._probe, self._segments, x)


class _TappedNorms(Norms):
  def __init__(self, taps: Taps):
    self._taps = taps

  def apply(self, x: Array, norm: RMSNorm) -> Array:
    return self._taps.scale(x, norm(x), norm.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(rule: Callable[..., Array], y: Array, probe: Array, segments: Array, x: Array) -> Array:
  """Returns y; the gradient g at it goes on and, as rule(segments, x, g), to the probe."""
  del rule, probe, segments, x
  return y


def _tap_forward(rule, y, probe, segments, x):
  del rule, probe
  return y, (segments, x)


def _tap_backward(rule, residuals, g):
  return g, rule(*residuals, g), None, None


_tap.defvjp(_tap_forward, _tap_backward)


def _product_norms(bounds: SequenceBounds, bias: bool, segments: Array, x: Array, g: Array) -> Array:
  pairs = Pairs(bounds, segments)
  inputs = pairs.dots(x)
  return pairs.sums((lambda distance: inputs(distance) + 1.0) if bias else inputs, pairs.dots(g))


def _scale_norms(bounds: SequenceBounds, eps: float, segments: Array, x: Array, g: Array) -> Array:
  x, g = x.astype(jnp.float32), g.astype(jnp.float32)
  at_scale = g * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  at_scale = jnp.sum(at_scale, axis=range(2, x.ndim - 1))  # over heads
  sums = jnp.einsum("rts,rtd->rsd", Pairs(bounds, segments).members(), at_scale, precision="highest")
  return jnp.sum(jnp.square(sums), axis=-1)


class Pairs:
  """Sums over the pairs of tokens of a sequence, for every sequence of packed rows.

  Rows are cut into blocks. A sequence of L tokens lies in `_BLOCKS` + 1 of them, so that pairs of blocks further apart
  are never formed.
  """

  def __init__(self, bounds: SequenceBounds, segments: Array):
    self._most, self._segments = bounds.most, segments
    width = segments.shape[1]
    self._size = min(width, max(1, -(-(bounds.longest - 1) // _BLOCKS)))
    self._count = -(-width // self._size)

  def members(self) -> Array:
    """Returns 1 for the tokens of each sequence, 0 for others, float32 [R, T, S]."""
    return (self._segments[..., None] == jnp.arange(1, self._most + 1)[None, None]).astype(jnp.float32)

  def dots(self, x: Array) -> Gram:
    """Returns the inner products of x [R, T, D]."""
    product = functools.partial(jnp.einsum, "rnid,rnjd->rnij", preferred_element_type=jnp.float32)
    return lambda distance: product(*self._blocks(x, distance))

  def equal(self, x: Array) -> Gram:
    """Returns 1 where entries of x [R, T] are equal, else 0."""

    def gram(distance: int) -> Array:
      later, earlier = self._blocks(x, distance)
      return (later[..., :, None] == earlier[..., None, :]).astype(jnp.float32)

    return gram

  def sums(self, *grams: Gram) -> Array:
    """Returns the sums of the products of symmetric *grams*, float32 [R, S]."""
    same = self.equal(self._segments)
    total = jnp.zeros((self._segments.shape[0], self._count, self._size), jnp.float32)
    for distance in range(min(_BLOCKS + 1, self._count)):
      product = functools.reduce(jnp.multiply, [gram(distance) for gram in (same, *grams)])
      pairs = jnp.sum(product, axis=-1) * (2.0 if distance else 1.0)  # (t, u) and (u, t)
      total += jnp.pad(pairs, ((0, 0), (distance, 0), (0, 0)))
    by_token = total.reshape(total.shape[0], -1)[:, : self._segments.shape[1]]
    return jnp.sum(self.members() * by_token[..., None], axis=1)  # no product of matrices, which may round to less

  def _blocks(self, x: Array, distance: int) -> tuple[Array, Array]:
    """Returns the blocks of x [R, T, ...] from number *distance* on, and those that lie as far before them."""
    x = jnp.pad(x, [(0, 0), (0, self._count * self._size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], self._count, self._size, *x.shape[2:])
    return x[:, distance:], x[:, : self._count - distance]
