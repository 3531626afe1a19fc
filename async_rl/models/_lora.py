"""Low-rank adapters: a small subtree of the parameters that is trained and synced while the rest stays put."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Params = dict[str, Any]

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoRA:
  """Adapts linear maps to y = x W + (alpha / rank) (x A) B.

  W is frozen; A [in, rank] is random and B [rank, out] zero at the start. The parameters get a subtree
  `{"adapters": {target: {"a": [L, in, rank], "b": [L, rank, out]}}}`.

  Attributes:
    rank: the rank of the update.
    alpha: the numerator of its scale.
    targets: the linear maps of a layer that are adapted.

  References:
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. https://arxiv.org/abs/2106.09685
  """

  rank: int = 16
  alpha: float = 32.0
  targets: tuple[str, ...] = TARGETS

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"rank must be at least 1, got rank={self.rank}; 8 to 64 are usual.")
    unknown = set(self.targets) - set(TARGETS)
    if unknown or not self.targets:
      raise ValueError(f"targets must be some of {TARGETS}, got targets={self.targets!r}; name at least one.")

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def init_adapters(lora: LoRA, params: Params, key: Array) -> Params:
  """Makes new float32 adapters for stacked `params`; the policy computes the same with them as without."""

  def make(key, kernel):
    layers, width_in, width_out = kernel.shape
    a = jax.random.normal(key, (layers, width_in, lora.rank), jnp.float32) * width_in**-0.5
    return {"a": a, "b": jnp.zeros((layers, lora.rank, width_out), jnp.float32)}

  keys = jax.random.split(key, len(lora.targets))
  return {name: make(k, params["layers"][name]["kernel"]) for name, k in zip(lora.targets, keys, strict=True)}


def _unseen(x: Array, y: Array) -> Array:
  del x
  return y


def adapted(
  lora: LoRA, adapters: Params, name: str, x: Array, y: Array, see: Callable[[Array, Array], Array] = _unseen
) -> Array:
  """Returns y, the output of linear map `name` of one layer for input x, with the layer's adapter added.

  `see(input, product)` returns the product to use for each of the adapter's matrices.
  """
  if name not in adapters:
    return y
  x, a, b = (z.astype(y.dtype) for z in (x, adapters[name]["a"], adapters[name]["b"]))
  low = see(x, x @ a)
  return y + see(low, low @ b) * jnp.asarray(lora.scale, y.dtype)


def split_trainable(params: Params) -> tuple[Params, Params]:
  """Splits parameters into (trainable, frozen): the adapters and the rest, or everything and nothing.

  `{**frozen, **trainable}` joins them again.
  """
  if "adapters" not in params:
    return params, {}
  return {"adapters": params["adapters"]}, {k: v for k, v in params.items() if k != "adapters"}


def merge_adapters(lora: LoRA, params: Params) -> Params:
  """Returns stacked float32 parameters of the plain policy that computes the same: W + (alpha / rank) A B.

  The sum is in float32 whatever W's dtype is: rounding to bfloat16 would lose most of a small update.
  """

  def merge(name, layer):
    if name not in params["adapters"]:
      return layer
    a, b = params["adapters"][name]["a"], params["adapters"][name]["b"]
    return {**layer, "kernel": layer["kernel"] + lora.scale * jnp.einsum("lir,lro->lio", a, b, precision="highest")}

  frozen = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {part: params[part] for part in ("ends", "layers")})
  return frozen | {"layers": {name: merge(name, layer) for name, layer in frozen["layers"].items()}}
