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
from async_rl.models._layers import fits_kernels
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
  return "cudnn" if _has_cudnn(device, head_dim) else "xla"


def check_backend(backend: str, device: jax.Device, head_dim: int) -> None:
  """Raises a ValueError unless a backend runs on a device, for heads of width `head_dim`.

  "splash" does everywhere: off TPUs it is interpreted, slowly.
  """
  check_choice("attention", backend, BACKENDS)
  if backend == "ragged" and device.platform != "tpu":
    needed = "TPUs"
  elif backend == "cudnn" and not _has_cudnn(device, head_dim):
    needed = f"NVIDIA GPUs of compute capability {_cudnn_capability(head_dim)} for heads of width {head_dim}"
  else:
    return
  raise ValueError(
    f"attention={backend!r} needs {needed}, got {device.device_kind}; choose 'auto' for the fastest that runs here."
  )


def _has_cudnn(device: jax.Device, head_dim: int) -> bool:
  return device.platform in ("gpu", "cuda") and float(device.compute_capability) >= _cudnn_capability(head_dim)


def _cudnn_capability(head_dim: int) -> float:
  return 8.0 if head_dim <= 128 else 9.0


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
  max_segments: int | None = None,
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
    max_segments: the most segments of a row, padding included, beyond which results are undefined; `None` for any
      number. With it, cuDNN skips what lies outside of a token's segment, on GPUs that can (Hopper and later).
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
    if max_segments is not None and window is None and q.shape[3] <= 128 and _packs_segments(mesh):
      kernel = functools.partial(_cudnn_packed_attention, scale=scale, max_segments=max(2, max_segments))
    else:
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


def _packs_segments(mesh: Mesh | None) -> bool:
  """Returns whether cuDNN takes segments by their places in a row."""
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  return float(getattr(device, "compute_capability", 0)) >= 9.0


def _cudnn_packed_attention(
  q: Array, k: Array, v: Array, segments: Array, local: Array, *, scale: float, max_segments: int
) -> Array:
  from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX has no public name for its packed layout

  del local
  starts, lengths = _places(segments, max_segments)
  starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
  return cudnn.dot_product_attention(
    q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts,
    scale=scale, mask_type=cudnn.MaskType.PADDING_CAUSAL,
  )  # fmt: skip


def _places(segments: Array, count: int) -> tuple[Array, Array]:
  """Returns where each segment of a row begins and its length, int32 [B, count] each, -1 beyond the last."""
  begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
  number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
  lengths = jnp.sum(number[:, :, None] == jnp.arange(count)[None, None], axis=1, dtype=jnp.int32)
  starts = jnp.cumsum(lengths, axis=1) - lengths
  return jnp.where(lengths > 0, starts, -1), jnp.where(lengths > 0, lengths, -1)


def cache_backend(
  backend: str, *, dtype: str, head_dim: int, num_kv_heads: int, window: int | None = None,
  softcap: float | None = None, mesh: Mesh | None = None,
) -> str:  # fmt: skip
  """Returns the backend that `cache_attention` uses where `self_attention` uses `backend`.

  "ragged" takes what `cache_arrays` can fill up. "cudnn" takes half precision, without windows and soft-caps. For heads
  whose width is a power of 2 from 32 to 256 it is "triton", a kernel of this project that does more than attend, see
  `Policy.decode`; for those of other multiples of 8 it is cuDNN's own. All layers of a model must use such a kernel or
  none, since they want the cache position by position in memory. Everything else is "xla".
  """
  if backend == "ragged":
    return "ragged" if _ragged_array(num_kv_heads, head_dim, dtype, mesh) else "xla"
  half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
  if backend != "cudnn" or not half or window is not None or softcap is not None or head_dim % 8:
    return "xla"
  return "triton" if fits_kernels(head_dim) and head_dim <= 256 else "cudnn"


def cache_arrays(
  backend: str, *, dtype: str, head_dim: int, num_kv_heads: int, mesh: Mesh | None = None
) -> tuple[tuple[int, int], ...]:
  """Returns the number and the width of the heads in each array that holds a layer's cache, with a `cache_backend`.

  Keys and values have an array each, but with "ragged" they share one. That is filled up as TPUs fill up arrays in any
  case: to a width of 128, and in half precision to 1, 2, 4 or a multiple of 8 pairs of a key and a value; in float32 to
  1, 2 or 4. What the kernel does not take: more heads in float32, several that are wider than 128, and other numbers of
  heads on the devices of a mesh's "tensor" axis that split them.
  """
  array = _ragged_array(num_kv_heads, head_dim, dtype, mesh) if backend == "ragged" else None
  return ((num_kv_heads, head_dim),) * 2 if array is None else (array,)


def _ragged_array(num_kv_heads: int, head_dim: int, dtype: str, mesh: Mesh | None) -> tuple[int, int] | None:
  tensor = 1 if mesh is None else mesh.shape.get("tensor", 1)
  split = num_kv_heads % tensor == 0 and tensor > 1
  own = num_kv_heads // tensor if split else num_kv_heads
  half = jnp.dtype(dtype).itemsize == 2
  pairs = next((n for n in (1, 2, 4, *range(8, own + 8, 8)) if n >= own), own)
  width = -(-head_dim // 128) * 128
  refused = (split and pairs != own) or (pairs > 4 and not half) or (width > 128 and (pairs > 1 or not half))
  return None if refused else (2 * (num_kv_heads if split else pairs), width)


def arrange(k: Array, v: Array, arrays: tuple[tuple[int, int], ...]) -> tuple[Array, ...]:
  """Returns keys and values, each [..., N, d], in the arrays of `cache_arrays`.

  In a shared one, those of head n are 2n and 2n + 1.
  """
  if len(arrays) == 2:
    return k, v
  ((heads, width),) = arrays
  both = jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1])
  filling = [(0, 0)] * (k.ndim - 2) + [(0, heads - both.shape[-2]), (0, width - both.shape[-1])]
  return (jnp.pad(both, filling),)


def cache_attention(
  q: Array, kv: tuple[Array, ...], positions: Array, *, num_kv_heads: int, scale: float, window: int | None = None,
  softcap: float | None = None, backend: str = "xla", mesh: Mesh | None = None,
) -> Array:  # fmt: skip
  """Attends from one new token per row to a cache that already holds it.

  Args:
    q: [B, H, d].
    kv: keys and values, each [B, N, S, d]; for "ragged" in one array [B, n, S, w], see `cache_arrays`.
    positions: int32 [B], the index of the new token; later entries of the cache are ignored.
    num_kv_heads: N.
    scale: the scale of the logits.
    window: the number of latest positions that are visible, as in `self_attention`.
    softcap: the c in c * tanh(logits / c).
    backend: one of `cache_backend`, but not "triton". "xla" reads all S positions and wants a cache that lies head by
      head in memory; "cudnn" reads each row's first `positions` + 1 and wants it position by position, where the
      transpositions below move nothing; so does "ragged", in blocks, which runs on TPUs only.
    mesh: the devices over which a kernel is split by rows and heads.

  Returns:
    [B, H, d] in q's dtype.

  Raises:
    ValueError: for any other *backend*.
  """
  check_choice("backend", backend, ("xla", "cudnn", "ragged"))
  if backend != "xla":
    kernel = _cache_kernel(backend, q.shape[1] // num_kv_heads, scale, window, softcap)
    if mesh is not None:
      split = fit_sharding(mesh, (ROWS, "tensor"), (q.shape[0], num_kv_heads)).spec
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


def _cache_kernel(
  backend: str, queries: int, scale: float, window: int | None, softcap: float | None
) -> Callable[..., Array]:
  if backend == "cudnn":
    return functools.partial(_cudnn_cache_attention, scale=scale)
  from async_rl.models._ragged_attention import ragged_attention  # takes a third of a second to import

  return functools.partial(
    ragged_attention, queries=queries, scale=scale, window=window, softcap=softcap, block=RAGGED_BLOCK
  )


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
  return jax.nn.softmax(masked_logits(logits, mask, scale, softcap), axis=-1)


def masked_logits(logits: Array, mask: Array, scale: float, softcap: float | None) -> Array:
  """Returns logits as they enter a softmax: scaled, soft-capped and, where the mask is False, very low."""
  logits = logits * scale
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  return jnp.where(mask, logits, _MASKED)
