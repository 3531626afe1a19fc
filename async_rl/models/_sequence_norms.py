"""The norm of every sequence's own score, ∇ log π(τ), of all sequences of packed rows in one backward pass.

Letters of shapes: R rows, T tokens of a row, S sequences of a row, L and C the most tokens and the most scored tokens
of a sequence, D model, V vocabulary, W devices of rows.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl.models._param_forms import Params
from async_rl.models._policy import Policy
from async_rl.models._taps import Pairs
from async_rl.models._taps import SequenceBounds
from async_rl.models._taps import Taps
from async_rl.models._token_stats import at_places
from async_rl.models._token_stats import gathered_kernel
from async_rl.models._token_stats import predicting
from async_rl.models._token_stats import raw_logits
from async_rl.models._token_stats import row_ways
from async_rl.models._token_stats import slopes_of
from async_rl.models._token_stats import tempered_logits

Array = jax.Array


def squared_score_norms(
  policy: Policy,
  params: Params,
  tokens: Array,
  segments: Array,
  positions: Array,
  scored: Array,
  bounds: SequenceBounds,
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
    bounds: those of the rows' sequences.
    temperature: the temperature of the softmax.
    chunk: the number of a device's tokens whose logits are formed at a time, if no sequence alone has more.
  """
  probe = jnp.zeros((tokens.shape[0], bounds.most), jnp.float32)
  nothing = jnp.zeros((*tokens.shape, policy.config.d_model), policy.dtype)

  def hidden_of(probe: Array, embedded: Array) -> Array:
    taps = Taps(bounds, segments, probe, embedded)
    return predicting(policy.hidden(params, tokens, segments, positions, taps))

  hidden, pull = jax.vjp(hidden_of, probe, nothing)
  kernel = policy.unembedding(params)
  head = _Head(policy, temperature, chunk, bounds, tokens, segments, scored)
  found = head(hidden, gathered_kernel(policy, kernel, hidden.dtype))
  norms, at_embedded = pull(found.hidden)
  if policy.lora is not None:
    return norms
  c = policy.config
  scale = float(jnp.dtype(policy.dtype).type(c.d_model**0.5)) if c.embed_scale else 1.0  # as rounded for its use
  pairs = Pairs(bounds, segments)
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
    self, policy: Policy, temperature: float, chunk: int, bounds: SequenceBounds, tokens: Array, segments: Array,
    scored: Array,
  ):  # fmt: skip
    self._policy, self._temperature, self._bounds = policy, temperature, bounds
    self._at_once = max(1, chunk // bounds.scored)
    self._count = jnp.minimum(jnp.max(segments), bounds.most)
    self._tokens, self._segments, self._scored = tokens, segments, scored

  def __call__(self, hidden: Array, kernel: Array) -> _AtHead:
    """Maps hidden states [R, T, D] that predict the tokens, and the unembedding [D, V] in their dtype."""
    rows, width = self._tokens.shape
    ways = row_ways(self._policy.mesh, rows)

    def one(h: Array, targets: Array, valid: Array, ids: Array) -> tuple[Array, Array, Array]:
      raw = raw_logits(self._policy, h, kernel)
      logz = jax.nn.logsumexp(tempered_logits(self._policy, self._temperature, raw), axis=-1)
      slopes = slopes_of(self._policy, self._temperature, raw, logz, targets)
      slopes = jnp.where(valid[..., None], slopes, 0.0).astype(h.dtype)
      multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
      dh = multiply("wcv,dv->wcd", slopes, kernel).astype(h.dtype)
      norms = jnp.sum(multiply("wcv,wev->wce", slopes, slopes) * multiply("wcd,wed->wce", h, h), axis=(1, 2))
      looked_up = jnp.take_along_axis(slopes, jnp.broadcast_to(ids[:, None], (*h.shape[:2], ids.shape[1])), axis=2)
      return dh, norms, looked_up

    def body(s: Array, found: _AtHead) -> _AtHead:
      (places, valid), (all_places, known) = self._windows(s)
      given = (at_places(hidden, places), at_places(self._tokens, places), valid, at_places(self._tokens, all_places))
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
      jnp.zeros((rows, self._bounds.most), jnp.float32),
      jnp.zeros((rows, width, self._bounds.longest), hidden.dtype),
    )
    return jax.lax.fori_loop(0, self._count, body, start)

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
        "rcd,rld->rcl", at_places(hidden, places), at_places(at_table, all_places), preferred_element_type=jnp.float32
      )
      product = jnp.where(valid[..., None], dots * at_places(at_tokens, places), 0.0)
      return jax.lax.dynamic_update_index_in_dim(sums, jnp.sum(product, axis=(1, 2)), s, 1)

    zeros = jnp.zeros((hidden.shape[0], self._bounds.most), jnp.float32)
    return jax.lax.fori_loop(0, self._count, body, zeros)

  def _windows(self, s: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Returns the windows on the scored tokens of sequence s of every row, C wide, and on all of its tokens, L wide."""
    own = self._segments == s + 1
    return _window(own & self._scored, self._bounds.scored), _window(own, self._bounds.longest)


def _window(wanted: Array, size: int) -> tuple[Array, Array]:
  """Returns the places [R, size] of each row from its first wanted token on, and which of them are wanted.

  Args:
    wanted: bool [R, T].
    size: the number of places.
  """
  places = jnp.argmax(wanted, axis=1)[:, None] + jnp.arange(size)[None]
  inside = places < wanted.shape[1]
  places = jnp.minimum(places, wanted.shape[1] - 1)
  return places, inside & at_places(wanted, places)


def _put(x: Array, new: Array, places: Array, valid: Array) -> Array:
  """Returns x [R, T, ...] with new entries [R, N, ...] at the valid ones of places [R, N]."""

  def put(x: Any, new: Any, places: Any) -> Any:
    return x.at[places].set(new.astype(x.dtype), mode="drop")

  return jax.vmap(put)(x, new, jnp.where(valid, places, x.shape[1]))
