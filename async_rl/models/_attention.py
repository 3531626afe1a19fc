"""Attention over whole rows (scoring, prefill) and over a cache (decode), behind one switch of backends.

Shapes: B rows, T tokens of a row, S cached positions, H query heads, N key/value heads, d head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Array = jax.Array

BACKENDS = ("auto", "xla", "cudnn", "splash")
_MASKED = -1e30  # finite, so that a fully masked (padding) query stays finite


def resolve_backend(backend: str, platform: str) -> str:
  """The backend that `backend` stands for: "auto" is cuDNN on GPUs, splash attention on TPUs, else XLA."""
  if backend not in BACKENDS:
    raise ValueError(f"attention must be one of {BACKENDS}, got attention={backend!r}.")
  if backend != "auto":
    return backend
  return {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(platform, "xla")


def self_attention(
  q: Array,
  k: Array,
  v: Array,
  segments: Array,
  *,
  scale: float,
  window: int | None = None,
  local: Array | bool = True,
  softcap: float | None = None,
  backend: str = "xla",
  mesh: Mesh | None = None,
) -> Array:
  """Causal attention of every token to the earlier tokens of its own segment.

  Args:
    q: [B, T, H, d].
    k: [B, T, N, d].
    v: [B, T, N, d].
    segments: int32 [B, T]; tokens attend within equal segments only. Each segment is contiguous.
    scale: of the logits.
    window: how many latest positions are visible, the token itself included; `None`: all.
    local: bool [], whether `window` applies, so that scanned layers can differ.
    softcap: c in c * tanh(logits / c).
    backend: "xla"; "cudnn", which takes half precision without soft-caps and leaves the rest to "xla"; or "splash",
      the TPU kernel, interpreted elsewhere.
    mesh: on which "splash" is split by rows and heads; the other backends are split by the compiler.

  Returns:
    [B, T, H, d] in q's dtype.
  """
  if backend == "splash":
    from async_rl.models._splash import splash_attention  # takes a third of a second to import

    return splash_attention(q, k, v, segments, local, scale=scale, window=window, softcap=softcap, mesh=mesh)
  if backend == "cudnn" and softcap is None and q.dtype in (jnp.bfloat16, jnp.float16):
    return _cudnn_attention(q, k, v, segments, scale, window, local)
  distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None, :]
  visible = distance >= 0
  if window is not None:
    visible &= (distance < window) | jnp.logical_not(local)
  mask = visible[None] & (segments[:, :, None] == segments[:, None, :])
  batch, length, heads, width = q.shape
  grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
  logits = jnp.einsum("btngd,bsnd->bngts", grouped, k, preferred_element_type=jnp.float32)
  probs = _softmax(logits, mask[:, None, None], scale, softcap).astype(v.dtype)
  return jnp.einsum("bngts,bsnd->btngd", probs, v).reshape(q.shape).astype(q.dtype)


def _cudnn_attention(
  q: Array, k: Array, v: Array, segments: Array, scale: float, window: int | None, local: Array | bool
) -> Array:
  mask = segments[:, None, :, None] == segments[:, None, None, :]

  def attend(window):
    return lambda q, k, v: jax.nn.dot_product_attention(
      q, k, v, mask=mask, scale=scale, is_causal=True, implementation="cudnn",
      local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip

  return attend(None)(q, k, v) if window is None else jax.lax.cond(local, attend(window), attend(None), q, k, v)


def cache_attention(
  q: Array, k: Array, v: Array, positions: Array, *, scale: float, window: int | None = None,
  softcap: float | None = None,
) -> Array:  # fmt: skip
  """Attention of one new token per row to a cache that already holds it.

  Args:
    q: [B, H, d].
    k: [B, N, S, d]; this layout needs no transposition for the products below.
    v: [B, N, S, d].
    positions: int32 [B], index of the new token; later entries of the cache are ignored.
    scale: of the logits.
    window: as in `self_attention`.
    softcap: c in c * tanh(logits / c).

  Returns:
    [B, H, d] in q's dtype.
  """
  batch, heads, width = q.shape
  entries = jnp.arange(k.shape[2])[None, :]
  mask = entries <= positions[:, None]
  if window is not None:
    mask &= positions[:, None] - entries < window
  grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], width)
  logits = jnp.einsum("bngd,bnsd->bngs", grouped, k, preferred_element_type=jnp.float32)
  probs = _softmax(logits, mask[:, None, None], scale, softcap).astype(v.dtype)
  return jnp.einsum("bngs,bnsd->bngd", probs, v).reshape(q.shape).astype(q.dtype)


def _softmax(logits: Array, mask: Array, scale: float, softcap: float | None) -> Array:
  logits = logits * scale
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  return jax.nn.softmax(jnp.where(mask, logits, _MASKED), axis=-1)
