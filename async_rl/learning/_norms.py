"""The gradient norm of every trajectory of a packed batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from async_rl import losses
from async_rl import models
from async_rl.types import Batch

Array = jax.Array


def squared_gradient_norms(
  score: Callable[..., models.TokenStats],
  params: models.Params,
  batch: Batch,
  longest: int,
  copies: int,
  at_once: int = 1,
) -> Array:
  """Exact ‖∇ log π(τ_i)‖² over the trained parameters, float32 [B]: one gradient for each sequence.

  Args:
    score: (params, tokens, segments, positions), int32 [R, T] each, with *scored* and *chunk*, as `models.score` has
      them, to `models.TokenStats`.
    params: of the policy.
    batch: packed.
    longest: tokens of the longest sequence, prompt included; every pass is over this many.
    copies: how often a sequence is laid into a row of its own, for meshes that divide the rows. Only one copy counts.
    at_once: the number of sequences whose gradients are made at a time; `score` is then vectorized over them.
  """
  trainable, frozen = models.split_trainable(params)
  width = batch.tokens.shape[-1]
  longest = min(longest, width)
  size = min(batch.mask.shape[1], longest)

  def one(b: Array) -> Array:
    row, place = batch.index[b, 0] // width, batch.index[b, 0] % width  # of its first completion token
    whole = [jax.lax.dynamic_slice(x, (batch.micro[b], row, 0), (1, 1, width)).reshape(width) for x in batch[:3]]
    begin = jnp.minimum(place - whole[2][place], width - longest)
    tokens, segments, positions = (jax.lax.dynamic_slice(x, (begin,), (longest,)) for x in whole)
    alone = (segments == whole[1][place]).astype(segments.dtype)
    rows = [jnp.broadcast_to(x, (copies, longest)) for x in (tokens, alone, positions)]
    index = jnp.clip(batch.index[b] - row * width - begin, 0, longest - 1)
    # Logits are formed of one chunk of tokens, in which those of the completion come first.
    first = jnp.argsort(~jnp.zeros(longest, bool).at[index].set(True), stable=True)
    scored = models.Scored(jnp.broadcast_to(first, (copies, longest)), jnp.int32(size))

    def log_probability(trainable):
      stats = score({**frozen, **trainable}, *rows, scored=scored, chunk=size)
      return jnp.sum(jnp.where(batch.mask[b], stats.logprobs[0][index], 0.0))

    return losses.tree_squared_norm(jax.grad(log_probability)(trainable))

  return jax.lax.map(one, jnp.arange(batch.mask.shape[0]), batch_size=at_once if at_once > 1 else None)
