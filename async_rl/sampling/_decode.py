"""The programs of the slot engine as pure functions: prefill, copy into slots, resize, and a chunk of decode steps."""

from __future__ import annotations

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from async_rl.models import Cache
from async_rl.models import Params
from async_rl.models import Policy
from async_rl.sampling._config import SamplerConfig
from async_rl.sampling._sample import sample
from async_rl.types import NO_VERSION

Array = jax.Array
#: Keys and values of one layer, each [B, N, S, d].
KeyValues = tuple[Array, Array]


class Slots(NamedTuple):
  """What a decode chunk needs to know of each slot; the host makes it anew for every chunk.

  Attributes:
    token: int32 [B], the last token of the sequence, not yet in the cache.
    position: int32 [B], where it goes; everything before it is in the cache.
    drawn: int32 [B], completion tokens so far, which is also the index of the next one.
    ticket: uint32 [B].
    sample: uint32 [B].
    live: bool [B], whether the slot draws.
  """

  token: Any
  position: Any
  drawn: Any
  ticket: Any
  sample: Any
  live: Any


def no_slots(count: int, pad_id: int) -> Slots:
  """Numpy arrays in which no slot is live."""
  return Slots(
    token=np.full(count, pad_id, np.int32),
    position=np.zeros(count, np.int32),
    drawn=np.zeros(count, np.int32),
    ticket=np.zeros(count, np.uint32),
    sample=np.zeros(count, np.uint32),
    live=np.zeros(count, np.bool_),
  )


class Drawn(NamedTuple):
  """What a decode chunk drew. A row's tokens are its first `counts` columns.

  Attributes:
    tokens: int32 [B, chunk].
    logprobs: float32 [B, chunk].
    versions: int32 [B, chunk].
    counts: int32 [B].
    steps: int32 [], decode steps taken.
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
  """Keys and values of R prefixes, tokens int32 [R, T]; each array [R, N, T, d].

  Prefixes are padded at the end, where causal attention keeps the padding out of sight. What it leaves in the cache
  lies behind the slot's position, and decode overwrites it before it looks there.
  """
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  return policy.prefill(params, tokens, jnp.ones_like(tokens), positions)[1]


def put(cache: KeyValues, new: KeyValues, rows: Array, slots: Array) -> KeyValues:
  """Copies prefixes into slots, in one layer.

  Args:
    cache: each [B, N, S, d]; donated.
    new: each [R, N, T, d], T <= S.
    rows: int32 [M], which prefix,
    slots: int32 [M], goes into which slot; distinct. Slots beyond B are dropped.
  """

  def one(old, new):
    return old.at[slots, :, : new.shape[2]].set(new[rows], mode="drop", unique_indices=True)

  return jax.tree.map(one, cache, new)


def resize(cache: KeyValues, length: int) -> KeyValues:
  """One layer's cache, each [B, N, S, d], cut or padded to `length` positions."""
  shape = lambda x: ((0, 0), (0, 0), (0, max(0, length - x.shape[2])), (0, 0))
  return jax.tree.map(lambda x: jnp.pad(x[:, :, :length], shape(x)), cache)


def decode_chunk(
  policy: Policy,
  config: SamplerConfig,
  stop_ids: tuple[int, ...],
  params: Params,
  cache: Cache,
  slots: Slots,
  version: Array,
) -> tuple[Cache, Drawn]:
  """Up to `config.chunk` decode steps of every live slot; stops early when none is left.

  A slot that finishes is frozen: it goes on writing the same position of its own cache, and draws nothing.

  Args:
    policy: the architecture.
    config: chunk, max_new_tokens and the sampling distribution.
    stop_ids: tokens that end a sample.
    params: the policy's parameters.
    cache: of L layers, each [B, N, S, d], S > every position reached in this chunk; donated.
    slots: where each slot stands.
    version: int32 [], of `params`; written beside every token drawn.
  """
  batch = slots.token.shape[0]
  root = jax.random.key(config.seed, impl="threefry2x32")
  key_of_row = lambda ticket, index: jax.random.fold_in(jax.random.fold_in(root, ticket), index)
  keys = jax.vmap(key_of_row)(slots.ticket, slots.sample)
  uniforms_of_row = lambda key, index: jax.random.uniform(jax.random.fold_in(key, index), (2,))

  def step(carry: _Carry) -> _Carry:
    cache, slots, drawn = carry
    hidden, cache = policy.decode(params, slots.token, slots.position, cache)
    logits = policy.logits(params, hidden)
    tokens, logprobs = sample(logits, jax.vmap(uniforms_of_row)(keys, slots.drawn), config)
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
    ended = total >= config.max_new_tokens
    for stop in stop_ids:
      ended |= tokens == stop
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
