"""Log-probabilities of given tokens without ever forming [tokens, vocabulary]."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl.models._config import ModelConfig
from async_rl.models._policy import Params
from async_rl.models._policy import Policy
from async_rl.models._policy import finish_logits

Array = jax.Array


class TokenStats(NamedTuple):
  """Per-token quantities of the policy's next-token distribution p, each float32 [R, T].

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
  """Log-probability of every token given those before it in its segment.

  Entry [r, t] belongs to token t itself. First tokens of a segment have no prediction: what stands there is
  meaningless and must be masked.

  Args:
    policy: the architecture.
    params: its parameters.
    tokens: int32 [R, T].
    segments: int32 [R, T], 0 on padding.
    positions: int32 [R, T].
    temperature: of the softmax, the sampler's.
    chunk: positions of a row whose logits are formed at a time.
  """
  hidden = policy.hidden(params, tokens, segments, positions)
  hidden = jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
  return token_stats(policy.config, float(temperature), chunk, hidden, policy.unembedding(params), tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def token_stats(
  config: ModelConfig, temperature: float, chunk: int, hidden: Array, kernel: Array, targets: Array
) -> TokenStats:
  """`TokenStats` of `targets` under softmax(logits(hidden @ kernel) / temperature).

  The backward pass forms each chunk of logits once more instead of storing it.

  Args:
    config: soft-cap and vocabulary limit.
    temperature: of the softmax.
    chunk: positions at a time; the last chunk may be shorter.
    hidden: [R, T, D].
    kernel: [D, V].
    targets: int32 [R, T].
  """

  def one(_, inputs):
    return None, _stats(_logits(config, temperature, inputs[0], kernel), inputs[1])

  _, stats = jax.lax.scan(one, None, _split((hidden, targets), chunk))
  return TokenStats(*(_join(x, hidden.shape[1]) for x in stats))


def _logits(config: ModelConfig, temperature: float, hidden: Array, kernel: Array) -> Array:
  return finish_logits(jnp.dot(hidden, kernel, preferred_element_type=jnp.float32), config) / temperature


def _stats(logits: Array, targets: Array) -> TokenStats:
  logz = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  logp = logits - logz
  probs = jnp.exp(logp)
  picked = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
  return TokenStats(picked, -jnp.sum(probs * logp, axis=-1), jnp.sum(jnp.square(probs), axis=-1))


def _split(arrays: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
  """[R, T, ...] to [T / chunk, R, chunk, ...], zero-padded; rows stay the leading axis of a chunk, so their
  sharding survives."""

  def split(x):
    count = -(-x.shape[1] // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, chunk, *x.shape[2:]).swapaxes(0, 1)

  return tuple(split(x) for x in arrays)


def _join(x: Array, length: int) -> Array:
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _forward(config, temperature, chunk, hidden, kernel, targets):
  return token_stats(config, temperature, chunk, hidden, kernel, targets), (hidden, kernel, targets)


def _backward(config, temperature, chunk, residuals, cotangents: TokenStats):
  hidden, kernel, targets = residuals

  def one(dkernel, inputs):
    h, t, g = inputs
    logp = lambda h, kernel: _picked(_logits(config, temperature, h, kernel), t)
    _, pull = jax.vjp(logp, h, kernel)
    dh, dk = pull(g)
    return dkernel + dk.astype(jnp.float32), dh

  start = jnp.zeros(kernel.shape, jnp.float32)
  dkernel, dhidden = jax.lax.scan(one, start, _split((hidden, targets, cotangents.logprobs), chunk))
  return _join(dhidden, hidden.shape[1]), dkernel.astype(kernel.dtype), None


def _picked(logits: Array, targets: Array) -> Array:
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return picked - jax.nn.logsumexp(logits, axis=-1)


token_stats.defvjp(_forward, _backward)
