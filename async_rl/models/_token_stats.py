"""Log-probabilities of given tokens without ever forming [tokens, vocabulary]."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from async_rl.models._policy import Params
from async_rl.models._policy import Policy
from async_rl.models._policy import finish_logits
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import constrain
from async_rl.models._sharding import fit_sharding
from async_rl.models._sharding import row_parts

Array = jax.Array

#: Elements that devices exchange at a time. XLA turns larger scatters (over 2**27 for TPUs) into sums of the whole.
_LARGEST_EXCHANGE = 2**25


class TokenStats(NamedTuple):
  """Holds per-token quantities of the policy's next-token distribution p, each float32 [R, T].

  Attributes:
    logprobs: log p(token); differentiable.
    entropy: -sum p log p; no gradient.
    sum_squares: sum p^2; no gradient. |e_a - p|^2 = 1 - 2 p(a) + sum p^2 is the squared gradient at the logits.
  """

  logprobs: Array
  entropy: Array
  sum_squares: Array


def score(
  policy: Policy,
  params: Params,
  tokens: Array,
  segments: Array,
  positions: Array,
  *,
  temperature: float = 1.0,
  chunk: int = 512,
) -> TokenStats:
  """Returns the statistics of every token given those before it in its segment.

  Entry [r, t] belongs to token t itself. The first token of a segment has no prediction: its entry is meaningless and
  must be masked.

  Args:
    policy: the architecture.
    params: its parameters.
    tokens: int32 [R, T], the token ids.
    segments: int32 [R, T], the segment of each token, 0 on padding.
    positions: int32 [R, T], the position of each token in its segment.
    temperature: the temperature of the softmax, the sampler's.
    chunk: the number of positions of a row whose logits are formed at a time.
  """
  hidden = policy.hidden(params, tokens, segments, positions)
  hidden = jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
  return token_stats(policy, float(temperature), chunk, hidden, policy.unembedding(params), tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def token_stats(
  policy: Policy, temperature: float, chunk: int, hidden: Array, kernel: Array, targets: Array
) -> TokenStats:
  """Returns the statistics of `targets` under softmax(logits(hidden @ kernel) / temperature).

  The backward pass recomputes each chunk of logits instead of storing it.

  Args:
    policy: the architecture, for its soft-cap, vocabulary limit and mesh.
    temperature: the temperature of the softmax.
    chunk: the number of positions at a time; the last chunk may be shorter.
    hidden: [R, T, D], the hidden states that predict the targets.
    kernel: [D, V], the unembedding, multiplied in hidden's dtype; its gradient has its own dtype.
    targets: int32 [R, T], the tokens to score.
  """
  compute = _gathered(policy, kernel, hidden.dtype)

  def one(_, inputs):
    h, t = inputs
    logits = _finish(policy, temperature, _project(policy, h, compute))
    logz = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logp = logits - logz
    probs = jnp.exp(logp)
    return None, TokenStats(_at(logp, t), -jnp.sum(probs * logp, axis=-1), jnp.sum(jnp.square(probs), axis=-1))

  _, stats = jax.lax.scan(one, None, _split((hidden, targets), chunk))
  return TokenStats(*(_join(x, hidden.shape[1]) for x in stats))


def _forward(policy, temperature, chunk, hidden, kernel, targets):
  return token_stats(policy, temperature, chunk, hidden, kernel, targets), (hidden, kernel, targets)


def _backward(policy: Policy, temperature: float, chunk: int, residuals, cotangents: TokenStats):
  hidden, kernel, targets = residuals
  compute = _gathered(policy, kernel, hidden.dtype)
  ways = _row_ways(policy.mesh, hidden.shape[0])

  def one(dkernel, inputs):
    h, t, g = inputs

    def picked(raw):
      logits = _finish(policy, temperature, raw)
      return _at(logits, t) - jax.nn.logsumexp(logits, axis=-1)

    (draw,) = jax.vjp(picked, _project(policy, h, compute))[1](g)
    draw = draw.astype(h.dtype)

    def by_device(x):
      return x.reshape(ways, -1, *x.shape[1:])

    added = jnp.einsum("wrtd,wrtv->wdv", by_device(h), by_device(draw), preferred_element_type=jnp.float32)
    return constrain(dkernel + added, policy.mesh, ROWS, None, "tensor"), jnp.dot(draw, compute.T)

  # One sum per group of rows that a device holds, so that devices exchange gradients once and not for every chunk.
  start = constrain(jnp.zeros((ways, *kernel.shape), jnp.float32), policy.mesh, ROWS, None, "tensor")
  dkernel, dhidden = jax.lax.scan(one, start, _split((hidden, targets, cotangents.logprobs), chunk))
  # The barrier keeps XLA from folding a transposition of the result (tied tables) into the product, which it then
  # cannot run in bfloat16 on CPUs (jaxlib 0.10).
  dkernel = jax.lax.optimization_barrier(_sum_over_devices(dkernel, policy.mesh).astype(kernel.dtype))
  return _join(dhidden, hidden.shape[1]), dkernel, None


token_stats.defvjp(_forward, _backward)


def _sum_over_devices(parts: Array, mesh: Mesh | None) -> Array:
  """Sums float32 [W, D, V], one part per device, into [D, V] split over "fsdp" and "tensor" as the table itself.

  Left to itself, the compiler gives every device the whole sum where the vocabulary is large (over 100,000 tokens).
  """
  fsdp = 1 if mesh is None else dict(mesh.shape).get("fsdp", 1)
  if mesh is None or fsdp == 1 or parts.shape[0] == 1 or parts.shape[1] % fsdp:
    return jnp.sum(parts, axis=0)
  split = fit_sharding(mesh, (ROWS, None, "tensor"), parts.shape).spec

  def scatter(part: Array) -> Array:
    pieces = -(-part.size // _LARGEST_EXCHANGE)
    width = -(-part.shape[2] // (128 * pieces)) * 128  # whole tiles, which are sliced without a copy
    bounds = list(range(width, part.shape[2], width))
    columns = [
      jax.lax.psum_scatter(piece, "fsdp", scatter_dimension=0, tiled=True)
      for piece in jnp.split(part[0], bounds, axis=1)
    ]
    own = jnp.concatenate(columns, axis=1)
    return jax.lax.psum(own, "data") if "data" in mesh.axis_names else own

  table = PartitionSpec("fsdp", split[2])
  return jax.shard_map(scatter, mesh=mesh, in_specs=split, out_specs=table, check_vma=False)(parts)


def _gathered(policy: Policy, kernel: Array, dtype: jnp.dtype) -> Array:
  return constrain(kernel.astype(dtype), policy.mesh, None, "tensor")


def _project(policy: Policy, hidden: Array, kernel: Array) -> Array:
  logits = jnp.dot(hidden, kernel, preferred_element_type=jnp.float32)
  return constrain(logits, policy.mesh, ROWS, None, "tensor")


def _finish(policy: Policy, temperature: float, logits: Array) -> Array:
  return finish_logits(logits, policy.config) / temperature


def _at(values: Array, targets: Array) -> Array:
  """Returns values[..., targets] as a masked sum; a gather would collect a vocabulary that is split over devices."""
  ids = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
  return jnp.sum(jnp.where(ids == targets[..., None], values, 0.0), axis=-1)


def _row_ways(mesh: Mesh | None, rows: int) -> int:
  """Returns the number of parts into which the mesh splits the rows."""
  ways = row_parts(mesh)
  return ways if rows % ways == 0 else 1


def _split(arrays: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
  """Splits [R, T, ...] into [T / chunk, R, chunk, ...], zero-padded.

  Rows stay the leading axis of a chunk, so that their sharding survives.
  """

  chunk = min(chunk, arrays[0].shape[1])

  def split(x):
    count = -(-x.shape[1] // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, chunk, *x.shape[2:]).swapaxes(0, 1)

  return tuple(split(x) for x in arrays)


def _join(x: Array, length: int) -> Array:
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
