"""Attention over whole rows (scoring, prefill) and over a cache (decode), behind one switch of backends.

Shapes: B rows, T tokens of a row, S cached positions, H query heads, N key/value heads, d head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl._validation import check_choice
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import fit_sharding

Array = jax.Array

BACKENDS = ("auto", "xla", "cudnn", "splash", "ragged")
#: Positions that the kernel of "ragged" reads at once: whole blocks, so that larger ones read more behind a row's end.
RAGGED_BLOCK = 256
_MASKED = -1e30  # finite, so that a fully masked (padding) query stays finite


def resolve_backend(backend: str, device: jax.Device, head_dim: int) -> str:
  """Returns the backend that `backend` stands for on a device, for heads of width `head_dim`.

  "auto" is "ragged" on TPUs, and cuDNN on GPUs that have it: of compute capability 8.0 and, for heads wider than 128,
  9.0. Everywhere else it is XLA.
  """
  check_choice("attention", backend, BACKENDS)
  if backend != "auto":
    return backend
  if device.platform == "tpu":
    return "ragged"
  if device.platform in ("gpu", "cuda"):
    capability = float(device.compute_capability)
    return "cudnn" if capability >= (8.0 if head_dim <= 128 else 9.0) else "xla"
  return "xla"


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
  """Attends from every token to itself and the earlier tokens of its own segment.

  Args:
    q: [B, T, H, d].
    k: [B, T, N, d].
    v: [B, T, N, d].
    segments: int32 [B, T]; tokens attend within equal segments only. Each segment is contiguous.
    scale: the scale of the logits.
    window: the number of latest positions that are visible, the token itself included; `None` shows all.
    local: bool [], whether `window` applies, so that scanned layers can differ.
    softcap: the c in c * tanh(logits / c).
    backend: "xla"; "cudnn", which takes half precision, even T, d a multiple of 8 and no soft-caps, and leaves the rest
      to "xla"; or "splash", the TPU kernel, interpreted elsewhere; "ragged", which is of decode steps, means it, too.
    mesh: the devices over which the kernels are split by rows and heads. The compiler splits "xla" by itself, but
      kernels are opaque to it: cuDNN's fails where its mask happens to be laid out unlike its queries.

  Returns:
    [B, T, H, d] in q's dtype.
  """
  if backend in ("splash", "ragged"):
    from async_rl.models._splash_attention import splash_attention  # takes a third of a second to import

    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    kernel = functools.partial(
      splash_attention, scale=scale, window=window, softcap=softcap, interpret=platform != "tpu"
    )
    return _split(kernel, mesh, k.shape)(q, k, v, segments, jnp.asarray(local))
  if backend == "cudnn" and softcap is None and _suits_cudnn(q):
    kernel = functools.partial(_cudnn_attention, scale=scale, window=window)
    return _split(kernel, mesh, k.shape)(q, k, v, segments, jnp.asarray(local))
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


def _split(kernel: Callable[..., Array], mesh: Mesh | None, shape: tuple[int, ...]) -> Callable[..., Array]:
  """Returns `kernel(q, k, v, segments, local)` that every device runs on its own rows and heads.

  Args:
    kernel: the function of whole arrays.
    mesh: the devices: rows go over ("data", "fsdp"), heads over "tensor", where these divide them.
    shape: the shape of k, [B, T, N, d].
  """
  if mesh is None:
    return kernel
  heads = fit_sharding(mesh, (ROWS, None, "tensor"), shape).spec
  rows = PartitionSpec(heads[0])
  return jax.shard_map(
    kernel, mesh=mesh, in_specs=(heads, heads, heads, rows, PartitionSpec()), out_specs=heads, check_vma=False
  )


def _suits_cudnn(q: Array) -> bool:
  """Returns whether cuDNN takes arrays of this dtype and shape, with a mask and gradients."""
  return q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[1] % 2 == 0 and q.shape[3] % 8 == 0


def _cudnn_attention(
  q: Array, k: Array, v: Array, segments: Array, local: Array, *, scale: float, window: int | None
) -> Array:
  mask = segments[:, None, :, None] == segments[:, None, None, :]

  attend = functools.partial(
    jax.nn.dot_product_attention, mask=mask, scale=scale, is_causal=True, implementation="cudnn"
  )
  if window is None:
    return attend(q, k, v)
  nearby = functools.partial(attend, local_window_size=(window - 1, 0))
  return jax.lax.cond(local, nearby, attend, q, k, v)


def cache_backend(
  backend: str, *, dtype: str, head_dim: int, num_kv_heads: int, window: int | None = None,
  softcap: float | None = None, mesh: Mesh | None = None,
) -> str:  # fmt: skip
  """Returns the backend that `cache_attention` uses where `self_attention` uses `backend`.

  "ragged" takes heads that are 128 wide, whose keys and values on each device fill whole tiles: 1, 2, 4 or 8 words of
  32 bits, in half precision also multiples of 8; with one word, any multiple of 128. cuDNN's decode kernel takes half
  precision and heads of a multiple of 8, without windows and soft-caps; all layers of a model must use it or none,
  since it wants the cache position by position in memory. Everything else is "xla".
  """
  if backend == "ragged":
    tensor = 1 if mesh is None else mesh.shape.get("tensor", 1)
    heads = num_kv_heads // tensor if num_kv_heads % tensor == 0 else num_kv_heads
    size = jnp.dtype(dtype).itemsize
    words = heads * size / 2
    wide = head_dim == 128 or (head_dim % 128 == 0 and words == 1)
    return "ragged" if wide and (words in (1, 2, 4, 8) or (words % 8 == 0 and size == 2)) else "xla"
  half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
  plain = window is None and softcap is None
  return "cudnn" if backend == "cudnn" and half and plain and head_dim % 8 == 0 else "xla"


def arrange(k: Array, v: Array, backend: str) -> tuple[Array, ...]:
  """Returns keys and values, each [..., N, d], as the caches of a backend hold them.

  Returns:
    With "ragged" one array [..., 2N, d], in which those of head n are 2n and 2n + 1; otherwise both.
  """
  if backend != "ragged":
    return k, v
  return (jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1]),)


def cache_attention(
  q: Array, kv: tuple[Array, ...], positions: Array, *, scale: float, window: int | None = None,
  softcap: float | None = None, backend: str = "xla", mesh: Mesh | None = None,
) -> Array:  # fmt: skip
  """Attends from one new token per row to a cache that already holds it.

  Args:
    q: [B, H, d].
    kv: keys and values, each [B, N, S, d]; for "ragged" in one array [B, 2N, S, d], as `arrange` puts them.
    positions: int32 [B], the index of the new token; later entries of the cache are ignored.
    scale: the scale of the logits.
    window: the number of latest positions that are visible, as in `self_attention`.
    softcap: the c in c * tanh(logits / c).
    backend: one of `cache_backend`. "xla" reads all S positions and wants a cache that lies head by head in memory;
      "cudnn" reads each row's first `positions` + 1 and wants it position by position, where the transpositions below
      move nothing; so does "ragged", in blocks, which runs on TPUs only.
    mesh: the devices over which a kernel is split by rows and heads.

  Returns:
    [B, H, d] in q's dtype.
  """
  if backend != "xla":
    kernel = _cache_kernel(backend, scale, window, softcap)
    if mesh is not None:
      split = fit_sharding(mesh, (ROWS, "tensor"), (q.shape[0], len(kv) * kv[0].shape[1] // 2)).spec
      specs = (*[split] * (1 + len(kv)), PartitionSpec(split[0]))
      kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return kernel(q, *kv, positions)
  k, v = kv
  batch, heads, width = q.shape
  entries = jnp.arange(k.shape[2])[None, :]
  mask = entries <= positions[:, None]
  if window is not None:
    mask &= positions[:, None] - entries < window
  grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], width)
  logits = jnp.einsum("bngd,bnsd->bngs", grouped, k, preferred_element_type=jnp.float32)
  probs = _softmax(logits, mask[:, None, None], scale, softcap).astype(v.dtype)
  return jnp.einsum("bngs,bnsd->bngd", probs, v).reshape(q.shape).astype(q.dtype)


def _cache_kernel(backend: str, scale: float, window: int | None, softcap: float | None) -> Callable[..., Array]:
  if backend == "cudnn":
    return functools.partial(_cudnn_cache_attention, scale=scale)
  from async_rl.models._ragged_attention import ragged_attention  # takes a third of a second to import

  return functools.partial(ragged_attention, scale=scale, window=window, softcap=softcap, block=RAGGED_BLOCK)


def _cudnn_cache_attention(q: Array, k: Array, v: Array, positions: Array, *, scale: float) -> Array:
  return jax.nn.dot_product_attention(
    q[:, None],
    k.swapaxes(1, 2),
    v.swapaxes(1, 2),
    query_seq_lengths=jnp.ones_like(positions),
    key_value_seq_lengths=positions + 1,
    scale=scale,
    implementation="cudnn",
  )[:, 0]


def _softmax(logits: Array, mask: Array, scale: float, softcap: float | None) -> Array:
  logits = logits * scale
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  return jax.nn.softmax(jnp.where(mask, logits, _MASKED), axis=-1)
