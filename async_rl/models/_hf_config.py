"""Hugging Face's config.json to and from `ModelConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from async_rl._validation import check_number
from async_rl.models._model_config import ModelConfig
from async_rl.models._model_config import RopeScaling

# The defaults of options that config.json may leave out, and the options that a model type implies.
_DEFAULTS: dict[str, dict[str, Any]] = {
  "llama": {},
  "qwen2": {},
  "qwen3": {"head_dim": 128},
  "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
  "gemma3_text": {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
  },
}
_GEMMA_DEFAULTS = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_IMPLIED: dict[str, dict[str, Any]] = {
  "llama": {},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  "gemma2": {},
  "gemma3_text": {"qk_norm": True},
}
_GEMMA_IMPLIED: dict[str, Any] = {"norm_offset": 1.0, "embed_scale": True, "post_norms": True}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
_ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "gemma2": "Gemma2ForCausalLM",
  "gemma3_text": "Gemma3ForCausalLM",
}
#: Options that would change the computation; the policy has them at these values only.
_REQUIRED = {
  "attention_bias": False,
  "mlp_bias": False,
  "use_sliding_window": False,
  "use_bidirectional_attention": False,
  "pretraining_tp": 1,
  "partial_rotary_factor": 1.0,
}
#: Options without a default.
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
#: Options that null switches off; for others, null means the default.
_NULL_IS_OFF = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")


def read_hf_config(content: Mapping[str, Any]) -> ModelConfig:
  """Reads the architecture that a config.json describes, as written by any recent version of transformers.

  Raises:
    ValueError: if the model type, or an option that changes the computation, is not supported.
  """
  if content.get("quantization_config") is not None:
    raise ValueError(
      f"quantization_config={content['quantization_config']!r} is not supported; use the model's unquantized weights."
    )
  content = content.get("text_config", content)
  if not isinstance(content, Mapping):
    raise ValueError(f"text_config must be an object, got text_config={content!r}; use the model's own config.json.")
  kind = content.get("model_type")
  if not isinstance(kind, str) or kind not in _DEFAULTS:
    raise ValueError(f"model_type {kind!r} is not supported; supported are {', '.join(map(repr, _DEFAULTS))}.")
  gemma = kind.startswith("gemma")
  given = {key: value for key, value in content.items() if value is not None or key in _NULL_IS_OFF}
  c = {**_DEFAULTS[kind], **(_GEMMA_DEFAULTS if gemma else {}), **given}
  if missing := [name for name in _NEEDED if name not in c]:
    raise ValueError(f"{', '.join(missing)} must be given, but a {kind} model's config lacks it; use the model's own.")
  _check_options(c, kind)
  activation = c.get("hidden_activation") or c.get("hidden_act", "silu")
  if activation not in _ACTIVATIONS:
    raise ValueError(f"Activation {activation!r} is not supported; supported are {', '.join(map(repr, _ACTIVATIONS))}.")
  for name in ("hidden_size", "num_attention_heads"):
    check_number(name, c[name], whole=True, at_least=1)
  heads = c["num_attention_heads"]
  scalar = c.get("query_pre_attn_scalar")
  head_dim = c.get("head_dim", c["hidden_size"] // heads)
  return ModelConfig(
    vocab_size=c["vocab_size"],
    d_model=c["hidden_size"],
    num_layers=c["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=c.get("num_key_value_heads", heads),
    head_dim=head_dim,
    d_ff=c["intermediate_size"],
    norm_eps=c.get("rms_norm_eps", 1e-6),
    tie_embeddings=c.get("tie_word_embeddings", False),
    activation=_ACTIVATIONS[activation],
    query_scale=None if scalar in (None, head_dim) else scalar**-0.5,
    attention_softcap=c.get("attn_logit_softcapping"),
    final_softcap=c.get("final_logit_softcapping"),
    sliding_window=c["sliding_window"] if gemma else None,
    global_every=_global_every(c) if gemma and c["sliding_window"] is not None else 1,
    **_rope(c),
    **_IMPLIED[kind],
    **(_GEMMA_IMPLIED if gemma else {}),
  )


def _check_options(c: Mapping[str, Any], kind: str) -> None:
  """Raises a ValueError that names an option which would change the computation."""
  rope = c.get("rope_parameters") or {}
  factors = [part.get("partial_rotary_factor") for part in (rope, *rope.values()) if isinstance(part, Mapping)]
  found = [(option, c.get(option)) for option in _REQUIRED] + [("partial_rotary_factor", factor) for factor in factors]
  for option, value in found:
    if value is not None and value != _REQUIRED[option]:
      raise ValueError(f"{option}={value!r} of a {kind} model is not supported; only {_REQUIRED[option]!r} is.")
  local = "sliding_attention" in (c.get("layer_types") or ())
  if local and not kind.startswith("gemma"):
    raise ValueError(f"layer_types={c['layer_types']!r} of a {kind} model is not supported; only full attention is.")
  if kind == "gemma3_text" and c["sliding_window"] is None and set(c.get("layer_types") or ("",)) != {"full_attention"}:
    # Its local layers would keep rotary frequencies of their own.
    raise ValueError("sliding_window=None of a gemma3_text model is not supported; only a window is.")


def write_hf_config(config: ModelConfig) -> dict[str, Any]:
  """Returns the content of a config.json that describes `config`; transformers 4.50 and later read it.

  Raises:
    ValueError: if no supported public architecture has these options; the message names those that get lost.
  """
  kind = _kind(config)
  content: dict[str, Any] = {
    "architectures": [_ARCHITECTURES[kind]],
    "model_type": kind,
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "intermediate_size": config.d_ff,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "rope_theta": config.rope_theta,
    "max_position_embeddings": 131_072,  # the policy has no limit; some readers take 2,048 if nothing is said
  }
  if kind.startswith("gemma"):
    content |= {
      "hidden_activation": "gelu_pytorch_tanh",
      "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),
      "sliding_window": config.sliding_window,
      "attn_logit_softcapping": config.attention_softcap,
      "final_logit_softcapping": config.final_softcap,
      "layer_types": _layer_types(config),
    }
    content |= {"rope_local_base_freq": config.rope_theta_local} if kind == "gemma3_text" else {}
  else:
    content |= {"hidden_act": "silu"}
  if config.rope_scaling is not None:
    content["rope_scaling"] = _write_scaling(config.rope_scaling)
  _check_same(read_hf_config(content), config, kind)
  return content


def _kind(config: ModelConfig) -> str:
  if config.post_norms:
    return "gemma3_text" if config.qk_norm else "gemma2"
  return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def _check_same(described: ModelConfig, config: ModelConfig, kind: str) -> None:
  config = dataclasses.replace(config, vocab_limit=None)
  lost = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(described, f.name)]
  if lost:
    values = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
    raise ValueError(f"A {kind} model, the nearest public architecture, cannot have {values}.")


def _layer_types(config: ModelConfig) -> list[str]:
  return ["sliding_attention" if config.is_local(i) else "full_attention" for i in range(config.num_layers)]


def _global_every(c: Mapping[str, Any]) -> int:
  """Returns the distance of the global layers; a list of layer types must be regular."""
  types = c.get("layer_types")
  every = c.get("_sliding_window_pattern", c["sliding_window_pattern"])
  if types is None:
    return every
  every = types.index("full_attention") + 1 if "full_attention" in types else max(every, len(types) + 1)
  if types != ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(len(types))]:
    raise ValueError(f"layer_types must be global at every n-th layer, got layer_types={types}; use another model.")
  return every


def _rope(c: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the rotary options, from the keys of transformers 4 (`rope_theta`, ...) or 5 (`rope_parameters`)."""
  both = c.get("rope_parameters") or {}
  everywhere = both.get("full_attention", both)
  local = both.get("sliding_attention", {}).get("rope_theta", c.get("rope_local_base_freq"))
  return {
    "rope_theta": everywhere.get("rope_theta", c.get("rope_theta", 10_000.0)),
    "rope_theta_local": local,
    "rope_scaling": _read_scaling(c.get("rope_scaling") or everywhere),
  }


def _read_scaling(content: Any) -> RopeScaling | None:
  if not isinstance(content, Mapping):
    raise ValueError(f"rope_scaling must be an object, got rope_scaling={content!r}; use the model's own config.json.")
  kind = content.get("rope_type", content.get("type", "default"))
  if kind == "default":
    return None
  if kind not in ("linear", "llama3"):
    raise ValueError(f"Rotary scaling {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'.")
  needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
  if missing := [name for name in (needed if kind == "llama3" else needed[:1]) if name not in content]:
    raise ValueError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)}; use the model's own config.json.")
  if kind == "linear":
    return RopeScaling("linear", content["factor"])
  return RopeScaling(
    "llama3",
    content["factor"],
    content["low_freq_factor"],
    content["high_freq_factor"],
    content["original_max_position_embeddings"],
  )


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
  if scaling.kind == "linear":
    return {"rope_type": "linear", "factor": scaling.factor}
  return {
    "rope_type": "llama3",
    "factor": scaling.factor,
    "low_freq_factor": scaling.low_frequency_factor,
    "high_freq_factor": scaling.high_frequency_factor,
    "original_max_position_embeddings": scaling.original_length,
  }
