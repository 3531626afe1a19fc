"""Log-probabilities of given tokens without ever forming [tokens, vocabulary]."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._param_forms import Params
from async_rl.models._policy import Policy
from async_rl.models._policy import finish_logits
from async_rl.models._sharding import AXES
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import constrain
from async_rl.models._sharding import fit_sharding
from async_rl.models._sharding import row_parts
from async_rl.models._sharding import scatter_groups
from async_rl.models._sharding import sums_whole
from async_rl.models._value_head import VALUE_HEAD
from async_rl.models._value_head import head_values

Array = jax.Array

#: Elements that devices exchange at a time. XLA turns larger scatters (over 2**27 for TPUs) into sums of the whole.
_LARGEST_EXCHANGE = 2**25
#: The lanes of a tile of a TPU's memory: how many numbers lie side by side.
_LANES = 128
#: The number of a device's tokens whose logits are formed at a time, where that is left open.
HEAD_CHUNK = 4096
#: The same of a CPU, whose products are no faster with more; of fewer, less is formed that nobody needs.
_HEAD_CHUNK_ON_CPUS = 128
#: The policies' `remat` with which the backward pass forms no logits again.
_KEEPING = ("none", "activations", "projections")


class TokenStats(NamedTuple):
  """Holds per-token quantities of the policy's next-token distribution p, each float32 [R, T].

  Attributes:
    logprobs: log p(token); differentiable.
    entropy: -sum p log p; no gradient.
    sum_squares: sum p^2; no gradient. |e_a - p|^2 = 1 - 2 p(a) + sum p^2 is the squared gradient at the logits.
    values: the value of the text before the token; differentiable. `None` without a value head.
  """

  logprobs: Array
  entropy: Array
  sum_squares: Array
  values: Array | None = None


class Scored(NamedTuple):
  """The tokens whose statistics are needed, of W devices with N tokens each.

  Attributes:
    order: int32 [W, N], the places of each device's tokens in its rows, those of the needed ones first.
    most: int32 [], the most that any device needs.
  """

  order: Array
  most: Array


def score(
  policy: Policy,
  params: Params,
  tokens: Array,
  segments: Array,
  positions: Array,
  *,
  scored: Scored | None = None,
  temperature: float = 1.0,
  chunk: int | None = None,
) -> TokenStats:
  """Returns the statistics of every token given those before it in its segment.

  Entry [r, t] belongs to token t itself. The first token of a segment has no prediction: its entry is meaningless and
  must be masked.

  Args:
    policy: the architecture.
    params: its parameters, perhaps with a value head.
    tokens: int32 [R, T], the token ids.
    segments: int32 [R, T], the segment of each token, 0 on padding.
    positions: int32 [R, T], the position of each token in its segment.
    scored: the tokens that are needed; entries of others are meaningless and must be masked. `None` for all.
    temperature: the temperature of the softmax, the sampler's.
    chunk: the number of a device's tokens whose logits are formed at a time; `None` for `head_chunk`'s.
  """
  chunk = chunk or head_chunk(policy)
  hidden = predicting(policy.hidden(params, tokens, segments, positions))
  stats = token_stats(policy, float(temperature), chunk, hidden, policy.unembedding(params), tokens, scored)
  return stats._replace(values=head_values(params, hidden) if VALUE_HEAD in params else None)


def predicting(hidden: Array) -> Array:
  """Returns the hidden states [R, T, D] that predict each token from those of the tokens, zeros for the first."""
  return jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)


def head_chunk(policy: Policy) -> int:
  """Returns the number of a device's tokens whose logits are formed at a time on the policy's devices."""
  platform = jax.default_backend() if policy.mesh is None else policy.mesh.devices.flat[0].platform
  return _HEAD_CHUNK_ON_CPUS if platform == "cpu" else HEAD_CHUNK


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def token_stats(
  policy: Policy, temperature: float, chunk: int, hidden: Array, kernel: Array, targets: Array,
  scored: Scored | None = None,
) -> TokenStats:  # fmt: skip
  """Returns the statistics of `targets` under softmax(logits(hidden @ kernel) / temperature).

  For the backward pass, the gradient of each log-probability at the logits is kept in hidden's dtype if the policy's
  `remat` keeps projections, too; else each chunk of logits is formed again.

  Args:
    policy: the architecture, for its soft-cap, vocabulary limit and mesh.
    temperature: the temperature of the softmax.
    chunk: the number of a device's tokens at a time; the last chunk may be shorter.
    hidden: [R, T, D], the hidden states that predict the targets.
    kernel: [D, V], the unembedding, multiplied in hidden's dtype; its gradient has its own dtype.
    targets: int32 [R, T], the tokens to score.
    scored: the targets that are needed, see `score`.
  """
  return _statistics(policy, temperature, chunk, hidden, kernel, targets, scored, keep=False)[0]


def _forward(policy, temperature, chunk, hidden, kernel, targets, scored):
  stats, kept = _statistics(policy, temperature, chunk, hidden, kernel, targets, scored, keep=policy.remat in _KEEPING)
  return stats, (hidden, kernel, targets, scored, kept)


def _statistics(
  policy: Policy, temperature: float, chunk: int, hidden: Array, kernel: Array, targets: Array, scored: Scored | None,
  keep: bool,
) -> tuple[TokenStats, Array]:  # fmt: skip
  """Returns the statistics and, in the order of chunks, the slopes [W, P, V] to keep or the log-normalizers [W, P]."""
  compute = gathered_kernel(policy, kernel, hidden.dtype)
  chunks = _Chunks(row_ways(policy.mesh, hidden.shape[0]), chunk, targets, scored)
  hidden, flat = chunks.enter(hidden), chunks.enter(targets)
  zeros = jnp.zeros(flat.shape, jnp.float32)
  kept = jax.lax.empty((*flat.shape, kernel.shape[1]), hidden.dtype) if keep else zeros

  def one(i, carry):
    stats, kept = carry
    raw = raw_logits(policy, chunks.slice(hidden, i), compute)
    logits, t = tempered_logits(policy, temperature, raw), chunks.slice(flat, i)
    top = jnp.max(logits, axis=-1, keepdims=True)
    below = logits - top
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=-1)
    new = TokenStats(
      _at(below, t) - jnp.log(total),
      jnp.log(total) - jnp.sum(weights * below, axis=-1) / total,
      jnp.sum(jnp.square(weights), axis=-1) / jnp.square(total),
    )
    logz = top[..., 0] + jnp.log(total)
    kept = chunks.update(kept, i, slopes_of(policy, temperature, raw, logz, t).astype(kept.dtype) if keep else logz)
    return jax.tree.map(lambda x, y: chunks.update(x, i, y), stats, new), kept

  stats, kept = jax.lax.fori_loop(0, chunks.turns, one, (TokenStats(zeros, zeros, zeros), kept))
  return jax.tree.map(chunks.leave, stats), kept


def slopes_of(policy: Policy, temperature: float, raw: Array, logz: Array, targets: Array) -> Array:
  """Returns the gradients of log-probabilities at raw logits [W, S, V], float32."""
  logits, transpose = jax.vjp(functools.partial(tempered_logits, policy, temperature), raw)
  return transpose(_is_target(logits, targets) - jnp.exp(logits - logz[..., None]))[0]


def _backward(policy: Policy, temperature: float, chunk: int, residuals, cotangents: TokenStats):
  hidden, kernel, targets, scored, kept = residuals
  compute = gathered_kernel(policy, kernel, hidden.dtype)
  ways = row_ways(policy.mesh, hidden.shape[0])
  chunks = _Chunks(ways, chunk, targets, scored)
  hidden, flat, weights = (chunks.enter(x) for x in (hidden, targets, cotangents.logprobs))

  def one(i, carry):
    dkernel, dhidden = carry
    h, w, slopes = (chunks.slice(x, i) for x in (hidden, weights[..., None], kept))
    if policy.remat not in _KEEPING:
      raw = raw_logits(policy, h, compute)
      slopes = slopes_of(policy, temperature, raw, slopes, chunks.slice(flat, i)).astype(h.dtype)
    dh = jnp.einsum("wsv,dv->wsd", slopes, compute, preferred_element_type=jnp.float32)
    weighted = (w * h).astype(h.dtype)
    added = jnp.einsum("wsd,wsv->wdv", weighted, slopes, preferred_element_type=jnp.float32)
    dkernel = constrain(dkernel + added, policy.mesh, ROWS, None, "tensor")
    return dkernel, chunks.update(dhidden, i, (w * dh).astype(h.dtype))

  # One sum per group of rows that a device holds, so that devices exchange gradients once and not for every chunk.
  start = constrain(jnp.zeros((ways, *kernel.shape), jnp.float32), policy.mesh, ROWS, None, "tensor")
  dkernel, dhidden = jax.lax.fori_loop(0, chunks.turns, one, (start, jnp.zeros_like(hidden)))
  # The barrier keeps XLA from folding a transposition of the result (tied tables) into the product, which it then
  # cannot run in bfloat16 on CPUs (jaxlib 0.10).
  dkernel = jax.lax.optimization_barrier(_sum_over_devices(dkernel, policy.mesh).astype(kernel.dtype))
  return chunks.leave(dhidden), dkernel, None, None


token_stats.defvjp(_forward, _backward)


class _Chunks:
  """Chunks of tokens [R, T, ...] as [W, P, ...]: of each of W devices N tokens in order, filled up to whole chunks."""

  def __init__(self, ways: int, size: int, targets: Array, scored: Scored | None):
    self._shape = targets.shape
    self._ways = ways
    self._tokens = targets.size // ways
    self._size = min(size, self._tokens)
    self._scored = scored
    self._back = None if scored is None else jnp.argsort(scored.order, axis=1)
    self.turns = -(-(self._tokens if scored is None else scored.most) // self._size)

  def enter(self, x: Array) -> Array:
    """Brings [R, T, ...] into the order of chunks."""
    x = x.reshape(self._ways, self._tokens, *x.shape[2:])
    if self._scored is not None:
      x = at_places(x, self._scored.order)
    return jnp.pad(x, [(0, 0), (0, -self._tokens % self._size)] + [(0, 0)] * (x.ndim - 2))

  def leave(self, x: Array) -> Array:
    """Brings [W, P, ...] back into [R, T, ...]."""
    x = x[:, : self._tokens]
    if self._back is not None:
      x = at_places(x, self._back)
    return x.reshape(*self._shape, *x.shape[2:])

  def slice(self, x: Array, i: Array) -> Array:
    """Returns chunk i of [W, P, ...]."""
    return jax.lax.dynamic_slice_in_dim(x, i * self._size, self._size, axis=1)

  def update(self, x: Array, i: Array, new: Array) -> Array:
    """Returns [W, P, ...] with another chunk i."""
    return jax.lax.dynamic_update_slice_in_dim(x, new, i * self._size, axis=1)


def at_places(x: Array, places: Array) -> Array:
  """Returns the entries of x [W, P, ...] at places [W, N] of each device or row."""
  return jax.vmap(lambda x, places: x[places])(x, places)


def _sum_over_devices(parts: Array, mesh: Mesh | None) -> Array:
  """Sums float32 [W, D, V], one part per device, into [D, V] split over "fsdp" and "tensor" as the table itself.

  Left to itself, the compiler gives every device the whole sum where the vocabulary is large (over 100,000 tokens).
  """
  fsdp = 1 if mesh is None else dict(mesh.shape).get("fsdp", 1)
  if mesh is None or fsdp == 1 or parts.shape[0] == 1 or parts.shape[1] % fsdp:
    return jnp.sum(parts, axis=0)
  split = fit_sharding(mesh, (ROWS, None, "tensor"), parts.shape).spec
  # XLA for TPUs scatters no sum whose parts fill the lanes of a tile only partly. Those of a tied table would: they lie
  # in memory as [V, D / fsdp], with D / fsdp along the lanes, unless a layout says [D / fsdp, V].
  on_tpu, narrow = mesh.devices.flat[0].platform == "tpu", parts.shape[1] // fsdp % _LANES != 0
  as_rows = on_tpu and narrow and not sums_whole(mesh)

  def exchange(piece: Array, groups: list[list[int]] | None) -> Array:
    own = jax.lax.psum_scatter(piece, "fsdp", scatter_dimension=0, axis_index_groups=groups, tiled=True)
    return with_layout_constraint(own, Layout(major_to_minor=(0, 1))) if as_rows else own

  def scatter(part: Array) -> Array:
    pieces = -(-part.size // _LARGEST_EXCHANGE)
    width = -(-part.shape[-1] // (_LANES * pieces)) * _LANES  # whole tiles, which are sliced without a copy
    bounds = list(range(width, part.shape[-1], width))
    columns = jnp.split(part.reshape(part.shape[-2:]), bounds, axis=1)
    for groups in scatter_groups(mesh):
      columns = [exchange(piece, groups) for piece in columns]
    own = jnp.concatenate(columns, axis=1)
    return jax.lax.psum(own, "data") if "data" in mesh.axis_names else own

  table = PartitionSpec("fsdp", split[2])
  run = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

  @jax.custom_batching.custom_vmap
  def total(parts: Array) -> Array:
    return run(scatter, in_specs=split, out_specs=table)(parts)

  @total.def_vmap
  def _(size: int, batched: list[bool], parts: Array) -> tuple[Array, bool]:
    # XLA for TPUs scatters along the first axis only. Where the batch is split over an axis of the mesh, such as
    # slices, every device has one entry of it, whose axis is dropped before the exchange.
    axis = mesh.axis_names[0]
    if axis in AXES or mesh.shape[axis] != size:
      return jax.vmap(run(scatter, in_specs=split, out_specs=table))(parts), True
    specs = {"in_specs": PartitionSpec(axis, *split), "out_specs": PartitionSpec(axis, *table)}
    return run(lambda part: scatter(part)[None], **specs)(parts), True

  return total(parts)


def gathered_kernel(policy: Policy, kernel: Array, dtype: jnp.dtype) -> Array:
  """Returns the unembedding [D, V] in a dtype, split over "tensor" alone."""
  return constrain(kernel.astype(dtype), policy.mesh, None, "tensor")


def raw_logits(policy: Policy, hidden: Array, kernel: Array) -> Array:
  """Returns hidden [W, S, D] times kernel [D, V], float32."""
  logits = jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
  return constrain(logits, policy.mesh, ROWS, None, "tensor")


def tempered_logits(policy: Policy, temperature: float, raw: Array) -> Array:
  """Returns raw logits soft-capped and without padding ids, over the temperature."""
  return finish_logits(raw, policy.config) / temperature


def _is_target(logits: Array, targets: Array) -> Array:
  ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  return ids == targets[..., None]


def _at(values: Array, targets: Array) -> Array:
  """Returns values[..., targets] as a masked sum; a gather would collect a vocabulary that is split over devices."""
  return jnp.sum(jnp.where(_is_target(values, targets), values, 0.0), axis=-1)


def row_ways(mesh: Mesh | None, rows: int) -> int:
  """Returns the number of parts into which the mesh splits the rows."""
  ways = row_parts(mesh)
  return ways if rows % ways == 0 else 1
