"""What a layer does in a decode step on GPUs between its first products and its output projection, in one kernel.

The kernel norms and rotates queries and keys, stores the new keys and values into the cache, and attends to what the
cache holds. XLA makes five kernels of all but the last, of some three microseconds each, however few rows there are;
cuDNN's attention spends a third of a microsecond on each row and layer that has nothing to say.
Letters of shapes: B rows, H query heads, N key/value heads, S cached positions, d head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

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

#: Positions that a program of the kernel reads at once, and how many such blocks are on their way.
BLOCK = 32
_STAGES = 4
#: Programs below which a row's positions are split among several, and the positions that each then has at least.
_PROGRAMS = 256
_SPLIT = 256
_LOW = -1e30  # finite, so that no difference of two is NaN


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
    entries: int32 [B], the entry of the cache that each row's token gets, < S; below 0 for rows that nothing is
      computed for.
    rotation: the norms and the angles [B, d / 2].
    mesh: the devices over which the kernel is split by rows and heads.
    interpret: whether to interpret the kernel, for other devices than GPUs.

  Returns:
    The queries [B, H, d] in q's dtype, 0 in rows that nothing is computed for, and the keys and values with the token.
  """
  return _split_over_devices(functools.partial(_call, None, interpret), q, k, v, kv, entries, rotation, mesh)


def rotate_store_and_attend(
  q: Array, k: Array, v: Array, kv: tuple[Array, Array], entries: Array, rotation: Rotation, *, scale: float,
  mesh: Mesh | None = None, interpret: bool = False,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  """Does what `rotate_and_store` does, and attends from each row's token to the entries up to its own.

  It reads no others. Logits and sums are float32; the weights of the softmax are rounded to the values' dtype before
  they meet the values.

  Args:
    q: as in `rotate_and_store`, like all other arguments but this:
    scale: the scale of the logits.

  Returns:
    The softmax-weighted values [B, H, d] in q's dtype, 0 in rows that nothing is computed for, and the keys and values
    with the token.
  """
  return _split_over_devices(functools.partial(_call, scale, interpret), q, k, v, kv, entries, rotation, mesh)


def _split_over_devices(
  call: Callable, q: Array, k: Array, v: Array, kv: tuple[Array, Array], entries: Array, rotation: Rotation,
  mesh: Mesh | None,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  norms = [norm for norm in (rotation.q_norm, rotation.k_norm) if norm is not None]
  call = functools.partial(call, norms[0].eps if norms else 0.0)
  rows = (q, k, v, *kv, entries, jnp.cos(rotation.angles), jnp.sin(rotation.angles))
  scales = [norm.factors for norm in norms]
  if mesh is not None:
    heads = fit_sharding(mesh, (ROWS, "tensor"), (q.shape[0], k.shape[1])).spec
    specs = (*[heads] * 5, *[PartitionSpec(heads[0])] * 3, [PartitionSpec()] * len(scales))
    call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(heads, (heads,) * 2), check_vma=False)
  return call(*rows, scales)


def _call(
  scale: float | None, interpret: bool, eps: float, q: Array, k: Array, v: Array, keys: Array, values: Array,
  entries: Array, cos: Array, sin: Array, scales: list[Array],
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  """Runs the kernel: a program for each key/value head, row and, where it attends and rows are few, part of a row."""
  batch, heads, width = q.shape
  groups, length = k.shape[1], keys.shape[2]
  queries, splits = heads // groups, 1 if scale is None else _count_splits(batch * groups, length)
  # One array, as the product that XLA makes of the three projections returns it.
  new = jnp.concatenate([x.reshape(batch, -1) for x in (q, k, v)], axis=1).reshape(batch, -1, width)

  def kernel(new_ref, entry_ref, cos_ref, sin_ref, *refs):
    scale_refs, (old_key_ref, old_value_ref), results = refs[: len(scales)], refs[len(scales) :][:2], refs[-outputs:]
    out_ref, key_ref, value_ref = results[:3]
    group, split, entry = pl.program_id(0), pl.program_id(2), entry_ref[0]

    def put(out: list[Array], sums: list[Array]) -> None:
      for i in range(queries):
        out_ref[0, 0, group * queries + i, :] = out[i].astype(out_ref.dtype)
        for sum_ref in results[3:]:
          sum_ref[0, 0, group * queries + i] = sums[i]

    @pl.when(entry < 0)
    def _():
      put([jnp.zeros(width, jnp.float32)] * queries, [jnp.max(jnp.full(width, _LOW, jnp.float32))] * queries)

    @pl.when(entry >= 0)
    def _():
      read = _reader(new_ref, cos_ref, sin_ref, eps)
      q_scale, k_scale = scale_refs or (None, None)
      own = [read(group * queries + i, q_scale) for i in range(queries)]
      key, value = read(heads + group, k_scale), new_ref[0, heads + groups + group, :]

      @pl.when(split == 0)
      def _():
        key_ref[entry, :] = key.astype(key_ref.dtype)
        value_ref[entry, :] = value.astype(value_ref.dtype)

      if scale is None:
        put(own, [])
      else:
        put(*_attend(own, key, value, old_key_ref, old_value_ref, entry, split, splits, scale * math.log2(math.e)))

  def of_row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda group, row, split: (row, *[0] * len(shape)))

  def of_split(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, *shape), lambda group, row, split: (split, row, *[0] * len(shape)))

  cache = pl.BlockSpec((None, length, None, width), lambda group, row, split: (row, 0, group, 0))
  factors = pl.BlockSpec((width,), lambda group, row, split: (0,))
  by_position = [x.swapaxes(1, 2) for x in (keys, values)]
  several, given = splits > 1, 4 + len(scales)
  results = [jax.ShapeDtypeStruct((splits, *q.shape), jnp.float32 if several else q.dtype)]
  results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in by_position]
  results += [jax.ShapeDtypeStruct((splits, batch, heads), jnp.float32)] * several
  outputs = len(results)
  out, keys, values, *sums = pl.pallas_call(
    kernel,
    out_shape=results,
    in_specs=[of_row(*new.shape[1:]), of_row(), *[of_row(width // 2)] * 2, *[factors] * len(scales), cache, cache],
    out_specs=[of_split(heads, width), cache, cache, *[of_split(heads)] * several],
    grid=(groups, batch, splits),  # heads first: in memory those of a position lie side by side
    input_output_aliases={given: 1, given + 1: 2},
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(num_warps=max(1, width // 128), num_stages=_STAGES),
    name="rotate_and_store" if scale is None else "rotate_store_and_attend",
  )(new, entries, cos, sin, *scales, *by_position)
  if several:
    weights = jnp.exp2(sums[0] - jnp.max(sums[0], axis=0, keepdims=True))
    weights /= jnp.sum(weights, axis=0, keepdims=True)
    out = jnp.sum(weights[..., None] * out, axis=0, keepdims=True).astype(q.dtype)
  return out[0], (keys.swapaxes(1, 2), values.swapaxes(1, 2))


def _count_splits(programs: int, length: int) -> int:
  """Returns among how many programs each row's positions are split: a power of 2."""
  wanted = min(_PROGRAMS // programs, length // _SPLIT)
  return 2 ** (max(wanted, 1).bit_length() - 1)


def _reader(new_ref, cos_ref, sin_ref, eps: float) -> Callable[[Any, Any], Array]:
  """Returns a function of a head of new_ref [1, heads, d] and of its norm's factors to the rotated head, [d]."""
  half = cos_ref.shape[1]
  lanes = jnp.arange(2 * half)
  partners = (lanes + half) % (2 * half)  # of pairs that are rotated
  cos, sin = cos_ref[0, lanes % half], sin_ref[0, lanes % half]
  sin = jnp.where(lanes < half, -sin, sin)

  def read(head: Any, scale_ref: Any) -> Array:
    x, other = new_ref[0, head, :].astype(jnp.float32), new_ref[0, head, partners].astype(jnp.float32)
    if scale_ref is not None:
      inverse = jax.lax.rsqrt(jnp.sum(x * x) / (2 * half) + eps)
      x, other = x * inverse * scale_ref[...], other * inverse * scale_ref[partners]
    return (x * cos + other * sin).astype(new_ref.dtype)

  return read


def _attend(
  own: list[Array], key: Array, value: Array, key_ref, value_ref, entry: Array, split: Array, splits: int, scale: float
) -> tuple[list[Array], list[Array]]:
  """Attends from a row's queries to the row's token, in the first split, and to the split's part of what came before.

  Returns:
    For each query, the softmax-weighted values float32 [d] and the log-sum-exp [], to base 2 as `scale` is.
  """
  rows = jnp.arange(max(16, pl.next_power_of_2(len(own))))  # of a product on tensor cores
  queries = jnp.zeros((rows.size, key.size), key.dtype)
  for i, query in enumerate(own):
    queries = jnp.where((rows == i)[:, None], query[None], queries)
  size = pl.cdiv(pl.cdiv(entry, splits), BLOCK) * BLOCK
  start = split * size
  end = jnp.minimum(entry, start + size)

  def attend_to_block(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    high, total, acc = state
    at = start + i * BLOCK + jnp.arange(BLOCK)
    seen, at = at < end, jnp.minimum(at, end - 1)
    logits = jnp.where(seen[None], plgpu.dot(queries, key_ref[at, :].T) * scale, _LOW)
    higher = jnp.maximum(high, jnp.max(logits, axis=1))
    shrink, weights = jnp.exp2(high - higher), jnp.exp2(logits - higher[:, None])
    values = value_ref[at, :]
    more = plgpu.dot(weights.astype(values.dtype), values)
    return higher, total * shrink + jnp.sum(weights, axis=1), acc * shrink[:, None] + more

  logit = jnp.sum(queries.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=1) * scale
  total = jnp.ones(rows.size, jnp.float32) * (split == 0).astype(jnp.float32)
  state = (
    jnp.where(split == 0, logit, jnp.full(rows.size, _LOW)),
    total,
    total[:, None] * value.astype(jnp.float32)[None],
  )
  high, total, acc = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - start, 0), BLOCK), attend_to_block, state)
  total = jnp.maximum(total, 1e-30)  # of a split without positions
  sums, acc = high + jnp.log2(total), acc / total[:, None]
  out = [jnp.sum(jnp.where((rows == i)[:, None], acc, 0.0), axis=0) for i in range(len(own))]
  return out, [jnp.sum(jnp.where(rows == i, sums, 0.0)) for i in range(len(own))]
