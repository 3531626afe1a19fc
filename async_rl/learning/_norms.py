"""The gradient norm of every trajectory of a packed batch, in one of two ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from async_rl import losses
from async_rl import models
from async_rl.learning._batch import BatchShape
from async_rl.learning._placement import micro_batch
from async_rl.types import Batch

Array = jax.Array

#: How exact norms are computed: the faster way by a count of operations, of packed rows, of one sequence at a time.
ExactNorms = Literal["auto", "packed", "single"]


def resolve_exact_norms(way: str, policy: models.Policy, shape: BatchShape, chunk: int) -> str:
  """Returns "packed" or "single", for "auto" as the lengths have it.

  The products of pairs of tokens, which the packed way adds, take 2 · 1.5 L (inputs + outputs) operations a token for
  each trained matrix and sequences of L tokens, and all of a gradient 6 · inputs · outputs for every matrix. The packed
  way is chosen while the former are fewer: up to about 700 tokens for SmolLM2-135M, 1,400 for Qwen3-0.6B.

  Args:
    way: one of `ExactNorms`.
    policy: the architecture.
    shape: the static batch shape.
    chunk: the number of a device's tokens whose logits are formed at a time; the packed way forms a sequence's at once.
  """
  if way != "auto":
    return way
  params = policy.abstract()
  trained = params["layers"] if policy.lora is None else params["adapters"]
  every, own = ([x.shape[1:] for x in jax.tree.leaves(tree) if x.ndim == 3] for tree in (params["layers"], trained))
  affordable = 2 * sum(math.prod(s) for s in every) / sum(map(sum, own))
  return "packed" if shape.sequence_tokens <= affordable and shape.completion_tokens <= chunk else "single"


def packed_squared_norms(
  policy: models.Policy, params: models.Params, batch: Batch, shape: BatchShape, *, temperature: float, chunk: int
) -> Array:
  """Exact ‖∇ log π(τ_i)‖² over the trained parameters, float32 [B]: of all rows of a micro-batch at a time.

  Args:
    policy: the architecture.
    params: its parameters.
    batch: packed.
    shape: its static shape.
    temperature: the temperature of the softmax.
    chunk: as of `models.squared_score_norms`.
  """
  most = min(shape.sequences, shape.row_sequences or shape.row_tokens // 2)  # a prompt and a completion have 2 tokens
  bounds = models.SequenceBounds(most, shape.sequence_tokens, shape.completion_tokens)
  plane = (shape.rows, shape.row_tokens)
  size = shape.rows * shape.row_tokens

  def body(m: Array, norms: Array) -> Array:
    rows, mask = micro_batch(batch, m)
    scored = jnp.zeros(size, bool).at[jnp.where(mask, batch.index, size)].set(True, mode="drop").reshape(plane)
    found = models.squared_score_norms(policy, params, *rows, scored, bounds, temperature=temperature, chunk=chunk)
    first = batch.index[:, 0]
    own = found[first // shape.row_tokens, rows[1].reshape(-1)[first] - 1]
    return jnp.where(jnp.any(mask, axis=1), own, norms)

  return jax.lax.fori_loop(0, batch.used, body, jnp.zeros(shape.sequences, jnp.float32))


def squared_gradient_norms(
  score: Callable[..., models.TokenStats],
  params: models.Params,
  batch: Batch,
  longest: int,
  copies: int,
) -> Array:
  """Exact ‖∇ log π(τ_i)‖² over the trained parameters, float32 [B]: one gradient for each sequence.

  Args:
    score: (params, tokens, segments, positions), int32 [R, T] each, with *scored* and *chunk*, as `models.score` has
      them, to `models.TokenStats`.
    params: of the policy.
    batch: packed.
    longest: tokens of the longest sequence, prompt included; every pass is over this many.
    copies: how often a sequence is laid into a row of its own, for meshes that divide the rows. Only one copy counts.
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

  return jax.lax.map(one, jnp.arange(batch.mask.shape[0]))
