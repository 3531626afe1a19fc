"""The modules of the policy: norms, layers of attention and feed-forward, and what comes before and after them.

Letters of shapes: D model, H query heads, N key/value heads, d head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from async_rl.models._model_config import ModelConfig
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import constrain

Array = jax.Array


class RMSNorm(nnx.Module):
  """Computes x / rms(x) * (scale + offset) over the last axis, in float32."""

  def __init__(self, width: int, config: ModelConfig):
    self.scale = nnx.Param(jnp.full((width,), 1.0 - config.norm_offset, jnp.float32))
    self.offset = config.norm_offset
    self.eps = config.norm_eps

  def __call__(self, x: Array) -> Array:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    scale = self.scale[...].astype(jnp.float32) + self.offset
    return (y * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class Ends(nnx.Module):
  """Holds the parameters before and after the layers: embedding, final norm, unembedding."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.config = config
    self.dtype = dtype
    init = nnx.initializers.normal(config.d_model**-0.5)
    self.embed = nnx.Param(init(rngs.params(), (config.vocab_size, config.d_model), jnp.float32))
    self.final_norm = RMSNorm(config.d_model, config)
    if not config.tie_embeddings:
      self.head = nnx.Param(init(rngs.params(), (config.d_model, config.vocab_size), jnp.float32))

  def encode(self, tokens: Array, mesh: Mesh | None) -> Array:
    # Look up in the table as it is split, columns over "fsdp"; then exchange columns for rows.
    x = constrain(jnp.take(self.embed[...], tokens, axis=0), mesh, ROWS[0], *[None] * (tokens.ndim - 1), ROWS[1])
    x = constrain(x, mesh, ROWS).astype(self.dtype)
    return x * jnp.asarray(self.config.d_model**0.5, self.dtype) if self.config.embed_scale else x

  def unembedding(self) -> Array:
    return self.embed[...].T if self.config.tie_embeddings else self.head[...]


def _plain(name: str, x: Array, y: Array) -> Array:
  del name, x
  return y


class Layer(nnx.Module):
  """Applies attention and gated feed-forward, each with a residual connection."""

  def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.config = c = config
    linear = functools.partial(nnx.Linear, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)
    inward = nnx.initializers.normal(c.d_model**-0.5)
    bias = c.qkv_bias
    self.attention_norm = RMSNorm(c.d_model, c)
    self.q = linear(c.d_model, c.num_heads * c.head_dim, use_bias=bias, kernel_init=inward)
    self.k = linear(c.d_model, c.num_kv_heads * c.head_dim, use_bias=bias, kernel_init=inward)
    self.v = linear(c.d_model, c.num_kv_heads * c.head_dim, use_bias=bias, kernel_init=inward)
    # The two projections back into the residual stream start small, so that depth does not raise its variance.
    depth = (2 * c.num_layers) ** -0.5
    outward = nnx.initializers.normal((c.num_heads * c.head_dim) ** -0.5 * depth)
    self.o = linear(c.num_heads * c.head_dim, c.d_model, use_bias=False, kernel_init=outward)
    self.mlp_norm = RMSNorm(c.d_model, c)
    self.gate = linear(c.d_model, c.d_ff, use_bias=False, kernel_init=inward)
    self.up = linear(c.d_model, c.d_ff, use_bias=False, kernel_init=inward)
    self.down = linear(c.d_ff, c.d_model, use_bias=False, kernel_init=nnx.initializers.normal(c.d_ff**-0.5 * depth))
    if c.qk_norm:
      self.q_norm = RMSNorm(c.head_dim, c)
      self.k_norm = RMSNorm(c.head_dim, c)
    if c.post_norms:
      self.attention_post_norm = RMSNorm(c.d_model, c)
      self.mlp_post_norm = RMSNorm(c.d_model, c)

  def __call__(
    self, x: Array, angles: Array, attend: Callable[[Array, Array, Array], tuple[Array, Any]], adapt: Callable = _plain
  ):
    """Maps x [..., D] and angles [..., d / 2] to [..., D] and the second output of `attend`.

    `adapt(name, input, output)` returns the output to use for each linear map.
    """
    c = self.config

    def linear(name: str, x: Array) -> Array:
      return checkpoint_name(adapt(name, x, getattr(self, name)(x)), "projection")

    h = self.attention_norm(x)
    q, k, v = (linear(name, h).reshape(*h.shape[:-1], -1, c.head_dim) for name in "qkv")
    if c.qk_norm:
      q = self.q_norm(q)
      k = self.k_norm(k)
    out, extra = attend(_rotate(q, angles), _rotate(k, angles), v)
    h = linear("o", out.reshape(*out.shape[:-2], -1))
    x = x + (self.attention_post_norm(h) if c.post_norms else h)
    h = self.mlp_norm(x)
    activation = jax.nn.silu if c.activation == "silu" else jax.nn.gelu
    h = linear("down", activation(linear("gate", h)) * linear("up", h))
    return x + (self.mlp_post_norm(h) if c.post_norms else h), extra


def _rotate(x: Array, angles: Array) -> Array:
  """Rotates x [..., heads, d] by angles [..., d / 2]; pairs are made of halves, not interleaved."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos = jnp.cos(angles)[..., None, :]
  sin = jnp.sin(angles)[..., None, :]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
