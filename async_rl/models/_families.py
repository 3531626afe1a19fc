"""The public models by name, so that a run can be planned and tested without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from async_rl._suggestions import suggestion
from async_rl.models._model_config import ModelConfig
from async_rl.models._model_config import RopeScaling


def _llama(d_model, num_layers, num_heads, num_kv_heads, d_ff, *, head_dim=128, tie=False, factor=None):
  """Makes a Llama 3 or, with the `factor` by which its context was stretched, a Llama 3.1 to 3.3."""
  return ModelConfig(
    vocab_size=128_256,
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=d_ff,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    tie_embeddings=tie,
    rope_scaling=None if factor is None else RopeScaling("llama3", factor),
  )


def _smollm2(d_model, num_layers, num_heads, num_kv_heads, d_ff, rope_theta):
  return ModelConfig(
    vocab_size=49_152,
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=64,
    d_ff=d_ff,
    rope_theta=rope_theta,
    norm_eps=1e-5,
    tie_embeddings=True,
  )


def _qwen2(d_model, num_layers, num_heads, num_kv_heads, d_ff, *, head_dim=128, tie=False, vocab_size=152_064):
  """Makes a Qwen2 or Qwen2.5, which share their shapes."""
  return ModelConfig(
    vocab_size=vocab_size,
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=d_ff,
    rope_theta=1_000_000.0,
    tie_embeddings=tie,
    qkv_bias=True,
  )


def _qwen3(d_model, num_layers, num_heads, d_ff, *, tie=False):
  return ModelConfig(
    vocab_size=151_936,
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=8,
    head_dim=128,
    d_ff=d_ff,
    rope_theta=1_000_000.0,
    tie_embeddings=tie,
    qk_norm=True,
  )


def _gemma2(d_model, num_layers, num_heads, num_kv_heads, d_ff, *, head_dim=256, query_scale=None):
  return ModelConfig(
    vocab_size=256_000,
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=d_ff,
    tie_embeddings=True,
    activation="gelu",
    norm_offset=1.0,
    embed_scale=True,
    post_norms=True,
    query_scale=query_scale,
    attention_softcap=50.0,
    final_softcap=30.0,
    sliding_window=4096,
    global_every=2,
  )


def _gemma3(
  d_model, num_layers, num_heads, num_kv_heads, d_ff, *, window, head_dim=256, query_scale=None, vocab_size=262_144,
  factor=None,
):  # fmt: skip
  """Makes the text part of a Gemma 3; `factor` stretches the global layers of models with a long context."""
  return ModelConfig(
    vocab_size=vocab_size,
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=d_ff,
    rope_theta=1_000_000.0,
    tie_embeddings=True,
    qk_norm=True,
    activation="gelu",
    norm_offset=1.0,
    embed_scale=True,
    post_norms=True,
    query_scale=query_scale,
    sliding_window=window,
    global_every=6,
    rope_theta_local=10_000.0,
    rope_scaling=None if factor is None else RopeScaling("linear", factor),
  )


_LLAMA_8B = (4096, 32, 32, 8, 14_336)
_LLAMA_70B = (8192, 80, 64, 8, 28_672)
_QWEN2_SMALL = {
  "0.5b": _qwen2(896, 24, 14, 2, 4864, head_dim=64, tie=True, vocab_size=151_936),
  "1.5b": _qwen2(1536, 28, 12, 2, 8960, tie=True, vocab_size=151_936),
  "7b": _qwen2(3584, 28, 28, 4, 18_944),
  "72b": _qwen2(8192, 80, 64, 8, 29_568),
}

#: Every public dense text model of the supported families. A folder's own config.json takes precedence when weights
#: are loaded; base and instruction-tuned models share a name here.
FAMILIES: Mapping[str, ModelConfig] = MappingProxyType(
  {
    "llama-3-8b": _llama(*_LLAMA_8B),
    "llama-3-70b": _llama(*_LLAMA_70B),
    "llama-3.1-8b": _llama(*_LLAMA_8B, factor=8.0),
    "llama-3.1-70b": _llama(*_LLAMA_70B, factor=8.0),
    "llama-3.1-405b": _llama(16_384, 126, 128, 8, 53_248, factor=8.0),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, head_dim=64, tie=True, factor=32.0),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, tie=True, factor=32.0),
    "llama-3.3-70b": _llama(*_LLAMA_70B, factor=8.0),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536, 100_000.0),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560, 100_000.0),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130_000.0),
    **{f"qwen2-{size}": config for size, config in _QWEN2_SMALL.items()},
    **{f"qwen2.5-{size}": config for size, config in _QWEN2_SMALL.items()},
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11_008, tie=True, vocab_size=151_936),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27_648),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tie=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
    "gemma-2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma-2-9b": _gemma2(3584, 42, 16, 8, 14_336),
    "gemma-2-27b": _gemma2(4608, 46, 32, 16, 36_864, head_dim=128, query_scale=144**-0.5),
    "gemma-3-270m": _gemma3(640, 18, 4, 1, 2048, window=512),
    "gemma-3-1b": _gemma3(1152, 26, 4, 1, 6912, window=512),
    "gemma-3-4b": _gemma3(2560, 34, 8, 4, 10_240, window=1024, vocab_size=262_208, factor=8.0),
    "gemma-3-12b": _gemma3(3840, 48, 16, 8, 15_360, window=1024, vocab_size=262_208, factor=8.0),
    "gemma-3-27b": _gemma3(
      5376, 62, 32, 16, 21_504, window=1024, vocab_size=262_208, factor=8.0, head_dim=128, query_scale=168**-0.5
    ),
  }
)


def named(name: str) -> ModelConfig:
  """Returns the architecture of a public model.

  >>> named("qwen3-0.6b").num_params()
  596049920

  Raises:
    ValueError: if there is none of that name; the message suggests the nearest name.
  """
  if name in FAMILIES:
    return FAMILIES[name]
  raise ValueError(f"There is no model {name!r}; {suggestion(name.lower(), FAMILIES, cutoff=0.5)}")
