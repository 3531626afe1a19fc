"""What a layer does in a decode step on GPUs between its first products and attention, in one kernel.

XLA makes five kernels of it: the norms of queries and of keys, the rotation, and the storing of keys and of values.
Each takes some three microseconds, however few rows there are.
Letters of shapes: B rows, H query heads, N key/value heads, S cached positions, d head width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._layers import Rotation
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import fit_sharding

Array = jax.Array


def rotate_and_store(
  q: Array, k: Array, v: Array, kv: tuple[Array, Array], entries: Array, rotation: Rotation, *,
  mesh: Mesh | None = None, interpret: bool = False,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  """Norms and rotates the queries and keys of one new token per row, and puts its keys and values into the cache.

  Between norm and rotation values are float32, as in `FusedNorms`.

  Args:
    q: [B, H, d], d a power of 2 from 32 on.
    k: [B, N, d].
    v: [B, N, d].
    kv: keys and values of one layer, each [B, N, S, d]; the kernel writes into them where they lie. It takes them as
      [B, S, N, d], as cuDNN's attention does.
    entries: int32 [B], the entry of the cache that each row's token gets, < S.
    rotation: the norms and the angles [B, d / 2].
    mesh: the devices over which the kernel is split by rows and heads.
    interpret: whether to interpret the kernel, for other devices than GPUs.

  Returns:
    The queries [B, H, d] in q's dtype, and the keys and values with the token.
  """
  norms = [norm for norm in (rotation.q_norm, rotation.k_norm) if norm is not None]
  kernel = functools.partial(_rotate_and_store, norms[0].eps if norms else 0.0, interpret)
  rows = (q, k, v, *kv, entries, jnp.cos(rotation.angles), jnp.sin(rotation.angles))
  scales = [norm.factors for norm in norms]
  if mesh is not None:
    heads = fit_sharding(mesh, (ROWS, "tensor"), (q.shape[0], k.shape[1])).spec
    specs = (*[heads] * 5, *[PartitionSpec(heads[0])] * 3, [PartitionSpec()] * len(scales))
    kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=(heads, (heads,) * 2), check_vma=False)
  return kernel(*rows, scales)


def _rotate_and_store(
  eps: float, interpret: bool, q: Array, k: Array, v: Array, keys: Array, values: Array, entries: Array, cos: Array,
  sin: Array, scales: list[Array],
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  batch, heads, width = q.shape
  groups, half = k.shape[1], width // 2
  queries = heads // groups
  # One array, as the product that XLA makes of the three projections returns it.
  new = jnp.concatenate([x.reshape(batch, -1) for x in (q, k, v)], axis=1).reshape(batch, -1, width)

  def kernel(new_ref, entry_ref, cos_ref, sin_ref, *refs):
    *scale_refs, _, _, q_ref, key_ref, value_ref = refs
    group, entry = pl.program_id(1), entry_ref[0]
    cos, sin = cos_ref[0], sin_ref[0]
    halves = (slice(0, half), slice(half, width))

    def rotated(head, scale_ref):
      a, b = (new_ref[0, head, part].astype(jnp.float32) for part in halves)
      if scale_ref is not None:
        inverse = jax.lax.rsqrt((jnp.sum(a * a) + jnp.sum(b * b)) / width + eps)
        a, b = (x * inverse * scale_ref[part] for x, part in zip((a, b), halves, strict=True))
      return a * cos - b * sin, b * cos + a * sin

    q_scale, k_scale = scale_refs or (None, None)
    for i in range(queries):
      head = group * queries + i
      for part, x in zip(halves, rotated(head, q_scale), strict=True):
        q_ref[0, head, part] = x.astype(q_ref.dtype)
    for part, x in zip(halves, rotated(heads + group, k_scale), strict=True):
      key_ref[entry, part] = x.astype(key_ref.dtype)
    value_ref[entry, :] = new_ref[0, heads + groups + group, :].astype(value_ref.dtype)

  def of_row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda row, group: (row, *[0] * len(shape)))

  cache = pl.BlockSpec((None, keys.shape[2], None, width), lambda row, group: (row, 0, group, 0))
  by_position = [x.swapaxes(1, 2) for x in (keys, values)]
  scale = pl.BlockSpec((width,), lambda row, group: (0,))
  given = 4 + len(scales)
  q, keys, values = pl.pallas_call(
    kernel,
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *by_position)],
    in_specs=[of_row(*new.shape[1:]), of_row(), of_row(half), of_row(half), *[scale] * len(scales), cache, cache],
    out_specs=[of_row(heads, width), cache, cache],
    grid=(batch, groups),
    input_output_aliases={given: 1, given + 1: 2},
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(num_warps=1),
    name="rotate_and_store",
  )(new, entries, cos, sin, *scales, *by_position)
  return q, (keys.swapaxes(1, 2), values.swapaxes(1, 2))
