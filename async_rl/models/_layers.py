"""The modules of the policy: norms, layers of attention and feed-forward, and what comes before and after them.

Letters of shapes: D model, H query heads, N key/value heads, d head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

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

  @property
  def factors(self) -> Array:
    """Returns the factors of normed values, float32 [width]."""
    return self.scale[...].astype(jnp.float32) + self.offset

  def __call__(self, x: Array) -> Array:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
    return (y * jnp.expand_dims(self.factors, range(x.ndim - 1))).astype(x.dtype)


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


def fits_kernels(width: int) -> bool:
  """Returns whether the kernels for GPUs take rows or heads of a width: blocks of Triton are powers of 2."""
  return width >= 32 and width.bit_count() == 1


class Norms:
  """What a layer computes with its norms, as the compiler makes of it what it can."""

  def add(self, x: Array, h: Array | None, norm: RMSNorm, uses: int) -> tuple[Array, ...]:
    """Returns x + h [..., D], x alone for `None`, and norm of that, `uses` times."""
    x = x if h is None else checkpoint_name(x + h, "norm")
    return x, *[checkpoint_name(self.apply(x, norm), "norm")] * uses

  def rotate(self, x: Array, norm: RMSNorm | None, angles: Array) -> Array:
    """Returns norm(x) [..., heads, d], x for `None`, rotated by angles [..., d / 2]."""
    return checkpoint_name(rotated(x if norm is None else self.apply(x, norm), angles), "norm")

  def apply(self, x: Array, norm: RMSNorm) -> Array:
    """Returns norm(x)."""
    return norm(x)


def rotated(x: Array, angles: Array) -> Array:
  """Rotates x [..., heads, d] by angles [..., d / 2]; pairs are made of halves, not interleaved."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos = jnp.cos(angles)[..., None, :]
  sin = jnp.sin(angles)[..., None, :]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


_NORMS = Norms()


class Rotation(NamedTuple):
  """Norms and rotates the queries and keys of a layer.

  Attributes:
    norms: how that is computed.
    q_norm: the norm of queries; `None` for none.
    k_norm: the norm of keys; `None` for none.
    angles: float32 [..., d / 2].
  """

  norms: Norms
  q_norm: RMSNorm | None
  k_norm: RMSNorm | None
  angles: Array

  def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
    """Maps q [..., H, d] and k [..., N, d]."""
    return self.norms.rotate(q, self.q_norm, self.angles), self.norms.rotate(k, self.k_norm, self.angles)


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
    self,
    x: Array,
    angles: Array,
    attend: Callable[[Array, Array, Array, Rotation], tuple[Array, Any]],
    adapt: Callable = _plain,
    norms: Norms = _NORMS,
  ):
    """Maps x [..., D] and angles [..., d / 2] to [..., D] and the second output of `attend`.

    `attend` gets queries and keys before their norms and rotation, which is its last argument.
    `adapt(name, input, output)` returns the output to use for each linear map.
    """
    c = self.config

    def linear(name: str, x: Array) -> Array:
      return checkpoint_name(adapt(name, x, getattr(self, name)(x)), "projection")

    x, *normed = norms.add(x, None, self.attention_norm, 3)
    q, k, v = (linear(name, h).reshape(*h.shape[:-1], -1, c.head_dim) for name, h in zip("qkv", normed, strict=True))
    q_norm, k_norm = (self.q_norm, self.k_norm) if c.qk_norm else (None, None)
    out, extra = attend(q, k, v, Rotation(norms, q_norm, k_norm, angles))
    h = linear("o", out.reshape(*out.shape[:-2], -1))
    h = norms.apply(h, self.attention_post_norm) if c.post_norms else h
    x, for_gate, for_up = norms.add(x, h, self.mlp_norm, 2)
    activation = jax.nn.silu if c.activation == "silu" else jax.nn.gelu
    h = linear("down", activation(linear("gate", for_gate)) * linear("up", for_up))
    return x + (norms.apply(h, self.mlp_post_norm) if c.post_norms else h), extra
