"""The policy: one decoder-only transformer for scoring, prefill and cached decode.

The layers are Flax NNX modules. They are split once into a graph definition and parameters; everything else is a
pure function of the parameters, a nested dict::

    {"ends":   {"embed": ..., "final_norm": ..., "head": ...},
     "layers": {"q": {"kernel": [L, D, H*d]}, ...}}          # stacked: scanned over in the learner

`unstack_layers` turns "layers" into a list of L dicts. Both forms run through the same code; the sampler prefers
the list, because a decode step then reads every weight in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from async_rl._validation import check_choice
from async_rl.models import _attention
from async_rl.models import _shared_attention
from async_rl.models._layers import Ends
from async_rl.models._layers import Layer
from async_rl.models._layers import Norms
from async_rl.models._lora import LoRA
from async_rl.models._lora import adapted
from async_rl.models._lora import init_adapters
from async_rl.models._model_config import ModelConfig
from async_rl.models._param_forms import Params
from async_rl.models._param_forms import as_used
from async_rl.models._param_forms import list_layers
from async_rl.models._param_forms import unstack_layers
from async_rl.models._sharding import ROWS
from async_rl.models._sharding import constrain
from async_rl.models._taps import Taps

Array = jax.Array
#: Of each layer the keys and the values, each [B, N, S, d]; with the backend "ragged" both in one array [B, n, S, w].
Cache = tuple[tuple[Array, ...], ...]

#: The intermediates of a layer that the backward pass does not recompute, by `Policy.remat`; `None` for all.
_SAVED: dict[str, tuple[str, ...] | None] = {
  "none": None,
  "activations": ("projection", "attention", "norm"),
  "projections": ("projection", "attention"),
  "attention": ("attention",),
  "full": (),
}
REMAT = tuple(_SAVED)
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Policy:
  """Computes a transformer as pure functions of its parameters; hashable, so it can be a static argument.

  Attributes:
    config: the architecture.
    dtype: the dtype of activations and of the weights at use, "float32", "bfloat16" or, not on TPUs, "float16". Norms,
      softmax, rotary angles and logits are float32 regardless. In float16, which rounds eight times as finely, sampler
      and learner agree better; activations beyond 65504 make a step that is skipped.
    attention: the backend of attention, see `async_rl.models.self_attention`. "ragged" is "splash" for whole rows, and
      for decode steps the TPU kernel that reads the filled part of the cache, see `cache_backend`.
    remat: the part of a layer that the backward pass recomputes, from fast to small: "none"; "activations", what enters
      the last matrix product; "projections", all but matrix products and attention; "attention", all but attention;
      "full", each layer. With the last two, the logits as well.
    mesh: the devices on which activations are laid out: rows over ("data", "fsdp"), heads, features and vocabulary
      over "tensor". Without it, the compiler may gather activations where gathering weights is cheaper.
    max_segments: the most segments of a row of `hidden`, padding included; `None` for any number, which is slower on
      GPUs, see `async_rl.models.self_attention`.
    lora: the adapters that `init` adds to the parameters, see `split_trainable`; `None` for none. Frozen parameters
      need no float32 master copy: they are kept `as_used`, which changes no result and halves their memory in bfloat16.
    residual_dtype: the dtype of the residual stream, to which every layer adds; `None` for `dtype`, or float32 with
      float16, in which it may not fit.
  """

  config: ModelConfig
  dtype: str = "bfloat16"
  attention: str = "auto"
  remat: str = "none"
  mesh: Mesh | None = None
  max_segments: int | None = None
  lora: LoRA | None = None
  residual_dtype: str | None = None

  def __post_init__(self):
    check_choice("remat", self.remat, REMAT)
    check_choice("dtype", self.dtype, DTYPES)
    if self.residual_dtype is not None:
      check_choice("residual_dtype", self.residual_dtype, DTYPES)
      if self.residual_dtype not in (self.dtype, "float32"):
        raise ValueError(
          f"*residual_dtype* must be 'float32' or *dtype*, got residual_dtype={self.residual_dtype!r} and "
          f"dtype={self.dtype!r}."
        )
    if self.dtype == "float16" and self._device.platform == "tpu":
      raise ValueError("dtype='float16' is not for TPUs, which multiply in bfloat16; choose dtype='bfloat16'.")
    _attention.resolve_backend(self.attention, self._device, self.config.head_dim)

  def init(self, key: Array) -> Params:
    """Returns random parameters, layers stacked: float32, but with `lora` the frozen ones are `as_used`."""
    keys = jax.random.split(key, self.config.num_layers + 1)

    def make(module: type, key: Array) -> Params:
      return nnx.to_pure_dict(nnx.split(module(self.config, self._dtype, nnx.Rngs(key)))[1])

    params = {"ends": make(Ends, keys[0]), "layers": jax.vmap(functools.partial(make, Layer))(keys[1:])}
    if self.lora is None:
      return params
    return as_used(params, self._dtype) | {"adapters": init_adapters(self.lora, params, keys[0])}

  def abstract(self) -> Params:
    """Returns the shapes and dtypes of `init`, without computing anything."""
    return jax.tree.map(lambda x: x, _abstract(self))  # a tree of its own, which may be changed

  def hidden(self, params: Params, tokens: Array, segments: Array, positions: Array, taps: Taps | None = None) -> Array:
    """Returns the final hidden states of whole rows.

    Args:
      params: the parameters, as from `init`, stacked or unstacked.
      tokens: int32 [B, T], the token ids.
      segments: int32 [B, T], the segments within which attention stays; padding is its own segment (0).
      positions: int32 [B, T], the position of each token within its segment.
      taps: what takes norms of gradients in the backward pass, see `squared_score_norms`.

    Returns:
      [B, T, D]; entry t predicts token t + 1.
    """
    return self._run(params, tokens, positions, lambda local: self._attend_rows(segments, local, keep=False), taps)[0]

  def prefill(self, params: Params, tokens: Array, segments: Array, positions: Array) -> tuple[Array, Cache]:
    """Returns `hidden`, and the keys and values of every layer, as `init_cache` arranges them, S = T."""
    return self._run(params, tokens, positions, lambda local: self._attend_rows(segments, local, keep=True))

  def decode(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    cache: Cache,
    prompts: _shared_attention.SharedPrompts | None = None,
    live: Array | None = None,
  ) -> tuple[Array, Cache]:
    """Runs one step of every row: puts token b at `positions[b]` and attends to all up to it.

    Args:
      params: the parameters, unstacked (stacked ones work, at the cost of a copy of every layer).
      tokens: int32 [B], one new token per row.
      positions: int32 [B], the position of each token, < S.
      cache: the keys and values of L layers, from `init_cache`.
      prompts: what several rows share; the cache then holds what follows it, from entry 0 on. Not changed.
      live: bool [B], the rows that are wanted; `None` for all. Of others the hidden states are finite and mean nothing;
        with the `cache_backend` "triton", nothing reads or changes their cache.

    Returns:
      The hidden states [B, D] that predict the next token, and the cache with this token in it.
    """
    params = unstack_layers(params)
    entries = positions if prompts is None else positions - prompts.starts
    entries = jnp.clip(entries, 0, cache[0][0].shape[2] - 1)  # rows that nothing lives in may have any position
    computed = entries if live is None else jnp.where(live, entries, -1)

    def attend(kv, shared, local, q, k, v, rotation):
      if self.cache_backend == "triton":
        from async_rl.models._fused_decode import rotate_store_and_attend  # takes a third of a second to import

        return rotate_store_and_attend(
          q, k, v, kv, computed, rotation,
          scale=self._scale,
          prompts=shared,
          mesh=self.mesh,
          interpret=self._device.platform == "cpu",
        )  # fmt: skip
      q, k = rotation(q, k)
      rows, new = jnp.arange(q.shape[0]), _attention.arrange(k, v, self._cache_arrays)
      kv = tuple(x.at[rows, :, entries].set(y.astype(x.dtype)) for x, y in zip(kv, new, strict=True))
      attention = functools.partial(_attention.cache_attention, backend=self.cache_backend)
      if shared is not None:
        attention = functools.partial(_shared_attention.shared_attention, prompts=shared)
      out = attention(
        q, kv, entries,
        num_kv_heads=self.config.num_kv_heads,
        scale=self._scale,
        window=self.config.sliding_window if local else None,
        softcap=self.config.attention_softcap,
        mesh=self.mesh,
      )  # fmt: skip
      return out, kv

    ends = self._ends(params)
    x = ends.encode(tokens, self.mesh).astype(self._residual_dtype)
    new_cache = []
    shared = [None] * len(cache) if prompts is None else [prompts._replace(layers=kv) for kv in prompts.layers]
    per_layer = zip(params["layers"], self._adapters(params), cache, shared, *self._per_layer(), strict=True)
    for layer, adapters, kv, own_prompts, local, frequency in per_layer:
      angles = positions[:, None] * frequency[None, :]
      x, kv = self._layer(layer, adapters)(x, angles, functools.partial(attend, kv, own_prompts, local))
      new_cache.append(kv)
    return ends.final_norm(x).astype(self.dtype), tuple(new_cache)

  def init_cache(self, batch: int, length: int) -> Cache:
    """Returns an empty cache of `batch` rows and `length` positions, of distinct arrays that can be donated.

    On TPUs, whose kernel reads pages of positions, `length` must be a multiple of 16.
    """
    shapes = [(batch, heads, length, width) for heads, width in self._cache_arrays]
    return tuple(tuple(jnp.zeros(shape, self._dtype) for shape in shapes) for _ in range(self.config.num_layers))

  def unembedding(self, params: Params) -> Array:
    """Returns the matrix [D, V] from hidden states to logits, in the parameters' dtype."""
    return self._ends(params).unembedding()

  def logits(self, params: Params, hidden: Array) -> Array:
    """Returns float32 logits [..., V] of hidden states [..., D], soft-capped; padding ids get -1e30."""
    kernel = self.unembedding(params).astype(self.dtype)
    return finish_logits(jnp.dot(hidden, kernel, preferred_element_type=jnp.float32), self.config)

  @property
  def attention_backend(self) -> str:
    """Returns the backend of whole-row attention on the policy's devices; what it cannot compute is left to "xla"."""
    return _attention.resolve_backend(self.attention, self._device, self.config.head_dim)

  @property
  def cache_backend(self) -> str:
    """Returns the backend of attention to a cache; see `cache_attention`."""
    c = self.config
    return _attention.cache_backend(
      self.attention_backend,
      dtype=self.dtype,
      head_dim=c.head_dim,
      num_kv_heads=c.num_kv_heads,
      window=c.sliding_window,
      softcap=c.attention_softcap,
      mesh=self.mesh,
    )

  # The rest is private.

  @property
  def _cache_arrays(self) -> tuple[tuple[int, int], ...]:
    c = self.config
    return _attention.cache_arrays(
      self.cache_backend, dtype=self.dtype, head_dim=c.head_dim, num_kv_heads=c.num_kv_heads, mesh=self.mesh
    )

  @property
  def _dtype(self) -> jnp.dtype:
    return jnp.dtype(self.dtype)

  @property
  def _residual_dtype(self) -> str:
    return self.residual_dtype or ("float32" if self.dtype == "float16" else self.dtype)

  @property
  def _scale(self) -> float:
    return self.config.query_scale or self.config.head_dim**-0.5

  def _ends(self, params: Params) -> Ends:
    return nnx.merge(_graphdef(Ends, self.config, self.dtype), params["ends"])

  def _layer(self, params: Params, adapters: Params | None, taps: Taps | None = None) -> Callable:
    layer = nnx.merge(_graphdef(Layer, self.config, self.dtype), params)
    if self.lora is None or adapters is None:
      return layer if taps is None else functools.partial(layer, adapt=functools.partial(self._tapped, taps))
    adapt = functools.partial(adapted, self.lora, adapters)
    return functools.partial(layer, adapt=adapt if taps is None else functools.partial(adapt, see=taps.product))

  def _tapped(self, taps: Taps, name: str, x: Array, y: Array) -> Array:
    return taps.product(x, y, bias=self.config.qkv_bias and name in "qkv")

  def _adapters(self, params: Params) -> Any:
    """Returns stacked adapters or `None`; for unstacked layers, a list of either."""
    if ("adapters" in params) != (self.lora is not None):
      has = "have" if "adapters" in params else "lack"
      raise ValueError(f"The parameters {has} adapters and the policy has lora={self.lora}; they must agree.")
    return params.get("adapters", [None] * self.config.num_layers if isinstance(params["layers"], list) else None)

  @property
  def _device(self) -> jax.Device:
    return jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]

  def _per_layer(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether each layer is local, bool [L], and its rotary frequencies, float32 [L, d / 2]."""
    return np.array([self.config.is_local(i) for i in range(self.config.num_layers)]), self.config.frequencies()

  def _attend_rows(self, segments: Array, local: Array | bool, keep: bool):
    def attend(q, k, v, rotation):
      q, k = rotation(q, k)
      # Heads that "tensor" does not divide are whole on every device; a projection may be split within a head.
      q, k, v = (constrain(x, self.mesh, ROWS, None, "tensor") for x in (q, k, v))
      out = _attention.self_attention(
        q, k, v, segments,
        scale=self._scale,
        window=self.config.sliding_window,
        local=local,
        softcap=self.config.attention_softcap,
        backend=self.attention_backend,
        max_segments=None if keep else self.max_segments,
        mesh=self.mesh,
      )  # fmt: skip
      out = checkpoint_name(out, "attention")
      return out, tuple(x.swapaxes(1, 2) for x in _attention.arrange(k, v, self._cache_arrays)) if keep else None

    return attend

  def _norms_of_rows(self) -> Norms:
    if self.attention_backend != "cudnn":
      return Norms()
    from async_rl.models._fused_norms import FusedNorms  # takes a third of a second to import

    return FusedNorms(self.mesh, self._dtype)

  def _run(
    self, params: Params, tokens: Array, positions: Array, make_attend: Callable,
    taps: Taps | None = None,
  ) -> tuple[Array, Any]:  # fmt: skip
    ends, norms = self._ends(params), self._norms_of_rows() if taps is None or self.lora else taps.norms()
    layers = (params["layers"], self._adapters(params), *self._per_layer())

    def body(x, inputs):
      layer, adapters, local, frequency = inputs
      angles = positions[..., None] * jnp.expand_dims(frequency, range(positions.ndim))
      x, extra = self._layer(layer, adapters, taps)(x, angles, make_attend(local), norms=norms)
      return constrain(x, self.mesh, ROWS), extra

    saved = _SAVED[self.remat]
    if saved is not None:
      policy = functools.partial(_is_saved, saved)
      body = jax.checkpoint(body, policy=policy, prevent_cse=isinstance(params["layers"], list))
    x = ends.encode(tokens, self.mesh).astype(self._residual_dtype)
    x = x if taps is None else x + taps.embedded
    if isinstance(params["layers"], list):
      extras = []
      for inputs in zip(*layers, strict=True):
        x, extra = body(x, inputs)
        extras.append(extra)
    else:
      x, extras = jax.lax.scan(body, x, layers)
      if extras is not None:
        extras = list_layers(extras, self.config.num_layers)
    return norms.apply(x, ends.final_norm).astype(self.dtype), tuple(extras) if extras is not None else None


def _is_saved(names: tuple[str, ...], primitive: Any, *avals: Any, **params: Any) -> bool:
  """Tells `jax.checkpoint` to save these names and, with "attention", all that cuDNN's backward pass needs.

  The name covers the output alone; for the sums of the softmax, the kernel's forward pass would run again.
  """
  if "attention" in names and primitive.name.startswith("dot_product_attention_fwd"):
    return True
  return jax.checkpoint_policies.save_only_these_names(*names)(primitive, *avals, **params)


def finish_logits(logits: Array, config: ModelConfig) -> Array:
  """Soft-caps logits and removes padding ids; shared by the sampler and the chunked head."""
  if config.final_softcap is not None:
    logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
  if config.vocab_limit is not None and config.vocab_limit < config.vocab_size:
    padding = jnp.arange(config.vocab_size) >= config.vocab_limit
    # Not the lowest float: divided by a temperature below 1 that is -inf, and 0 * -inf spoils the entropy.
    logits = jnp.where(jnp.expand_dims(padding, range(logits.ndim - 1)), -1e30, logits)
  return logits


def limit_vocabulary(policy: Policy, vocab_size: int) -> Policy:
  """Returns the policy with the rows of its table beyond a tokenizer's vocabulary marked as padding.

  Raises:
    ValueError: if the tokenizer has more tokens than the table has rows.
  """
  limit = min(vocab_size, policy.config.vocab_limit or vocab_size)
  return dataclasses.replace(policy, config=dataclasses.replace(policy.config, vocab_limit=limit))


@functools.lru_cache(maxsize=64)
def _abstract(policy: Policy) -> Params:
  return jax.eval_shape(policy.init, jax.random.key(0))


@functools.lru_cache(maxsize=64)
def _graphdef(module: type, config: ModelConfig, dtype: str):
  return nnx.split(nnx.eval_shape(lambda: module(config, jnp.dtype(dtype), nnx.Rngs(0))))[0]
