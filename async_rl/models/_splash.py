"""Whole-row attention on TPUs: the splash kernel that comes with JAX, split over a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._sharding import ROWS
from async_rl.models._sharding import fit_sharding

Array = jax.Array

_LANES = 128  # the kernel's smallest block
_LARGEST_BLOCK = 512


def splash_attention(
  q: Array,
  k: Array,
  v: Array,
  segments: Array,
  local: Array | bool,
  *,
  scale: float,
  window: int | None,
  softcap: float | None,
  mesh: Mesh | None,
) -> Array:
  """`self_attention` by blocks that never leave the chip's memory; blocks that nothing attends to cost nothing.

  Rows are padded to a multiple of 128 tokens. Off TPUs the kernel is interpreted, slowly, for tests. The compiler
  cannot split a kernel, so `mesh` says how: rows over ("data", "fsdp"), heads over "tensor" where it divides them.
  """
  platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  attend = functools.partial(_attend, scale=scale, window=window, softcap=softcap, interpret=platform != "tpu")
  if mesh is not None:
    heads = fit_sharding(mesh, (ROWS, None, "tensor"), k.shape).spec
    rows = PartitionSpec(heads[0])
    attend = jax.shard_map(
      attend, mesh=mesh, in_specs=(heads, heads, heads, rows, PartitionSpec()), out_specs=heads, check_vma=False
    )
  return attend(q, k, v, segments, jnp.asarray(local))


def _attend(q, k, v, segments, local, *, scale, window, softcap, interpret):
  length = q.shape[1]
  padding = -length % _LANES
  pad = lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
  # Heads first. Padding is a segment of its own, or prolongs that of the row's end: what it sees is dropped below.
  q, k, v = (pad(x).swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
  kernel = lambda window: _kernel(q.shape[1], length + padding, window, softcap, interpret)
  inputs = (q, k, v, splash.SegmentIds(pad(segments), pad(segments)))
  out = kernel(None)(*inputs) if window is None else jax.lax.cond(local, kernel(window), kernel(None), *inputs)
  return out.swapaxes(1, 2)[:, :length]


def _kernel(heads: int, length: int, window: int | None, softcap: float | None, interpret: bool):
  """The kernel over a batch of rows, for one kind of layer."""
  shape = (length, length)
  mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
  block = max(size for size in range(_LANES, _LARGEST_BLOCK + 1, _LANES) if length % size == 0)
  kernel = splash.make_splash_mha(
    splash.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(block, block, block, block, block, block, block, block),
    head_shards=1,
    q_seq_shards=1,
    attn_logits_soft_cap=softcap,
    residual_checkpoint_name="attention",  # what remat="attention" keeps
    interpret=interpret,
  )
  return jax.vmap(kernel)
