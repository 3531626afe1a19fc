"""Attention of decode steps on TPUs: the ragged paged kernel that comes with JAX."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

Array = jax.Array

_QUERIES = 8  # rows whose queries the kernel holds at once
_LANES = 128
_LARGEST_TABLE = 2**17  # numbers of pages, half of a chip's scalar memory; each row's fill whole lanes


def ragged_attention(
  q: Array,
  kv: Array,
  positions: Array,
  *,
  queries: int,
  scale: float,
  window: int | None,
  softcap: float | None,
  block: int,
) -> Array:
  """Computes `cache_attention` on one device and reads, of each row, only the blocks that hold something.

  The kernel's pages [pages, page, 2N, d] are a view of a cache that lies position by position in memory: each row of S
  positions is S / page of them, in order. Of a row with a window, it sees the pages from the window's start on.

  Args:
    q: [B, H, d].
    kv: [B, n, S, w], S a multiple of 16, n at least 2N, w at least d; see `cache_arrays`.
    positions: int32 [B], the index of the new token.
    queries: H / N, the query heads of a key.
    scale: the scale of the logits.
    window: the number of latest positions that are visible; `None` shows all.
    softcap: the c in c * tanh(logits / c).
    block: the positions that are read at once, a power of 2 from 16 on.

  Returns:
    [B, H, d] in q's dtype.
  """
  batch, heads, length, width = kv.shape
  page = math.gcd(length, block)
  pages = length // page
  missing = heads // 2 * queries - q.shape[1]
  filled = jnp.pad(q, ((0, 0), (0, missing), (0, width - q.shape[2])))
  cache = kv.swapaxes(1, 2).reshape(batch * pages, page, heads, width)
  shown = pages if window is None else min(pages, -(-window // page) + 1)
  first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions + 1 - window, 0) // page
  within = jnp.minimum(first[:, None] + jnp.arange(shown, dtype=jnp.int32)[None], pages - 1)
  table = jnp.arange(batch, dtype=jnp.int32)[:, None] * pages + within
  lengths = positions + 1 - first * page

  def attend(q: Array, lengths: Array, table: Array) -> Array:
    rows = len(q)
    return ragged_paged_attention(
      q,
      cache,
      lengths,
      table,
      jnp.arange(rows + 1, dtype=jnp.int32),  # one query in each row
      jnp.array([rows], jnp.int32),
      sm_scale=scale,
      sliding_window=window,
      soft_cap=softcap,
      num_kv_pages_per_block=min(shown, block // page),
      num_queries_per_block=min(rows, _QUERIES),
    )

  rows = max(1, _LARGEST_TABLE // (-(-shown // _LANES) * _LANES))
  parts = [slice(i, i + rows) for i in range(0, batch, rows)]
  out = jnp.concatenate([attend(filled[part], lengths[part], table[part]) for part in parts])
  return out[:, : q.shape[1], : q.shape[2]]
