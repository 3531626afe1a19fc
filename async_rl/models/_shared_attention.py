"""Attention of decode steps to prompts that several rows of a cache share, which are read once for all of them.

By XLA; `_fused_decode` has the kernels that do it on GPUs. What a row sees is its prompt and its own part, which is all
that follows. The softmax over both is put together from the softmaxes over each, by the sums of their exponentials.

Shapes: B rows of the cache, S positions of their own parts, G prompts of P positions with up to K rows each, H query
heads, N key/value heads, d head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._attention import masked_logits
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import fit_sharding

Array = jax.Array


class SharedPrompts(NamedTuple):
  """The prompts that the rows of a cache share. On a mesh, rows and prompts are numbered on each device by themselves.

  Attributes:
    layers: the keys and values of L layers, each [G, N, P, d]; of one layer alone in `shared_attention`.
    lengths: int32 [G], the number of positions of each prompt.
    rows: int32 [G, K], the rows that share each prompt; B or more for none.
    places: int32 [B], where each row is in `rows`, counted over all of them; anything for a row without a prompt.
    starts: int32 [B], the length of each row's prompt, and so the position at which its own part starts.
  """

  layers: Any
  lengths: Any
  rows: Any
  places: Any
  starts: Any


def check_shared(backend: str) -> None:
  """Raises a ValueError unless prompts can be shared with a backend of `cache_backend`: "xla" or "triton"."""
  if backend == "ragged":
    raise ValueError(
      "shared_prompts=True is not for the kernel of attention='ragged', which is 'auto' on TPUs; choose 'splash'."
    )
  if backend == "cudnn":
    raise ValueError(
      "shared_prompts=True is not for cuDNN's decode kernel, which heads get whose width is no power of 2 from 32 to "
      "256; choose attention='xla'."
    )


def shared_attention(
  q: Array, kv: tuple[Array, Array], positions: Array, prompts: SharedPrompts, *, num_kv_heads: int, scale: float,
  window: int | None = None, softcap: float | None = None, mesh: Mesh | None = None,
) -> Array:  # fmt: skip
  """Attends from one new token per row to the row's prompt and to its own part, which already holds the token.

  Args:
    q: [B, H, d].
    kv: keys and values of the own parts, each [B, N, S, d].
    positions: int32 [B], the index of the new token in its own part; later entries are ignored.
    prompts: the prompts of one layer.
    num_kv_heads: N.
    scale: the scale of the logits.
    window: the number of latest positions that are visible, those of the prompt counted.
    softcap: the c in c * tanh(logits / c).
    mesh: the devices over which rows, prompts and heads are split: a row and its prompt are on one device.

  Returns:
    [B, H, d] in q's dtype.
  """
  kernel = functools.partial(_shared_attention, scale, softcap, window)
  if mesh is not None:
    heads = fit_sharding(mesh, (ROWS, "tensor"), (q.shape[0], num_kv_heads)).spec
    rows = PartitionSpec(heads[0])
    specs = (heads, (heads,) * 2, rows, SharedPrompts((heads,) * 2, *[rows] * 4))
    kernel = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
  return kernel(q, kv, positions, prompts)


def _shared_attention(
  scale: float, softcap: float | None, window: int | None, q: Array, kv: tuple[Array, Array], positions: Array,
  prompts: SharedPrompts,
) -> Array:  # fmt: skip
  attend: Callable[..., tuple[Array, Array]] = functools.partial(_attend, scale=scale, softcap=softcap)
  first = None if window is None else positions + 1 - window  # that a row sees, counted from the start of its own part
  own = attend(q[:, None], *kv, positions + 1, first if first is None else first[:, None])
  first = None if first is None else (first + prompts.starts).at[prompts.rows].get(mode="clip")
  members = q.at[prompts.rows].get(mode="clip")  # [G, K, H, d]
  prompt = attend(members, *prompts.layers, prompts.lengths, first)
  here = [x.reshape(-1, *x.shape[2:]).at[prompts.places].get(mode="clip") for x in prompt]
  return _merge(here, [x[:, 0] for x in own]).astype(q.dtype)


def _merge(a: list[Array], b: list[Array]) -> Array:
  """Returns softmax-weighted values [..., d] of all positions from those of two parts and their log-sum-exps [...]."""
  total = jnp.logaddexp(a[1], b[1])
  parts = [values.astype(jnp.float32) * jnp.exp(lse - total)[..., None] for values, lse in (a, b)]
  return parts[0] + parts[1]


def _attend(
  q: Array, k: Array, v: Array, counts: Array, first: Array | None, *, scale: float, softcap: float | None
) -> tuple[Array, Array]:
  """Attends from T queries of each row to the row's first `counts` entries, from entry `first` on.

  Args:
    q: [R, T, H, d].
    k: [R, N, S, d].
    v: [R, N, S, d].
    counts: int32 [R]; of a row without entries, the result is finite and the log-sum-exp very low.
    first: int32 [R, T]; `None` for all.
    scale: the scale of the logits.
    softcap: the c in c * tanh(logits / c).

  Returns:
    The softmax-weighted values [R, T, H, d] and the log-sum-exp of the logits, float32 [R, T, H].
  """
  rows, queries, heads, width = q.shape
  entries = jnp.arange(k.shape[2])
  mask = (entries[None] < counts[:, None])[:, None]
  if first is not None:
    mask &= entries[None, None] >= first[..., None]
  grouped = q.reshape(rows, queries, k.shape[1], heads // k.shape[1], width)
  logits = jnp.einsum("rtngd,rnsd->rtngs", grouped, k, preferred_element_type=jnp.float32)
  logits = masked_logits(logits, mask[:, :, None, None], scale, softcap)
  lse = jax.nn.logsumexp(logits, axis=-1)
  probs = jnp.exp(logits - lse[..., None]).astype(v.dtype)
  return jnp.einsum("rtngs,rnsd->rtngd", probs, v).reshape(q.shape), lse.reshape(q.shape[:-1])
