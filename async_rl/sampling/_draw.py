"""Drawing one token per row from float32 logits, with random numbers that depend on the sample alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from async_rl.sampling._sampler_config import SamplerConfig

Array = jax.Array

#: Tokens of a block.
BLOCK = 128


def sample_key(seed: int, ticket: Array, sample: Array) -> Array:
  """Returns the random key of one sample: it depends on nothing else, such as slots or neighbors.

  Args:
    seed: the run's seed.
    ticket: uint32 [], the ticket of the sample's group.
    sample: uint32 [], the index of the sample in its group.
  """
  root = jax.random.key(seed, impl="threefry2x32")
  return jax.random.fold_in(jax.random.fold_in(root, ticket), sample)


def token_uniforms(key: Array, index: Array) -> Array:
  """Returns the random numbers of one token, float32 [2] in [0, 1).

  Args:
    key: the sample's key, from `sample_key`.
    index: int32 [], the index of the token in its completion.
  """
  return jax.random.uniform(jax.random.fold_in(key, index), (2,))


def draw_tokens(logits: Array, uniforms: Array, config: SamplerConfig) -> tuple[Array, Array]:
  """Draws from softmax(logits / temperature), truncated where asked.

  Args:
    logits: float32 [B, V].
    uniforms: float32 [B, 2] in [0, 1), from `token_uniforms`; they fix the tokens.
    config: the temperature, top_k, top_p and logprobs_of.

  Returns:
    tokens int32 [B] and their log-probabilities float32 [B], as `SamplerConfig` defines them.
  """
  if config.temperature == 0:
    tokens = jnp.argmax(logits, axis=-1)
    return tokens.astype(jnp.int32), _logprobs(logits, tokens)
  plain = logits / config.temperature
  if config.top_k is None and config.top_p is None:
    tokens = invert_cdf(plain, uniforms)
    return tokens, _logprobs(plain, tokens)
  truncated = truncate_logits(plain, config.top_k, config.top_p)
  tokens = invert_cdf(truncated, uniforms)
  return tokens, _logprobs(plain if config.logprobs_of == "plain" else truncated, tokens)


def invert_cdf(logits: Array, uniforms: Array) -> Array:
  """Samples from softmax(logits) by inverting its CDF in two levels: a block of 128 tokens, then one of its tokens.

  One pass over the vocabulary instead of a sort or of V random numbers. Each level has a uniform of its own, so
  that tokens rarer than the 2**-23 spacing of a float32 uniform keep their probability.

  Args:
    logits: float32 [B, V]; -inf or the lowest float is never drawn.
    uniforms: float32 [B, 2] in [0, 1).

  Returns:
    int32 [B].
  """
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.pad(weights, ((0, 0), (0, -weights.shape[-1] % BLOCK)))
  blocks = weights.reshape(weights.shape[0], -1, BLOCK)
  block = _invert(jnp.sum(blocks, axis=-1), uniforms[:, 0])
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return (block * BLOCK + _invert(inside, uniforms[:, 1])).astype(jnp.int32)


def truncate_logits(logits: Array, top_k: int | None, top_p: float | None) -> Array:
  """Sets logits [B, V] outside `top_k`, and of the rest those outside `top_p`, to -inf; ties are kept."""
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
  """Returns the first index at which the running sum of `weights` [B, N] exceeds uniforms [B] * total; int [B].

  A zero weight is never chosen, whatever the rounding: a parallel running sum need not be monotone in its last bit.
  """
  running = jnp.cumsum(weights, axis=-1)
  beyond = (running > uniforms[:, None] * running[:, -1:]) & (weights > 0)
  return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), jnp.argmax(weights, axis=-1))


def _logprobs(logits: Array, tokens: Array) -> Array:
  picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
  return picked - jax.nn.logsumexp(logits, axis=-1)
