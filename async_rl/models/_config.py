"""The shape of a policy: one frozen dataclass covers every supported family."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Frequency scaling of Llama 3.1 (`kind="llama3"`) or plain position interpolation (`kind="linear"`).

  Attributes:
    kind: "llama3" or "linear".
    factor: by how much the longest wavelengths are stretched.
    low_frequency_factor: wavelengths above `original_length / this` are stretched in full (llama3).
    high_frequency_factor: wavelengths below `original_length / this` are kept (llama3).
    original_length: context length before scaling (llama3).
  """

  kind: str
  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self):
    if self.kind not in ("llama3", "linear"):
      raise ValueError(f"kind must be 'llama3' or 'linear', got kind={self.kind!r}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Architecture of a decoder-only transformer.

  The defaults are a Llama; the options below the line are what other families add.

  Attributes:
    vocab_size: V, rows of the embedding table.
    d_model: D, width of the residual stream.
    num_layers: L.
    num_heads: H, query heads.
    num_kv_heads: key/value heads; divides `num_heads`.
    head_dim: width of a head.
    d_ff: width of the gated feed-forward layer.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: the unembedding is the transposed embedding table.
    vocab_limit: ids from here on are padding of the table; they get no probability. `None`: no padding.
    qkv_bias: query, key and value projections have a bias (Qwen2).
    qk_norm: RMSNorm on each query and key head before the rotary embedding (Qwen3, Gemma 3).
    activation: "silu" or "gelu" (tanh form) in the feed-forward gate.
    norm_offset: added to the norm weights, 1.0 in Gemma, whose weights are stored around zero.
    embed_scale: multiply embeddings by sqrt(d_model) (Gemma).
    post_norms: also normalize the output of attention and feed-forward (Gemma 2 and 3).
    query_scale: scale of the attention logits; `None`: head_dim ** -0.5.
    attention_softcap: c in c * tanh(logits / c) on attention logits (Gemma 2).
    final_softcap: the same on the vocabulary logits.
    sliding_window: window of local layers, in tokens; `None`: all layers are global.
    global_every: with a sliding window, layer i is global iff (i + 1) % global_every == 0.
    rope_theta_local: base of the rotary frequencies in local layers; `None`: `rope_theta`.
    rope_scaling: frequency scaling in global layers.
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
  # What families other than Llama add.
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
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads must divide num_heads, got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}."
      )
    if self.activation not in ("silu", "gelu"):
      raise ValueError(f"activation must be 'silu' or 'gelu', got activation={self.activation!r}.")
    if self.head_dim % 2:
      raise ValueError(f"head_dim must be even for the rotary embedding, got head_dim={self.head_dim}.")
    if self.vocab_limit is not None and not 0 < self.vocab_limit <= self.vocab_size:
      raise ValueError(
        f"vocab_limit must lie in 1..vocab_size={self.vocab_size}, got vocab_limit={self.vocab_limit}; "
        "a tokenizer with more tokens than the model cannot be used with it."
      )

  def is_local(self, layer: int) -> bool:
    """Whether `layer` attends to the sliding window only."""
    return self.sliding_window is not None and (layer + 1) % self.global_every != 0

  def frequencies(self) -> np.ndarray:
    """Rotary angular frequencies of every layer, float32 [L, head_dim / 2]."""
    local = rope_frequencies(self.head_dim, self.rope_theta_local or self.rope_theta, None)
    everywhere = rope_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)
    local = local if self.rope_theta_local else everywhere
    return np.stack([local if self.is_local(i) else everywhere for i in range(self.num_layers)]).astype(np.float32)

  def num_params(self) -> int:
    """Number of parameters, embeddings counted once if tied."""
    heads = self.num_heads + 2 * self.num_kv_heads
    attention = self.d_model * self.head_dim * (heads + self.num_heads)
    attention += self.head_dim * heads * self.qkv_bias + 2 * self.head_dim * self.qk_norm
    layer = attention + 3 * self.d_model * self.d_ff + (4 if self.post_norms else 2) * self.d_model
    tables = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
    return self.num_layers * layer + tables + self.d_model


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
  """Angular frequencies, float64 [head_dim / 2]; Llama 3.1's three bands if scaled: kept, blended, stretched."""
  frequency = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if scaling is None:
    return frequency
  if scaling.kind == "linear":
    return frequency / scaling.factor
  periods = scaling.original_length * frequency / (2 * np.pi)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  keep = np.clip((periods - low) / (high - low), 0.0, 1.0)
  return frequency * (keep + (1 - keep) / scaling.factor)
