"""The norm of every sequence's own score, ∇ log π(τ), of all sequences of packed rows in one backward pass.

Letters of shapes: R rows, T tokens of a row, S sequences of a row, L and C the most tokens and the most scored tokens
of a sequence, D model, V vocabulary, W devices of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl.models._param_forms import Params
from async_rl.models._policy import Policy
from async_rl.models._taps import Pairs
from async_rl.models._taps import Sequences
from async_rl.models._taps import Taps
from async_rl.models._token_stats import finished_logits
from async_rl.models._token_stats import gathered_kernel
from async_rl.models._token_stats import project
from async_rl.models._token_stats import row_ways
from async_rl.models._token_stats import slopes_of

Array = jax.Array


def squared_score_norms(
  policy: Policy,
  params: Params,
  tokens: Array,
  segments: Array,
  positions: Array,
  scored: Array,
  sequences: Sequences,
  *,
  temperature: float = 1.0,
  chunk: int,
) -> Array:
  """Returns ‖∇ log π(τ)‖² over the trained parameters for every sequence τ of packed rows, float32 [R, S].

  Costs a forward pass, the half of a backward pass that leads to activations, and the Gram matrices: for each linear
  map 2 · 1.5 L operations in place of the gradient's 2 · inputs · outputs / (inputs + outputs), by token and width.

  Args:
    policy: the architecture; with `lora`, the adapters alone are trained.
    params: its parameters.
    tokens: int32 [R, T], the token ids.
    segments: int32 [R, T], the sequence of each token from 1 on, 0 on padding.
    positions: int32 [R, T], the position of each token in its sequence.
    scored: bool [R, T], the tokens whose log-probabilities are summed.
    sequences: the bounds of what the rows hold.
    temperature: the temperature of the softmax.
    chunk: the number of a device's tokens whose logits are formed at a time, if no sequence alone has more.
  """
  probe = jnp.zeros((tokens.shape[0], sequences.most), jnp.float32)
  nothing = jnp.zeros((*tokens.shape, policy.config.d_model), policy.dtype)

  def hidden_of(probe: Array, embedded: Array) -> Array:
    return policy.hidden(params, tokens, segments, positions, Taps(sequences, segments, probe, embedded))

  hidden, pull = jax.vjp(hidden_of, probe, nothing)
  hidden = jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
  kernel = policy.unembedding(params)
  head = _Head(policy, temperature, chunk, sequences, tokens, segments, scored)
  found = head(hidden, gathered_kernel(policy, kernel, hidden.dtype))
  norms, at_embedded = pull(jnp.concatenate([found.hidden[:, 1:], jnp.zeros_like(hidden[:, :1])], axis=1))
  if policy.lora is not None:
    return norms
  c = policy.config
  scale = c.d_model**0.5 if c.embed_scale else 1.0
  pairs = Pairs(sequences, segments)
  norms += found.norms + scale**2 * pairs.sums(pairs.equal(tokens), pairs.dots(at_embedded))
  return norms + 2 * scale * head.dots_with(hidden, at_embedded, found.at_tokens) if c.tie_embeddings else norms


class _AtHead(NamedTuple):
  """What the logits' gradients give.

  Attributes:
    hidden: [R, T, D], the gradients at the hidden states.
    norms: float32 [R, S], the squared norms of the gradients at the unembedding.
    at_tokens: [R, T, L], for each scored token the gradients at the logits of its sequence's tokens.
  """

  hidden: Array
  norms: Array
  at_tokens: Array


class _Head:
  """The gradients of log-probabilities at logits, of the same sequence of every row at a time."""

  def __init__(
    self, policy: Policy, temperature: float, chunk: int, sequences: Sequences, tokens: Array, segments: Array,
    scored: Array,
  ):  # fmt: skip
    self._policy, self._temperature, self._sequences = policy, temperature, sequences
    self._at_once = max(1, chunk // sequences.scored)
    self._tokens, self._segments, self._scored = tokens, segments, scored

  def __call__(self, hidden: Array, kernel: Array) -> _AtHead:
    """Maps hidden states [R, T, D] that predict the tokens, and the unembedding [D, V] in their dtype."""
    rows, width = self._tokens.shape
    ways = row_ways(self._policy.mesh, rows)

    def one(h: Array, targets: Array, valid: Array, ids: Array) -> tuple[Array, Array, Array]:
      raw = project(self._policy, h, kernel)
      logz = jax.nn.logsumexp(finished_logits(self._policy, self._temperature, raw), axis=-1)
      slopes = slopes_of(self._policy, self._temperature, raw, logz, targets)
      slopes = jnp.where(valid[..., None], slopes, 0.0).astype(h.dtype)
      multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
      dh = multiply("wcv,dv->wcd", slopes, kernel).astype(h.dtype)
      norms = jnp.sum(multiply("wcv,wev->wce", slopes, slopes) * multiply("wcd,wed->wce", h, h), axis=(1, 2))
      looked_up = jnp.take_along_axis(slopes, jnp.broadcast_to(ids[:, None], (*h.shape[:2], ids.shape[1])), axis=2)
      return dh, norms, looked_up

    def body(s: Array, found: _AtHead) -> _AtHead:
      (places, valid), (all_places, known) = self._windows(s)
      given = (_at(hidden, places), _at(self._tokens, places), valid, _at(self._tokens, all_places))
      by_device = jax.tree.map(lambda x: x.reshape(ways, -1, *x.shape[1:]).swapaxes(0, 1), given)
      new = jax.lax.map(lambda x: one(*x), by_device, batch_size=self._at_once)
      dh, norms, looked_up = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, *x.shape[2:]), new)
      put = functools.partial(_put, places=places, valid=valid)
      return _AtHead(
        put(found.hidden, dh),
        jax.lax.dynamic_update_index_in_dim(found.norms, norms, s, 1),
        put(found.at_tokens, jnp.where(known[:, None], looked_up, 0)),
      )

    start = _AtHead(
      jnp.zeros_like(hidden),
      jnp.zeros((rows, self._sequences.most), jnp.float32),
      jnp.zeros((rows, width, self._sequences.longest), hidden.dtype),
    )
    return jax.lax.fori_loop(0, jnp.max(self._segments), body, start)

  def dots_with(self, hidden: Array, at_table: Array, at_tokens: Array) -> Array:
    """Returns the inner products of a tied table's two gradients, as unembedding and as embedding, float32 [R, S].

    Args:
      hidden: [R, T, D], the hidden states that predict the tokens.
      at_table: [R, T, D], the gradients at the tokens' rows of the table.
      at_tokens: [R, T, L], see `_AtHead`.
    """

    def body(s: Array, sums: Array) -> Array:
      (places, valid), (all_places, _) = self._windows(s)
      dots = jnp.einsum(
        "rcd,rld->rcl", _at(hidden, places), _at(at_table, all_places), preferred_element_type=jnp.float32
      )
      product = jnp.where(valid[..., None], dots * _at(at_tokens, places), 0.0)
      return jax.lax.dynamic_update_index_in_dim(sums, jnp.sum(product, axis=(1, 2)), s, 1)

    zeros = jnp.zeros((hidden.shape[0], self._sequences.most), jnp.float32)
    return jax.lax.fori_loop(0, jnp.max(self._segments), body, zeros)

  def _windows(self, s: Array) -> Iterator[tuple[Array, Array]]:
    """Yields of sequence s of each row the places [R, C] from its first scored token on, [R, L] from its first one on.

    And whether they hold scored tokens, or tokens, of the sequence.
    """
    own = self._segments == s + 1
    for wanted, size in ((own & self._scored, self._sequences.scored), (own, self._sequences.longest)):
      places = jnp.argmax(wanted, axis=1)[:, None] + jnp.arange(size)[None]
      inside = places < wanted.shape[1]
      places = jnp.minimum(places, wanted.shape[1] - 1)
      yield places, inside & _at(wanted, places)


def _at(x: Array, places: Array) -> Array:
  """Returns the entries of x [R, T, ...] at places [R, N] of each row."""
  return jax.vmap(lambda x, places: x[places])(x, places)


def _put(x: Array, new: Array, places: Array, valid: Array) -> Array:
  """Returns x [R, T, ...] with new entries [R, N, ...] at the valid ones of places [R, N]."""

  def put(x: Any, new: Any, places: Any) -> Any:
    return x.at[places].set(new.astype(x.dtype), mode="drop")

  return jax.vmap(put)(x, new, jnp.where(valid, places, x.shape[1]))
