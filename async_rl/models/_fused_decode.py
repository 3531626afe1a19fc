"""What a layer does in a decode step on GPUs between its first products and its output projection, in one kernel.

The kernel norms and rotates queries and keys, stores the new keys and values into the cache, and attends to what the
cache holds. XLA makes five kernels of all but the last, of some three microseconds each, however few rows there are;
cuDNN's attention spends a fifth of a microsecond on each row and layer that has nothing to say. Where rows share
prompts, a kernel before it attends to these, each read once for up to 64 queries of its rows.
Letters of shapes: B rows, H query heads, N key/value heads, Q = H / N, S cached positions, d head width; G prompts of P
positions with up to K rows each.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._layers import Rotation
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import fit_sharding
from async_rl.models._shared_attention import SharedPrompts

Array = jax.Array

#: Positions that a program of a kernel reads at once.
_BLOCK = 32
#: Programs below which a row's or a prompt's positions are split among several, and the positions that each then has at
#: least. More of rows, since of few rows even fewer live, and the others' programs end at once.
_ROW_PROGRAMS = 512
_PROMPT_PROGRAMS = 256
_SPLIT = 128
#: The most parts of a row: the decode kernel puts those of a prompt together one by one.
_PARTS = 16
#: Queries of a prompt that a program takes at most, if it is several samples.
_QUERIES = 64
_LOW = -1e30  # finite, so that no difference of two is NaN
_LOG2_E = float(np.log2(np.e))


class _Token(NamedTuple):
  """What a row's new token brings, before norms and rotation.

  Attributes:
    heads: queries, keys and values, [B, H + 2 N, d].
    cos: float32 [B, d / 2].
    sin: float32 [B, d / 2].
    scales: the factors of the norms of queries and of keys, float32 [d] each, or nothing.
    eps: of the norms.
  """

  heads: Array
  cos: Array
  sin: Array
  scales: list[Array]
  eps: float

  @property
  def arrays(self) -> list[Array]:
    return [self.heads, self.cos, self.sin, *self.scales]


def rotate_store_and_attend(
  q: Array, k: Array, v: Array, kv: tuple[Array, Array], entries: Array, rotation: Rotation, *, scale: float,
  prompts: SharedPrompts | None = None, mesh: Mesh | None = None, interpret: bool = False,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  """Norms and rotates the queries and keys of one new token per row, puts it into the cache, and attends to all so far.

  Of the cache, the entries up to a row's own are read and no others. Between norm and rotation values are float32, as
  in `FusedNorms`, and so are logits and sums; the weights of the softmax are rounded to the values' dtype before they
  meet the values.

  Args:
    q: [B, H, d], d a power of 2 from 32 to 256.
    k: [B, N, d].
    v: [B, N, d].
    kv: keys and values of one layer, each [B, N, S, d]; the kernel writes into them where they lie. It takes them as
      [B, S, N, d], as cuDNN's attention does.
    entries: int32 [B], the entry of the cache that each row's token gets, < S; below 0 for rows that nothing is
      computed for.
    rotation: the norms and the angles [B, d / 2].
    scale: the scale of the logits.
    prompts: the prompts of this layer, if rows share any, which come before the entries; every row that something is
      computed for has one.
    mesh: the devices over which the kernel is split by rows and heads.
    interpret: whether to interpret the kernel, for other devices than GPUs.

  Returns:
    The softmax-weighted values [B, H, d] in q's dtype, 0 in rows that nothing is computed for, and the keys and values
    with the token.
  """
  norms = [norm for norm in (rotation.q_norm, rotation.k_norm) if norm is not None]
  call = functools.partial(_attend_on_device, scale, norms[0].eps if norms else 0.0, interpret)
  rows = (q, k, v, *kv, entries, jnp.cos(rotation.angles), jnp.sin(rotation.angles))
  scales = [norm.factors for norm in norms]
  if mesh is not None:
    heads = fit_sharding(mesh, (ROWS, "tensor"), (q.shape[0], k.shape[1])).spec
    row = PartitionSpec(heads[0])
    shared = None if prompts is None else SharedPrompts((heads,) * 2, *[row] * 4)
    specs = (*[heads] * 5, *[row] * 3, [PartitionSpec()] * len(scales), shared)
    call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(heads, (heads,) * 2), check_vma=False)
  return call(*rows, scales, prompts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced and lowered for one layer, and not for each
def _attend_on_device(
  scale: float, eps: float, interpret: bool, q: Array, k: Array, v: Array, keys: Array, values: Array, entries: Array,
  cos: Array, sin: Array, scales: list[Array], prompts: SharedPrompts | None,
) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
  """Computes `rotate_store_and_attend` for the rows, heads and prompts of one device."""
  batch, heads, width = q.shape
  groups, length = k.shape[1], keys.shape[2]
  # One array, as the product that XLA makes of the three projections returns it.
  new = jnp.concatenate([x.reshape(batch, -1) for x in (q, k, v)], axis=1).reshape(batch, -1, width)
  token = _Token(new, cos, sin, scales, eps)
  parts = [] if prompts is None else _attend_to_prompts(token, prompts, heads // groups, scale, interpret)
  splits = _count_splits(_ROW_PROGRAMS, batch * groups, length)
  counts = len(token.arrays), len(parts), 2  # of references: to the token, to what prompts give, to the cache

  def kernel(entry_ref, *refs):
    rest = iter(refs)
    of_token, of_prompt, (old_key_ref, old_value_ref) = (list(itertools.islice(rest, count)) for count in counts)
    out_ref, key_ref, value_ref, *sum_refs = rest
    group, split, entry = pl.program_id(0), pl.program_id(2), entry_ref[0]
    # As many as a product on tensor cores has at least; those beyond the last are the last once more.
    members = jnp.minimum(jnp.arange(_tile(heads // groups)), heads // groups - 1) + group * (heads // groups)

    def put(values: Array, sums: Array) -> None:
      out_ref[0, 0, members, :] = values.astype(out_ref.dtype)
      for sum_ref in sum_refs:
        sum_ref[0, 0, members] = sums

    nothing = jnp.zeros((members.size, width), jnp.float32), jnp.full(members.size, _LOW, jnp.float32)
    pl.when(entry < 0)(lambda: put(*nothing))

    @pl.when(entry >= 0)
    def _():
      queries = _read(of_token, jnp.zeros_like(members), members, eps)
      key = _read(of_token, 0, heads + group, eps, norm=1).astype(key_ref.dtype)
      value = of_token[0][0, heads + groups + group, :].astype(value_ref.dtype)

      @pl.when(split == 0)
      def _():
        key_ref[entry, :] = key
        value_ref[entry, :] = value

      logits = jnp.sum(queries.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=1) * (scale * _LOG2_E)
      found = [(jnp.broadcast_to(value.astype(jnp.float32)[None], nothing[0].shape), logits)]
      for part in range(parts[0].shape[0] if parts else 0):
        found.append((of_prompt[0][part, 0, members, :], of_prompt[1][part, 0, members]))
      state = _State.of(found).times((split == 0).astype(jnp.float32))
      put(*_attend(queries, old_key_ref, old_value_ref, *_part(entry, split, splits), state, scale))

  def of_row(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda group, row, split: (row, *[0] * len(shape)))

  def of_part(count: int, *shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((count, 1, *shape), lambda group, row, split: (0, row, *[0] * len(shape)))

  def of_split(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, *shape), lambda group, row, split: (split, row, *[0] * len(shape)))

  cache = pl.BlockSpec((None, length, None, width), lambda group, row, split: (row, 0, group, 0))
  factors = pl.BlockSpec((width,), lambda group, row, split: (0,))
  by_position = [x.swapaxes(1, 2) for x in (keys, values)]
  several, given = splits > 1, 1 + len(token.arrays) + len(parts)
  results = [jax.ShapeDtypeStruct((splits, *q.shape), jnp.float32 if several else q.dtype)]
  results += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in by_position]
  results += [jax.ShapeDtypeStruct((splits, batch, heads), jnp.float32)] * several
  out, keys, values, *sums = pl.pallas_call(
    kernel,
    out_shape=results,
    in_specs=[
      *(of_row(), of_row(*new.shape[1:]), of_row(width // 2), of_row(width // 2)),
      *([factors] * len(scales) + [of_part(x.shape[0], *x.shape[2:]) for x in parts] + [cache, cache]),
    ],
    out_specs=[of_split(heads, width), cache, cache, *[of_split(heads)] * several],
    grid=(groups, batch, splits),  # heads first: in memory those of a position lie side by side
    input_output_aliases={given: 1, given + 1: 2},
    interpret=interpret,
    compiler_params=_compiler_params(_tile(heads // groups), width),
    name="rotate_store_and_attend",
  )(entries, *token.arrays, *parts, *by_position)
  if several:
    weights = jnp.exp2(sums[0] - jnp.max(sums[0], axis=0, keepdims=True))
    weights /= jnp.sum(weights, axis=0, keepdims=True)
    out = jnp.sum(weights[..., None] * out, axis=0, keepdims=True).astype(q.dtype)
  return out[0], (keys.swapaxes(1, 2), values.swapaxes(1, 2))


def _attend_to_prompts(
  token: _Token, prompts: SharedPrompts, queries: int, scale: float, interpret: bool
) -> list[Array]:
  """Attends from the queries of rows to the prompts that they share.

  Args:
    token: the new tokens.
    prompts: the prompts of one layer, lengths [G] and rows [G, K].
    queries: Q.
    scale: the scale of the logits.
    interpret: whether to interpret the kernel.

  Returns:
    For parts of the prompts, the softmax-weighted values, float32 [parts, B + 1, H, d], and the log-sum-exps to base 2,
    float32 [parts, B + 1, H]; anything for rows without a prompt, and for the row behind the last.
  """
  keys, values = (x.swapaxes(1, 2) for x in prompts.layers)
  count, length, groups, width = keys.shape
  batch, samples = token.heads.shape[0], prompts.rows.shape[1]
  taken = min(samples, max(1, _QUERIES // queries))  # samples of a program
  chunks = pl.cdiv(samples, taken)
  tile = _tile(taken * queries)
  splits = _count_splits(_PROMPT_PROGRAMS, count * chunks * groups, length)

  def kernel(lengths_ref, rows_ref, *refs):
    of_token, (key_ref, value_ref, out_ref, sum_ref) = refs[:-4], refs[-4:]
    group, prompt, split = pl.program_id(0), pl.program_id(1) // chunks, pl.program_id(2)
    places = jnp.arange(tile)
    sample = pl.program_id(1) % chunks * taken + jnp.minimum(places // queries, taken - 1)
    row = jnp.where(
      (places < taken * queries) & (sample < samples), rows_ref[prompt, jnp.minimum(sample, samples - 1)], batch
    )
    head = group * queries + places % queries
    query = _read(of_token, jnp.minimum(row, batch - 1), head, token.eps)
    zeros = jnp.zeros(tile, jnp.float32), jnp.zeros((tile, width), jnp.float32)
    nothing = _State(jnp.full(tile, _LOW, jnp.float32), *zeros)
    out, sums = _attend(query, key_ref, value_ref, *_part(lengths_ref[prompt], split, splits), nothing, scale)
    row = jnp.minimum(row, batch)
    out_ref[0, row, head, :] = out
    sum_ref[0, row, head] = sums

  def whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda group, chunk, split: (0,) * x.ndim)

  def of_split(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, *shape), lambda group, chunk, split: (split, *[0] * len(shape)))

  cache = pl.BlockSpec((None, length, None, width), lambda group, chunk, split: (chunk // chunks, 0, group, 0))
  out, sums = (batch + 1, groups * queries, width), (batch + 1, groups * queries)
  given = [prompts.lengths, prompts.rows, *token.arrays]
  return pl.pallas_call(
    kernel,
    out_shape=[jax.ShapeDtypeStruct((splits, *shape), jnp.float32) for shape in (out, sums)],
    in_specs=[*map(whole, given), cache, cache],
    out_specs=[of_split(*out), of_split(*sums)],
    grid=(groups, count * chunks, splits),
    interpret=interpret,
    compiler_params=_compiler_params(tile, width),
    name="attend_to_prompts",
  )(*given, keys, values)


class _State(NamedTuple):
  """A softmax over some positions, for R queries.

  Attributes:
    high: float32 [R], the largest logit, or one that is not much below it; to base 2.
    total: float32 [R], the sum of the exponentials of logits minus `high`.
    values: float32 [R, d], the sum of the values with these as weights.
  """

  high: Array
  total: Array
  values: Array

  @classmethod
  def of(cls, parts: list[tuple[Array, Array]]) -> _State:
    """Returns the state after parts, each with weighted values [R, d] and log-sum-exps [R]."""
    high = functools.reduce(jnp.maximum, [sums for _, sums in parts])
    weights = [jnp.exp2(sums - high) for _, sums in parts]
    values = [w[:, None] * values for w, (values, _) in zip(weights, parts, strict=True)]
    return cls(high, functools.reduce(jnp.add, weights), functools.reduce(jnp.add, values))

  def times(self, factor: Array) -> _State:
    """Returns this state for a factor of 1, the state before any position for 0."""
    high = self.high * factor + _LOW * (1 - factor)
    return _State(high, self.total * factor, self.values * factor)


def _attend(
  queries: Array, key_ref: Any, value_ref: Any, start: Array, end: Array, state: _State, scale: float
) -> tuple[Array, Array]:
  """Attends from queries [R, d] to the entries of a head from `start` to `end`, after those that `state` has seen.

  Returns:
    The softmax-weighted values, float32 [R, d], and the log-sum-exps to base 2, float32 [R].
  """

  def attend_to_block(i: Array, state: _State) -> _State:
    at = start + i * _BLOCK + jnp.arange(_BLOCK)
    seen, at = at < end, jnp.minimum(at, end - 1)
    logits = plgpu.dot(queries, key_ref[at, :].T) * (scale * _LOG2_E)
    logits = jnp.where(seen[None], logits, _LOW)
    high = jnp.maximum(state.high, jnp.max(logits, axis=1))
    shrink, weights = jnp.exp2(state.high - high), jnp.exp2(logits - high[:, None])
    values = value_ref[at, :]
    more = plgpu.dot(weights.astype(values.dtype), values)
    return _State(high, state.total * shrink + jnp.sum(weights, axis=1), state.values * shrink[:, None] + more)

  high, total, values = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - start, 0), _BLOCK), attend_to_block, state)
  total = jnp.maximum(total, 1e-30)  # where there was no position
  return values / total[:, None], high + jnp.log2(total)


def _read(of_token: Any, row: Array | int, head: Array, eps: float, norm: int = 0) -> Array:
  """Returns heads of a token as they are normed and rotated, [..., d] for rows and heads [...], in their dtype.

  Args:
    of_token: the references to `_Token.arrays`.
    row: the rows.
    head: the heads.
    eps: of the norms.
    norm: which one they get, if there are any: 0 for that of queries, 1 for that of keys.
  """
  head_ref, cos_ref, sin_ref, *scale_refs = of_token
  half = cos_ref.shape[1]
  lanes = jnp.arange(2 * half)
  partners = (lanes + half) % (2 * half)  # the other one of a pair that is rotated

  def at(ref: Any, *index: Any) -> Array:
    if jnp.ndim(head) == 0:
      return ref[index]
    return ref[(*(i[:, None] for i in index[:-1]), index[-1][None])]

  x, other = (at(head_ref, row, head, lanes).astype(jnp.float32) for lanes in (lanes, partners))
  if scale_refs:
    inverse = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / (2 * half) + eps)
    x, other = (y * inverse * at(scale_refs[norm], lanes) for y, lanes in ((x, lanes), (other, partners)))
  sign = jnp.where(lanes < half, -1.0, 1.0)
  sign = sign if jnp.ndim(head) == 0 else sign[None]
  rotated = x * at(cos_ref, row, lanes % half) + other * at(sin_ref, row, lanes % half) * sign
  return rotated.astype(head_ref.dtype)


def _tile(queries: int) -> int:
  """Returns the rows of a product that takes so many queries: a power of 2, of which tensor cores want 16."""
  return max(16, pl.next_power_of_2(queries))


def _count_splits(enough: int, programs: int, length: int) -> int:
  """Returns among how many programs the positions of a row are split, of `enough` in all: a power of 2."""
  wanted = min(enough // programs, length // _SPLIT, _PARTS)
  return 2 ** (max(wanted, 1).bit_length() - 1)


def _part(count: Array, split: Array, splits: int) -> tuple[Array, Array]:
  """Returns the first position of one of several parts of so many positions, and the first behind it."""
  size = pl.cdiv(pl.cdiv(count, splits), _BLOCK) * _BLOCK
  return split * size, jnp.minimum(count, (split + 1) * size)


def _compiler_params(tile: int, width: int) -> plgpu.CompilerParams:
  stages = min(4, 512 // width)  # blocks on their way, of keys and values: 64 KiB of shared memory
  return plgpu.CompilerParams(num_warps=min(8, max(1, tile * width // 2048)), num_stages=stages)
