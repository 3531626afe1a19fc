"""Whole-row attention on TPUs: the splash kernel that comes with JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

Array = jax.Array

_LANES = 128  # the kernel's smallest block
_LARGEST_BLOCK = 512


def splash_attention(
  q: Array,
  k: Array,
  v: Array,
  segments: Array,
  local: Array,
  *,
  scale: float,
  window: int | None,
  softcap: float | None,
  interpret: bool,
) -> Array:
  """Computes `self_attention` by blocks that never leave the chip's memory; blocks that nothing attends to are free.

  Rows are padded to a multiple of 128 tokens. `interpret` runs the kernel off TPUs, slowly, for tests.
  """
  length = q.shape[1]
  padding = -length % _LANES

  def pad(x: Array) -> Array:
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

  # Heads first. Padding is a segment of its own or extends the row's last one; its outputs are dropped below.
  q, k, v = (pad(x).swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
  everywhere = _kernel(q.shape[1], length + padding, None, softcap, interpret)
  inputs = (q, k, v, splash.SegmentIds(pad(segments), pad(segments)))
  if window is None:
    out = everywhere(*inputs)
  else:
    nearby = _kernel(q.shape[1], length + padding, window, softcap, interpret)
    out = jax.lax.cond(local, nearby, everywhere, *inputs)
  return out.swapaxes(1, 2)[:, :length]


def _kernel(heads: int, length: int, window: int | None, softcap: float | None, interpret: bool):
  """Makes the kernel over a batch of rows, for one kind of layer."""
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
