"""Attention over whole rows (scoring, prefill) and over a cache (decode), behind one switch of backends.

Shapes: B rows, T tokens of a row, S cached positions, H query heads, N key/value heads, d head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

BACKENDS = ("auto", "xla", "cudnn")
_MASKED = -1e30  # finite, so that a fully masked (padding) query stays finite


def resolve_backend(backend: str) -> str:
  """The backend that `backend` stands for on this machine: "auto" is cuDNN on GPUs, else XLA."""
  if backend not in BACKENDS:
    raise ValueError(f"attention must be one of {BACKENDS}, got attention={backend!r}.")
  if backend != "auto":
    return backend
  return "cudnn" if jax.default_backend() == "gpu" else "xla"


def self_attention(
  q: Array,
  k: Array,
  v: Array,
  segments: Array,
  window: Array | None,
  *,
  scale: float,
  softcap: float | None = None,
  backend: str = "xla",
) -> Array:
  """Causal attention of every token to the earlier tokens of its own segment.

  Args:
    q: [B, T, H, d].
    k: [B, T, N, d].
    v: [B, T, N, d].
    segments: int32 [B, T]; tokens attend within equal segments only. Each segment is contiguous.
    window: int32 [], how many latest positions are visible, the token itself included; `None`: all.
    scale: of the logits.
    softcap: c in c * tanh(logits / c).
    backend: "xla" or "cudnn"; cuDNN takes half precision without soft-caps and windows, the rest falls to "xla".

  Returns:
    [B, T, H, d] in q's dtype.
  """
  half = q.dtype in (jnp.bfloat16, jnp.float16)
  if backend == "cudnn" and half and softcap is None and window is None:
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=True, implementation="cudnn")
  rows = jnp.arange(q.shape[1])
  distance = rows[:, None] - rows[None, :]
  visible = distance >= 0
  if window is not None:
    visible &= distance < window
  mask = visible[None] & (segments[:, :, None] == segments[:, None, :])
  batch, length, heads, width = q.shape
  grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
  logits = jnp.einsum("btngd,bsnd->bngts", grouped, k, preferred_element_type=jnp.float32)
  probs = _softmax(logits, mask[:, None, None], scale, softcap).astype(v.dtype)
  return jnp.einsum("bngts,bsnd->btngd", probs, v).reshape(q.shape).astype(q.dtype)


def cache_attention(
  q: Array, k: Array, v: Array, positions: Array, window: Array | None, *, scale: float, softcap: float | None = None
) -> Array:
  """Attention of one new token per row to a cache that already holds it.

  Args:
    q: [B, H, d].
    k: [B, N, S, d]; this layout needs no transposition for the products below.
    v: [B, N, S, d].
    positions: int32 [B], index of the new token; later entries of the cache are ignored.
    window: int32 [] or `None`, as in `self_attention`.
    scale: of the logits.
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
