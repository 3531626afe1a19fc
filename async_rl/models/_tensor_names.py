"""The names of the policy's parameters in public checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax

from async_rl.models._model_config import ModelConfig
from async_rl.models._sharding import path_name

# ours, Hugging Face, GGUF. Matrices are stored [out, in] there and [in, out] here.
_ENDS = (
  ("ends/embed", "model.embed_tokens.weight", "token_embd.weight"),
  ("ends/final_norm/scale", "model.norm.weight", "output_norm.weight"),
  ("ends/head", "lm_head.weight", "output.weight"),
)
_LAYER = (
  ("attention_norm/scale", "input_layernorm.weight", "attn_norm.weight"),
  ("q/kernel", "self_attn.q_proj.weight", "attn_q.weight"),
  ("k/kernel", "self_attn.k_proj.weight", "attn_k.weight"),
  ("v/kernel", "self_attn.v_proj.weight", "attn_v.weight"),
  ("q/bias", "self_attn.q_proj.bias", "attn_q.bias"),
  ("k/bias", "self_attn.k_proj.bias", "attn_k.bias"),
  ("v/bias", "self_attn.v_proj.bias", "attn_v.bias"),
  ("q_norm/scale", "self_attn.q_norm.weight", "attn_q_norm.weight"),
  ("k_norm/scale", "self_attn.k_norm.weight", "attn_k_norm.weight"),
  ("o/kernel", "self_attn.o_proj.weight", "attn_output.weight"),
  ("attention_post_norm/scale", "post_attention_layernorm.weight", "post_attention_norm.weight"),
  ("mlp_norm/scale", "pre_feedforward_layernorm.weight", "ffn_norm.weight"),
  ("gate/kernel", "mlp.gate_proj.weight", "ffn_gate.weight"),
  ("up/kernel", "mlp.up_proj.weight", "ffn_up.weight"),
  ("down/kernel", "mlp.down_proj.weight", "ffn_down.weight"),
  ("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
)


def hf_names(config: ModelConfig) -> dict[str, str]:
  """Returns Hugging Face's name for each of our paths; "{}" stands for the layer's number."""
  names = {ours: hf for ours, hf, _ in _ENDS}
  names |= {f"layers/{ours}": f"model.layers.{{}}.{hf}" for ours, hf, _ in _LAYER}
  if not config.post_norms:  # with two norms a layer, the second one has the name that Gemma gives the post-norm
    names["layers/mlp_norm/scale"] = names["layers/attention_post_norm/scale"]
  return names


def gguf_names() -> dict[str, str]:
  """Returns GGUF's name for each of our paths; "{}" stands for the layer's number."""
  names = {ours: gguf for ours, _, gguf in _ENDS}
  return names | {f"layers/{ours}": f"blk.{{}}.{gguf}" for ours, _, gguf in _LAYER}


class Tensor(NamedTuple):
  """Assigns one tensor of a checkpoint to a whole parameter, or to one layer of a stacked one."""

  name: str  # our path
  stored: str  # the checkpoint's name
  leaf: Any  # the parameter, or its abstract shape
  layer: int | None

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns its shape as stored, where matrices are [out, in]."""
    shape = tuple(self.leaf.shape if self.layer is None else self.leaf.shape[1:])
    return shape[::-1] if is_transposed(self.name) else shape

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def take(self) -> jax.Array:
    """Returns its values, as we store them."""
    return self.leaf if self.layer is None else self.leaf[self.layer]


def tensors_of(params: Any, names: dict[str, str]) -> Iterator[Tensor]:
  """Yields the checkpoint's tensors that make up `params`, whose layers are stacked."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = path_name(path)
    for layer in range(leaf.shape[0]) if is_stacked(name) else (None,):
      yield Tensor(name, names[name].format(layer), leaf, layer)


def is_stacked(name: str) -> bool:
  """Returns whether our parameter `name` holds all layers, stacked."""
  return name.startswith("layers/")


def is_transposed(name: str) -> bool:
  """Returns whether our parameter `name` is transposed in checkpoints."""
  return name.endswith("/kernel") or name == "ends/head"
