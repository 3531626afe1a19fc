"""One token per row from float32 logits, and its log-probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from async_rl.sampling._config import SamplerConfig

Array = jax.Array

_BLOCK = 128


def sample(logits: Array, uniforms: Array, config: SamplerConfig) -> tuple[Array, Array]:
  """Draws from softmax(logits / temperature), truncated where asked.

  Args:
    logits: float32 [B, V].
    uniforms: float32 [B, 2] in [0, 1); fixes what is drawn.
    config: temperature, top_k, top_p, logprobs_of.

  Returns:
    tokens int32 [B] and their log-probabilities float32 [B], as `SamplerConfig` defines them.
  """
  if config.temperature == 0:
    tokens = jnp.argmax(logits, axis=-1)
    return tokens.astype(jnp.int32), _logprobs(logits, tokens)
  plain = logits / config.temperature
  if config.top_k is None and config.top_p is None:
    tokens = draw(plain, uniforms)
    return tokens, _logprobs(plain, tokens)
  truncated = truncate(plain, config.top_k, config.top_p)
  tokens = draw(truncated, uniforms)
  return tokens, _logprobs(plain if config.logprobs_of == "plain" else truncated, tokens)


def draw(logits: Array, uniforms: Array) -> Array:
  """Inverse-CDF sampling from softmax(logits) in two levels: a block of 128 tokens, then a token of the block.

  One pass over the vocabulary instead of a sort or of V random numbers. Each level has a uniform of its own, so
  that tokens rarer than the 2**-23 spacing of a float32 uniform keep their probability.

  Args:
    logits: float32 [B, V]; -inf or the lowest float is never drawn.
    uniforms: float32 [B, 2] in [0, 1).

  Returns:
    int32 [B].
  """
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.pad(weights, ((0, 0), (0, -weights.shape[-1] % _BLOCK)))
  blocks = weights.reshape(weights.shape[0], -1, _BLOCK)
  block = _invert(jnp.sum(blocks, axis=-1), uniforms[:, 0])
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return (block * _BLOCK + _invert(inside, uniforms[:, 1])).astype(jnp.int32)


def truncate(logits: Array, top_k: int | None, top_p: float | None) -> Array:
  """Logits [B, V] with those outside `top_k`, and of the rest those outside `top_p`, set to -inf; ties are kept."""
  if top_k is not None:
    least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  if top_p is not None:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  return logits


def _invert(weights: Array, uniforms: Array) -> Array:
  """First index at which the running sum of `weights` [B, N] exceeds uniforms [B] * total; int [B].

  A zero weight is never chosen, whatever the rounding: a parallel running sum need not be monotone in its last bit.
  """
  running = jnp.cumsum(weights, axis=-1)
  beyond = (running > uniforms[:, None] * running[:, -1:]) & (weights > 0)
  return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), jnp.argmax(weights, axis=-1))


def _logprobs(logits: Array, tokens: Array) -> Array:
  picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
  return picked - jax.nn.logsumexp(logits, axis=-1)
