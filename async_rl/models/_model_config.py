"""The shape of a policy: one frozen dataclass covers every supported family."""

from __future__ import annotations

import dataclasses

import numpy as np

from async_rl._validation import check_number


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scales rotary frequencies as Llama 3.1 does (`kind="llama3"`) or by position interpolation (`kind="linear"`).

  Attributes:
    kind: the kind of scaling, "llama3" or "linear".
    factor: the factor by which the longest wavelengths are stretched.
    low_frequency_factor: the ratio of `original_length` to the shortest wavelength that is stretched in full (llama3).
    high_frequency_factor: the ratio of `original_length` to the longest wavelength that is kept (llama3).
    original_length: the context length before scaling (llama3).
  """

  kind: str
  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self):
    if self.kind not in ("llama3", "linear"):
      raise ValueError(f"kind must be 'llama3' or 'linear', got kind={self.kind!r}; no other scaling is supported.")
    for name in ("factor", "low_frequency_factor", "high_frequency_factor"):
      check_number(name, getattr(self, name), above=0)
    check_number("original_length", self.original_length, whole=True, at_least=1)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Describes the architecture of a decoder-only transformer.

  The defaults are those of Llama; the options from `vocab_limit` on are for padded tables and other families.

  Attributes:
    vocab_size: V, the number of rows of the embedding table.
    d_model: D, the width of the residual stream.
    num_layers: L, the number of layers.
    num_heads: H, the number of query heads.
    num_kv_heads: N, the number of key/value heads; it divides `num_heads`.
    head_dim: d, the width of a head.
    d_ff: the width of the gated feed-forward layer.
    rope_theta: the base of the rotary frequencies.
    norm_eps: the constant added to the mean square in RMSNorm.
    tie_embeddings: whether the unembedding is the transposed embedding table.
    vocab_limit: the first id that is padding of the table, from which on ids get no probability; `None` for no padding.
    qkv_bias: whether query, key and value projections have a bias (Qwen2).
    qk_norm: whether each query and key head is normalized before the rotary embedding (Qwen3, Gemma 3).
    activation: the function of the feed-forward gate, "silu" or "gelu" (tanh form).
    norm_offset: the constant added to the norm weights, 1.0 in Gemma, whose weights are stored around zero.
    embed_scale: whether embeddings are multiplied by sqrt(d_model) (Gemma).
    post_norms: whether the outputs of attention and feed-forward are normalized, too (Gemma 2 and 3).
    query_scale: the scale of the attention logits; `None` for head_dim ** -0.5.
    attention_softcap: the c in c * tanh(logits / c) on attention logits (Gemma 2); `None` for none.
    final_softcap: the c in c * tanh(logits / c) on vocabulary logits (Gemma 2); `None` for none.
    sliding_window: the window of local layers, in tokens; `None` makes all layers global.
    global_every: the distance of global layers: with a window, layer i is global iff (i + 1) % global_every == 0.
    rope_theta_local: the base of the rotary frequencies in local layers; `None` for `rope_theta`.
    rope_scaling: the frequency scaling in global layers; `None` for none.
  """

  vocab_size: int
  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  vocab_limit: int | None = None
  # Options of families other than Llama.
  qkv_bias: bool = False
  qk_norm: bool = False
  activation: str = "silu"
  norm_offset: float = 0.0
  embed_scale: bool = False
  post_norms: bool = False
  query_scale: float | None = None
  attention_softcap: float | None = None
  final_softcap: float | None = None
  sliding_window: int | None = None
  global_every: int = 1
  rope_theta_local: float | None = None
  rope_scaling: RopeScaling | None = None

  def __post_init__(self):
    for name in (
      "vocab_size",
      "d_model",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "d_ff",
      "global_every",
    ):
      check_number(name, getattr(self, name), whole=True, at_least=1)
    for name in ("rope_theta", "norm_eps"):
      check_number(name, getattr(self, name), above=0)
    for name in ("query_scale", "attention_softcap", "final_softcap", "sliding_window", "rope_theta_local"):
      if getattr(self, name) is not None:
        check_number(name, getattr(self, name), above=0)
    if not isinstance(self.tie_embeddings, bool):
      raise ValueError(f"*tie_embeddings* must be True or False, got tie_embeddings={self.tie_embeddings!r}.")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads must divide num_heads, got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}; "
        "check the model's configuration."
      )
    if self.activation not in ("silu", "gelu"):
      raise ValueError(
        f"activation must be 'silu' or 'gelu', got activation={self.activation!r}; no other is supported."
      )
    if self.head_dim % 2:
      raise ValueError(
        f"head_dim must be even for the rotary embedding, got head_dim={self.head_dim}; choose an even width."
      )
    if self.vocab_limit is not None and not 0 < self.vocab_limit <= self.vocab_size:
      raise ValueError(
        f"vocab_limit must lie in 1..vocab_size={self.vocab_size}, got vocab_limit={self.vocab_limit}; "
        "a tokenizer with more tokens than the model cannot be used with it."
      )

  def is_local(self, layer: int) -> bool:
    """Returns whether `layer` attends to the sliding window only."""
    return self.sliding_window is not None and (layer + 1) % self.global_every != 0

  def frequencies(self) -> np.ndarray:
    """Returns the rotary angular frequencies of every layer, float32 [L, head_dim / 2]."""
    local = rope_frequencies(self.head_dim, self.rope_theta_local or self.rope_theta, None)
    everywhere = rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
    local = local if self.rope_theta_local else everywhere
    return np.stack([local if self.is_local(i) else everywhere for i in range(self.num_layers)]).astype(np.float32)

  def num_params(self) -> int:
    """Returns the number of parameters, embeddings counted once if tied."""
    heads = self.num_heads + 2 * self.num_kv_heads
    attention = self.d_model * self.head_dim * (heads + self.num_heads)
    attention += self.head_dim * heads * self.qkv_bias + 2 * self.head_dim * self.qk_norm
    layer = attention + 3 * self.d_model * self.d_ff + (4 if self.post_norms else 2) * self.d_model
    tables = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
    return self.num_layers * layer + tables + self.d_model


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
  """Returns angular frequencies, float64 [head_dim / 2]; llama3 scaling keeps, blends and stretches three bands."""
  frequency = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if scaling is None:
    return frequency
  if scaling.kind == "linear":
    return frequency / scaling.factor
  periods = scaling.original_length * frequency / (2 * np.pi)
  low = scaling.low_frequency_factor
  high = scaling.high_frequency_factor
  keep = np.clip((periods - low) / (high - low), 0.0, 1.0)
  return frequency * (keep + (1 - keep) / scaling.factor)
