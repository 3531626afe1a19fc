"""The programs of the slot engine as pure functions: prefill, copy into slots, resize, and a chunk of decode steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl.models import Cache
from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import SharedPrompts
from async_rl.sampling._draw import draw_tokens
from async_rl.sampling._draw import sample_key
from async_rl.sampling._draw import token_uniforms
from async_rl.sampling._sampler_config import SamplerConfig
from async_rl.types import NO_VERSION

Array = jax.Array
#: Keys and values of one layer, each [B, N, S, d], or both in one array.
KeyValues = tuple[Array, ...]


class Slots(NamedTuple):
  """The state of each slot, which the host rebuilds before every decode chunk.

  Attributes:
    token: int32 [B], the last token of the sequence, not yet in the cache.
    position: int32 [B], the position of `token`; everything before it is in the cache.
    drawn: int32 [B], the number of completion tokens so far, which is also the index of the next one.
    ticket: uint32 [B], the ticket of the slot's group.
    sample: uint32 [B], the index of the slot's sample in its group.
    live: bool [B], whether the slot draws.
  """

  token: Any
  position: Any
  drawn: Any
  ticket: Any
  sample: Any
  live: Any


def no_slots(count: int, pad_id: int) -> Slots:
  """Returns numpy arrays in which no slot is live."""
  return Slots(
    token=np.full(count, pad_id, np.int32),
    position=np.zeros(count, np.int32),
    drawn=np.zeros(count, np.int32),
    ticket=np.zeros(count, np.uint32),
    sample=np.zeros(count, np.uint32),
    live=np.zeros(count, np.bool_),
  )


class Drawn(NamedTuple):
  """The tokens that a decode chunk drew. A row's tokens are its first `counts` columns.

  Attributes:
    tokens: int32 [B, chunk].
    logprobs: float32 [B, chunk].
    versions: int32 [B, chunk].
    counts: int32 [B], the number of tokens that each slot drew.
    steps: int32 [], the number of decode steps taken.
  """

  tokens: Any
  logprobs: Any
  versions: Any
  counts: Any
  steps: Any


class _Carry(NamedTuple):
  cache: Cache
  slots: Slots
  drawn: Drawn


def prefill(policy: Policy, params: Params, tokens: Array) -> Cache:
  """Returns the keys and values of R prefixes, tokens int32 [R, T]; each array [R, N, T, d].

  Prefixes are padded at the end, where causal attention hides the padding. Its keys and values lie behind the slot's
  position, and decode overwrites each of them before it attends to that position.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  return policy.prefill(params, tokens, jnp.ones_like(tokens), positions)[1]


def put(
  prefixes: NamedSharding, cache: Cache, new: Cache, rows: Array, slots: Array, starts: Array | None = None
) -> Cache:
  """Copies prefixes into slots, in all layers: a program for each would take the host longer than the devices.

  Args:
    prefixes: the layout in which every device has all rows of `new`. It is asked for before the rows are repeated for
      the K slots of a group, so that devices exchange each prefix once; the compiler would sum the repeated rows.
    cache: the cache, each array [B, N, S, d]; donated.
    new: the keys and values of the prefixes, each [R, N, T, d]; what is beyond S is left out.
    rows: int32 [M], the prefix that goes into each slot.
    slots: int32 [M], the distinct slots to fill; those beyond B are dropped.
    starts: int32 [M], the position from which on a prefix is copied; `None` for 0. What is missing behind its end is
      filled with its last position, which is as good as padding.
  """
  layers = zip(cache, new, strict=True)
  return tuple(_put_in_layer(prefixes, old, more, rows, slots, starts) for old, more in layers)


@functools.partial(jax.jit, static_argnums=0)  # traced and lowered for one layer, and not for each
def _put_in_layer(
  prefixes: NamedSharding, cache: KeyValues, new: KeyValues, rows: Array, slots: Array, starts: Array | None
) -> KeyValues:
  """Computes `put` for one layer."""

  def one(old: Array, new: Array) -> Array:
    new = jax.lax.with_sharding_constraint(new, prefixes)
    length = min(new.shape[2], old.shape[2])
    if starts is None:
      copied = new[rows, :, :length]
    else:
      kept = jnp.minimum(starts[:, None] + jnp.arange(length)[None], new.shape[2] - 1)
      copied = jnp.take_along_axis(new[rows], kept[:, None, :, None], axis=2)
    return old.at[slots, :, :length].set(copied, mode="drop", unique_indices=True)

  return jax.tree.map(one, cache, new)


def resize(heads: NamedSharding, cache: KeyValues, rows: Array, length: int) -> KeyValues:
  """Returns one layer's cache with other rows and another length.

  Args:
    heads: the sharding of the cache.
    cache: the layer's cache, each array [B, N, S, d].
    rows: int32 [M], the row of the cache that each new row holds, counted from the first row of its device; those
      beyond the device's last row make empty ones.
    length: the new number of positions, for which the cache is cut or padded.
  """

  def one(x: Array, rows: Array) -> Array:
    x = x[:, :, :length].at[rows].get(mode="fill", fill_value=0)
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)))

  specs = (heads.spec, PartitionSpec(heads.spec[0]))
  split = jax.shard_map(one, mesh=heads.mesh, in_specs=specs, out_specs=heads.spec, check_vma=False)
  return jax.tree.map(lambda x: split(x, rows), cache)


def decode_chunk(
  policy: Policy,
  config: SamplerConfig,
  stop_ids: tuple[int, ...],
  params: Params,
  cache: Cache,
  slots: Slots,
  version: Array,
  prompts: SharedPrompts | None = None,
) -> tuple[Cache, Drawn]:
  """Runs up to `config.chunk` decode steps of every live slot; stops early when none is left.

  A slot that finishes is frozen: it draws nothing, and writes at most the same position of its own cache.

  Args:
    policy: the architecture.
    config: the chunk, max_new_tokens and the sampling distribution.
    stop_ids: the tokens that end a sample.
    params: the policy's parameters.
    cache: the cache of L layers, each array [B, N, S, d], S > every position reached in this chunk; donated.
    slots: the state of each slot.
    version: int32 [], the version of `params`, written beside every token drawn.
    prompts: the prompts that slots share; the cache then holds what follows them.
  """
  batch = slots.token.shape[0]
  keys = jax.vmap(functools.partial(sample_key, config.seed))(slots.ticket, slots.sample)

  def step(carry: _Carry) -> _Carry:
    cache, slots, drawn = carry
    hidden, cache = policy.decode(params, slots.token, slots.position, cache, prompts, slots.live)
    tokens, logprobs = _draw_next(policy, config, params, hidden, jax.vmap(token_uniforms)(keys, slots.drawn))
    tokens = jnp.where(slots.live, tokens, slots.token)
    count = slots.live.astype(jnp.int32)
    drawn = Drawn(
      drawn.tokens.at[:, drawn.steps].set(tokens),
      drawn.logprobs.at[:, drawn.steps].set(logprobs),
      drawn.versions.at[:, drawn.steps].set(jnp.where(slots.live, version, NO_VERSION)),
      drawn.counts + count,
      drawn.steps + 1,
    )
    total = slots.drawn + count
    stopped = (tokens[:, None] == np.array(stop_ids, np.int32)[None, :]).any(1)
    ended = stopped | (total >= config.max_new_tokens)
    slots = slots._replace(token=tokens, position=slots.position + count, drawn=total, live=slots.live & ~ended)
    return _Carry(cache, slots, drawn)

  def more(carry: _Carry) -> Array:
    return (carry.drawn.steps < config.chunk) & jnp.any(carry.slots.live)

  nothing = Drawn(
    jnp.zeros((batch, config.chunk), jnp.int32),
    jnp.zeros((batch, config.chunk), jnp.float32),
    jnp.full((batch, config.chunk), NO_VERSION, jnp.int32),
    jnp.zeros((batch,), jnp.int32),
    jnp.zeros((), jnp.int32),
  )
  cache, _, drawn = jax.lax.while_loop(more, step, _Carry(cache, slots, nothing))
  return cache, drawn


def _draw_next(
  policy: Policy, config: SamplerConfig, params: Params, hidden: Array, uniforms: Array
) -> tuple[Array, Array]:
  """Computes `draw_tokens` of hidden states [B, D]; by kernels if decode steps run one and these draw the same."""
  if policy.cache_backend == "triton":
    from async_rl.sampling import _fused_draw  # takes a third of a second to import

    if _fused_draw.fits_kernels(config, policy.mesh):
      unlimited = dataclasses.replace(policy, config=dataclasses.replace(policy.config, vocab_limit=None))
      device = jax.devices()[0] if policy.mesh is None else policy.mesh.devices.flat[0]
      return _fused_draw.draw_in_kernels(
        unlimited.logits(params, hidden), uniforms, config.temperature,
        limit=policy.config.vocab_limit,
        mesh=policy.mesh,
        interpret=device.platform == "cpu",
      )  # fmt: skip
  return draw_tokens(policy.logits(params, hidden), uniforms, config)
