"""Drawing tokens on GPUs in two kernels: XLA makes some sixteen, of a few microseconds each, of `draw_tokens`.

The first reads the logits once and leaves of each block of 128 tokens its largest logit and its sum of exponentials.
The second draws a block of each row from these, and then one of the block's tokens, with its log-probability.
Letters of shapes: B rows, V tokens of the vocabulary, N blocks of 128 tokens, in whole chunks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models import ROWS
from async_rl.sampling._draw import BLOCK
from async_rl.sampling._sampler_config import SamplerConfig

Array = jax.Array

#: Blocks that a program of the first kernel reads at once, a power of 2.
_CHUNK = 16
_WARPS = 4  # of a program of either kernel
_LOG2_E = float(np.log2(np.e))


def fits_kernels(config: SamplerConfig, mesh: Mesh | None) -> bool:
  """Returns whether the kernels draw as `draw_tokens` does: from all tokens, on devices that have all their logits."""
  whole = mesh is None or mesh.shape.get("tensor", 1) == 1
  return whole and config.temperature > 0 and config.top_k is None and config.top_p is None


def draw_in_kernels(
  logits: Array, uniforms: Array, temperature: float, *, limit: int | None = None, mesh: Mesh | None = None,
  interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
  """Draws from softmax(logits / temperature) what `draw_tokens` draws, up to rounding.

  Args:
    logits: float32 [B, V]; -inf or the lowest float is never drawn.
    uniforms: float32 [B, 2] in [0, 1), the first for the block of 128 tokens and the second for the token in it.
    temperature: of the softmax, above 0.
    limit: the number of tokens, if the last ids are padding; XLA would write the logits once more to mark those.
    mesh: the devices over which the kernels are split by rows, which they must divide.
    interpret: whether to interpret the kernels, for other devices than GPUs.

  Returns:
    tokens int32 [B] and their log-probabilities float32 [B].
  """
  draw = functools.partial(_draw_on_device, temperature, min(limit or logits.shape[1], logits.shape[1]), interpret)
  if mesh is not None:
    rows = PartitionSpec(tuple(axis for axis in ROWS if axis in mesh.axis_names))
    draw = jax.shard_map(draw, mesh=mesh, in_specs=(rows, rows), out_specs=(rows, rows), check_vma=False)
  return draw(logits, uniforms)


def _draw_on_device(
  temperature: float, limit: int, interpret: bool, logits: Array, uniforms: Array
) -> tuple[Array, Array]:
  """Computes `draw_in_kernels` for the rows of one device."""
  highs, sums = _sum_blocks(logits, temperature, limit, interpret)
  batch = logits.shape[0]

  def kernel(highs_ref, sums_ref, uniforms_ref, logits_ref, token_ref, logprob_ref):
    at = jnp.arange(pl.next_power_of_2(highs_ref.shape[0]))
    of_blocks = _load(highs_ref, at, -jnp.inf)
    high = jnp.max(of_blocks)
    block, total = _invert(_load(sums_ref, at, 0.0) * _exp(of_blocks - high, temperature), uniforms_ref[0])
    at = block * BLOCK + jnp.arange(BLOCK)
    place, _ = _invert(_exp(_load_logits(logits_ref, at, limit) - high, temperature), uniforms_ref[1])
    token = jnp.minimum(block * BLOCK + place, limit - 1)  # where all is NaN, any
    token_ref[0] = token
    logprob_ref[0] = (logits_ref[token] - high) / temperature - jnp.log(total)

  one = pl.BlockSpec((1,), lambda row: (row,))
  return pl.pallas_call(
    kernel,
    out_shape=[jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.int32, jnp.float32)],
    in_specs=[pl.BlockSpec((None, x.shape[1]), lambda row: (row, 0)) for x in (highs, sums, uniforms, logits)],
    out_specs=[one, one],
    grid=(batch,),
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
    name="draw_token",
  )(highs, sums, uniforms, logits)


def _sum_blocks(logits: Array, temperature: float, limit: int, interpret: bool) -> tuple[Array, Array]:
  """Returns of each block of 128 tokens the largest logit, and the sum of the weights of its tokens relative to that.

  Args:
    logits: float32 [B, V].
    temperature: of the weights.
    limit: the number of tokens; those behind are taken for -inf.
    interpret: whether to interpret the kernel.

  Returns:
    float32 [B, N] each; -inf and 0 for blocks without a logit above -inf.
  """
  batch, vocabulary = logits.shape
  chunks = pl.cdiv(vocabulary, _CHUNK * BLOCK)

  def kernel(logits_ref, highs_ref, sums_ref):
    first = pl.program_id(0) * (_CHUNK * BLOCK)
    at = first + jnp.arange(_CHUNK)[:, None] * BLOCK + jnp.arange(BLOCK)[None]
    x = _load_logits(logits_ref, at, limit)
    highs = jnp.max(x, axis=1)
    highs_ref[...] = highs
    finite = jnp.where(highs > -jnp.inf, highs, 0.0)  # no difference of it is NaN
    sums_ref[...] = jnp.sum(_exp(x - finite[:, None], temperature), axis=1)

  of_chunk = pl.BlockSpec((None, _CHUNK), lambda chunk, row: (row, chunk))
  return pl.pallas_call(
    kernel,
    out_shape=[jax.ShapeDtypeStruct((batch, chunks * _CHUNK), jnp.float32)] * 2,
    in_specs=[pl.BlockSpec((None, vocabulary), lambda chunk, row: (row, 0))],
    out_specs=[of_chunk, of_chunk],
    grid=(chunks, batch),
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
    name="sum_blocks",
  )(logits)


def _invert(weights: Array, uniform: Array) -> tuple[Array, Array]:
  """Returns the first index at which the running sum of weights [N] exceeds uniform * total, and the total.

  A zero weight is never chosen, whatever the rounding: a parallel running sum need not be monotone in its last bit.
  """
  places = jnp.arange(weights.size)
  running = jnp.cumsum(weights)
  total = jnp.sum(jnp.where(places == weights.size - 1, running, 0.0))
  first = jnp.min(jnp.where((running > uniform * total) & (weights > 0), places, weights.size))
  return jnp.where(first < weights.size, first, jnp.argmax(weights)), total


def _exp(x: Array, temperature: float) -> Array:
  """Returns exp(x / temperature)."""
  return jnp.exp2(x * (_LOG2_E / temperature))


def _load(ref, at: Array, other: float) -> Array:
  """Returns the elements of a row at some places, and `other` for places behind its end."""
  return plgpu.load(ref.at[at], mask=at < ref.shape[0], other=other)


def _load_logits(ref, at: Array, limit: int) -> Array:
  """Returns the logits of tokens, -inf from `limit` on."""
  x = _load(ref, at, -jnp.inf)  # that it may read behind the limit lets it read four at once
  return x if limit == ref.shape[0] else jnp.where(at < limit, x, -jnp.inf)
