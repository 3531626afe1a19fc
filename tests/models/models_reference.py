"""A slow and obvious transformer in float64 numpy, one sequence at a time, and the configs that the tests share."""

import math

import numpy as np

from async_rl.models import ModelConfig
from async_rl.models import RopeScaling

LLAMA = ModelConfig(
  vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48,
  rope_scaling=RopeScaling("llama3", factor=4.0, original_length=16),
)  # fmt: skip
#: Every option at once.
EVERYTHING = ModelConfig(
  vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=48,
  tie_embeddings=True, vocab_limit=50, qkv_bias=True, qk_norm=True, activation="gelu", norm_offset=1.0,
  embed_scale=True, post_norms=True, query_scale=0.3, attention_softcap=2.0, final_softcap=3.0, sliding_window=4,
  global_every=2, rope_theta_local=100.0, rope_scaling=RopeScaling("linear", factor=2.0),
)  # fmt: skip
CONFIGS = {"llama": LLAMA, "everything": EVERYTHING}


def logits(config, params, tokens):
  """float64 [T, V] next-token logits of one sequence; padding ids get -inf. `params` as numpy, layers stacked."""
  c = config
  ends = params["ends"]
  x = ends["embed"][tokens] * (math.sqrt(c.d_model) if c.embed_scale else 1.0)
  for i in range(c.num_layers):
    layer = {k: {n: a[i].astype(np.float64) for n, a in v.items()} for k, v in params["layers"].items()}
    h = _norm(c, x, layer["attention_norm"])
    h = _attention(c, h, layer, i)
    x = x + (_norm(c, h, layer["attention_post_norm"]) if c.post_norms else h)
    h = _norm(c, x, layer["mlp_norm"])
    gate = h @ layer["gate"]["kernel"]
    if c.activation == "silu":
      gate = gate / (1 + np.exp(-gate))
    else:
      gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    h = (gate * (h @ layer["up"]["kernel"])) @ layer["down"]["kernel"]
    x = x + (_norm(c, h, layer["mlp_post_norm"]) if c.post_norms else h)
  x = _norm(c, x, ends["final_norm"])
  out = x @ (ends["embed"].T if c.tie_embeddings else ends["head"]).astype(np.float64)
  if c.final_softcap:
    out = c.final_softcap * np.tanh(out / c.final_softcap)
  if c.vocab_limit:
    out[:, c.vocab_limit :] = -np.inf
  return out


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _norm(c, x, weights):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c.norm_eps) * (weights["scale"] + c.norm_offset)


def _linear(x, weights):
  return x @ weights["kernel"] + weights.get("bias", 0.0)


def _attention(c, x, layer, index):
  local = c.sliding_window is not None and (index + 1) % c.global_every != 0
  theta = c.rope_theta_local if local and c.rope_theta_local else c.rope_theta
  scaling = None if local and c.rope_theta_local else c.rope_scaling
  length = len(x)
  out = np.zeros((length, c.num_heads, c.head_dim))
  q, k, v = (_linear(x, layer[n]).reshape(length, -1, c.head_dim) for n in "qkv")
  if c.qk_norm:
    q, k = _norm(c, q, layer["q_norm"]), _norm(c, k, layer["k_norm"])
  q, k = (np.stack([_rope(c, row, t, theta, scaling) for t, row in enumerate(a)]) for a in (q, k))
  scale = c.query_scale or 1 / math.sqrt(c.head_dim)
  for h in range(c.num_heads):
    group = h // (c.num_heads // c.num_kv_heads)
    for t in range(length):
      first = max(0, t - c.sliding_window + 1) if local else 0
      a = k[first : t + 1, group] @ q[t, h] * scale
      if c.attention_softcap:
        a = c.attention_softcap * np.tanh(a / c.attention_softcap)
      out[t, h] = np.exp(log_softmax(a)) @ v[first : t + 1, group]
  return out.reshape(length, -1) @ layer["o"]["kernel"]


def _rope(c, heads, t, theta, scaling):
  """heads [H, d] at position t: dimension i and i + d/2 are turned together."""
  half = c.head_dim // 2
  out = np.zeros_like(heads)
  for i in range(half):
    angle = t * _frequency(theta ** (-2 * i / c.head_dim), scaling)
    a, b = heads[:, i], heads[:, i + half]
    out[:, i] = a * math.cos(angle) - b * math.sin(angle)
    out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
  return out


def _frequency(f, scaling):
  if scaling is None:
    return f
  if scaling.kind == "linear":
    return f / scaling.factor
  wavelength = 2 * math.pi / f
  if wavelength < scaling.original_length / scaling.high_frequency_factor:
    return f
  if wavelength > scaling.original_length / scaling.low_frequency_factor:
    return f / scaling.factor
  smooth = (scaling.original_length / wavelength - scaling.low_frequency_factor) / (
    scaling.high_frequency_factor - scaling.low_frequency_factor
  )
  return (1 - smooth) * f / scaling.factor + smooth * f
