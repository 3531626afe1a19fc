"""Norms of whole rows on GPUs, each fused with what comes before or after it: every value is read and written once.

XLA makes three to six kernels of each of these and of its gradient, with float32 values in memory between them.
Letters of shapes: B rows, T tokens of a row, n heads, d head width, D model.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._layers import Norms
from async_rl.models._layers import RMSNorm
from async_rl.models._layers import fits_kernels
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import fit_sharding

Array = jax.Array

_BLOCK = 4096  # values of an array that a program of the grid holds


class FusedNorms(Norms):
  """Computes with kernels, interpreted on CPUs, what these take: widths that are powers of 2 from 32 on.

  Args:
    mesh: the devices over which the kernels are split by rows and heads.
    dtype: the dtype in which normed values are used.
  """

  def __init__(self, mesh: Mesh | None, dtype: jnp.dtype):
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    self._mesh, self._dtype, self._interpret = mesh, dtype, platform == "cpu"

  def add(self, x: Array, h: Array | None, norm: RMSNorm, uses: int) -> tuple[Array, ...]:
    if x.ndim != 3 or not fits_kernels(x.shape[-1]):
      return super().add(x, h, norm, uses)
    return add_and_norm(
      x, h, norm.factors, uses=uses, eps=norm.eps, dtype=self._dtype, mesh=self._mesh, interpret=self._interpret
    )

  def rotate(self, x: Array, norm: RMSNorm | None, angles: Array) -> Array:
    if norm is None or x.ndim != 4 or not fits_kernels(x.shape[-1]):
      return super().rotate(x, norm, angles)
    return norm_and_rotate(x, norm.factors, angles, eps=norm.eps, mesh=self._mesh, interpret=self._interpret)


def norm_and_rotate(
  x: Array, scale: Array, angles: Array, *, eps: float, mesh: Mesh | None = None, interpret: bool = False
) -> Array:
  """Returns heads, each divided by its root mean square, scaled and rotated by its token's angles.

  Args:
    x: [B, T, n, d], d a power of 2 from 32 on.
    scale: float32 [d].
    angles: float32 [B, T, d / 2]; pairs are made of halves.
    eps: added to the mean square.
    mesh: the devices over which the kernel is split by rows and heads.
    interpret: whether to interpret the kernel, for other devices than GPUs.

  Returns:
    [B, T, n, d] in x's dtype.
  """
  kernel = functools.partial(_rotate, eps=eps, interpret=interpret)
  if mesh is not None:
    heads = fit_sharding(mesh, (ROWS, None, "tensor"), x.shape).spec
    specs = (heads, PartitionSpec(), PartitionSpec(heads[0]))
    kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
  return kernel(x, scale, angles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rotate(x: Array, scale: Array, angles: Array, eps: float, interpret: bool) -> Array:
  return _rotate_forward(x, scale, angles, eps, interpret)[0]


def _rotate_forward(x, scale, angles, eps, interpret):
  call = _rotation_call(x, interpret)
  cos, sin = jnp.cos(angles), jnp.sin(angles)

  def kernel(x_ref, scale_ref, cos_ref, sin_ref, out_ref):
    x, _ = _normed(x_ref, eps)
    a, b = (h * s for h, s in zip(x, _scale_halves(scale_ref), strict=True))
    cos, sin = cos_ref[...][:, None], sin_ref[...][:, None]
    _store(out_ref, (a * cos - b * sin, b * cos + a * sin))

  out = call(kernel, ("heads", "width", "angles", "angles"), ("heads",))(x, scale, cos, sin)[0]
  return checkpoint_name(out, "norm"), (x, scale, cos, sin)


def _rotate_backward(eps, interpret, residuals, grad):
  x, scale, cos, sin = residuals
  call = _rotation_call(x, interpret)

  def kernel(x_ref, scale_ref, cos_ref, sin_ref, grad_ref, dx_ref, dscale_ref):
    x, inverse = _normed(x_ref, eps)
    cos, sin = cos_ref[...][:, None], sin_ref[...][:, None]
    a, b = (h.astype(jnp.float32) for h in _halves(grad_ref))
    grad = (a * cos + b * sin, b * cos - a * sin)
    _store(dscale_ref, tuple(jnp.sum(jnp.sum(g * h, axis=0), axis=0)[None, None] for g, h in zip(grad, x, strict=True)))
    grad = tuple(g * s for g, s in zip(grad, _scale_halves(scale_ref), strict=True))
    mean = sum(jnp.sum(g * h, axis=-1, keepdims=True) for g, h in zip(grad, x, strict=True)) / (2 * a.shape[-1])
    _store(dx_ref, tuple(inverse * (g - h * mean) for g, h in zip(grad, x, strict=True)))

  operands = ("heads", "width", "angles", "angles", "heads")
  dx, dscale = call(kernel, operands, ("heads", "parts"))(x, scale, cos, sin, grad)
  return dx, jnp.sum(dscale, axis=(0, 1)), jnp.zeros_like(cos)


_rotate.defvjp(_rotate_forward, _rotate_backward)


def _rotation_call(x: Array, interpret: bool):
  """Returns a function of a kernel and the kinds of its operands and results to a function of [B, T, ...] arrays."""
  batch, length, heads, width = x.shape
  count = math.gcd(heads, 64)  # heads of a program: a power of 2
  block = min(math.gcd(batch * length, 1024), max(1, _BLOCK // (count * width)))
  grid = (batch * length // block, heads // count)
  kinds = {
    "heads": ((batch * length, heads, width), x.dtype, (block, count, width), lambda i, j: (i, j, 0)),
    "width": ((width,), jnp.float32, (width,), lambda i, j: (0,)),
    "angles": ((batch * length, width // 2), jnp.float32, (block, width // 2), lambda i, j: (i, 0)),
    "parts": ((*grid, width), jnp.float32, (1, 1, width), lambda i, j: (i, j, 0)),
  }

  return _call(grid, kinds, {"heads": x.shape}, interpret)


def _call(grid: tuple[int, ...], kinds: dict[str, Any], shapes: dict[str, tuple[int, ...]], interpret: bool):
  """Returns a function of a kernel and the kinds of its operands and results to a function of arrays.

  Args:
    grid: the programs of the kernel.
    kinds: the shape, the dtype, the shape of a program's block and the index of that block, of each kind of array.
    shapes: the shapes in which results are returned, of some kinds.
    interpret: whether to interpret the kernel.
  """
  specs = {kind: pl.BlockSpec(block, index) for kind, (_, _, block, index) in kinds.items()}

  def call(kernel, operands, results):
    run = pl.pallas_call(
      kernel,
      out_shape=[jax.ShapeDtypeStruct(*kinds[kind][:2]) for kind in results],
      in_specs=[specs[kind] for kind in operands],
      out_specs=[specs[kind] for kind in results],
      grid=grid,
      interpret=interpret,
      compiler_params=plgpu.CompilerParams(num_warps=4),
    )

    def on_arrays(*arrays):
      found = run(*(x.reshape(kinds[kind][0]) for x, kind in zip(arrays, operands, strict=True)))
      return [x.reshape(shapes.get(kind, x.shape)) for x, kind in zip(found, results, strict=True)]

    return on_arrays

  return call


def _halves(ref):
  half = ref.shape[-1] // 2
  return ref[..., :half], ref[..., half:]


def _scale_halves(ref):
  return tuple(h[None, None] for h in _halves(ref))


def _store(ref, halves) -> None:
  half = ref.shape[-1] // 2
  ref[..., :half], ref[..., half:] = (h.astype(ref.dtype) for h in halves)


def _normed(ref, eps: float):
  """Returns the halves of values divided by their root mean square, and its inverse."""
  a, b = (h.astype(jnp.float32) for h in _halves(ref))
  square = jnp.sum(a * a, axis=-1, keepdims=True) + jnp.sum(b * b, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(square / ref.shape[-1] + eps)
  return (a * inverse, b * inverse), inverse


def add_and_norm(
  x: Array, h: Array | None, scale: Array, *, uses: int, eps: float, dtype: jnp.dtype | None = None,
  mesh: Mesh | None = None, interpret: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
  """Returns the sum of x and h, and of it `uses` times the same: divided by its root mean square and scaled.

  Each use has a gradient of its own, which the backward pass adds as it reads them.

  Args:
    x: [B, T, D], D a power of 2.
    h: [B, T, D] in any dtype, or `None` for zeros.
    scale: float32 [D].
    uses: how often the normed values are returned.
    eps: added to the mean square.
    dtype: of the normed values; `None` for x's.
    mesh: the devices over which the kernel is split by rows.
    interpret: whether to interpret the kernel, for other devices than GPUs.

  Returns:
    The sum [B, T, D] in x's dtype, and `uses` arrays of its shape.
  """
  terms = (x,) if h is None else (x, h)
  kernel = functools.partial(_add_and_norm, uses, eps, jnp.dtype(dtype or x.dtype), interpret)
  if mesh is not None:
    rows = fit_sharding(mesh, (ROWS,), x.shape).spec
    specs = ((rows,) * len(terms), PartitionSpec())
    kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=(rows,) * (1 + uses), check_vma=False)
  return kernel(terms, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _add_and_norm(uses, eps, dtype, interpret, terms, scale):
  return _norm_forward(uses, eps, dtype, interpret, terms, scale)[0]


def _norm_forward(uses, eps, dtype, interpret, terms, scale):
  def kernel(scale_ref, *refs):
    term_refs, (out_ref, *sum_ref) = refs[: len(terms)], refs[len(terms) :]
    x = sum(ref[...].astype(jnp.float32) for ref in term_refs).astype(terms[0].dtype)
    for ref in sum_ref:
      ref[...] = x
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    out_ref[...] = (x * inverse * scale_ref[...][None]).astype(out_ref.dtype)

  operands, results = [("sum",), ("sum", "term")][len(terms) - 1], ("normed", "sum")[: len(terms)]
  call = _width_call(terms[0], dtype, terms[-1].dtype, interpret)
  found = call(kernel, ("width", *operands), results)(scale, *terms)
  out, *total = (checkpoint_name(y, "norm") for y in found)
  x = total[0] if total else terms[0]
  return (x, *[out] * uses), (x, scale, [jnp.zeros(0, y.dtype) for y in terms])


def _norm_backward(uses, eps, dtype, interpret, residuals, grads):
  x, scale, terms = residuals

  def kernel(scale_ref, x_ref, kept_ref, *refs):
    *grad_refs, dx_ref, dscale_ref = refs
    x = x_ref[...].astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    x *= inverse
    grad = sum(ref[...].astype(jnp.float32) for ref in grad_refs)
    dscale_ref[...] = jnp.sum(grad * x, axis=0)[None]
    grad *= scale_ref[...][None]
    grad = inverse * (grad - x * jnp.mean(grad * x, axis=-1, keepdims=True))
    dx_ref[...] = (kept_ref[...].astype(jnp.float32) + grad).astype(dx_ref.dtype)

  call = _width_call(x, dtype, dtype, interpret)
  dx, dscale = call(kernel, ("width", "sum", "sum", *["normed"] * uses), ("sum", "parts"))(scale, x, *grads)
  return tuple(dx.astype(y.dtype) for y in terms), jnp.sum(dscale, axis=0)


_add_and_norm.defvjp(_norm_forward, _norm_backward)


def _width_call(x: Array, normed: jnp.dtype, term: jnp.dtype, interpret: bool):
  """Returns a function of a kernel and the kinds of its operands and results to a function of [B, T, D] arrays."""
  tokens, width = x.shape[0] * x.shape[1], x.shape[2]
  block = min(math.gcd(tokens, 1024), max(1, _BLOCK // width))
  dtypes = {"sum": x.dtype, "term": term, "normed": normed}
  kinds = {
    **{name: ((tokens, width), dtype, (block, width), lambda i: (i, 0)) for name, dtype in dtypes.items()},
    "width": ((width,), jnp.float32, (width,), lambda i: (0,)),
    "parts": ((tokens // block, width), jnp.float32, (1, width), lambda i: (i, 0)),
  }
  return _call((tokens // block,), kinds, dict.fromkeys(dtypes, x.shape), interpret)
