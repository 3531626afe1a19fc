"""Attention kernels: splash, interpreted, against plain attention; cuDNN, lowered; both split over a mesh."""

import contextlib
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models
from async_rl import rollout
from async_rl.models import _attention
from async_rl.models import _splash_attention

LENGTH = 150  # not a multiple of the kernel's block


def inputs(batch=2, heads=4, groups=2, width=16):
  random = np.random.default_rng(0)
  q, k, v = (random.normal(size=(batch, LENGTH, n, width)).astype(np.float32) for n in (heads, groups, groups))
  segments = np.zeros((batch, LENGTH), np.int32)
  segments[0, :140], segments[0, :60] = 2, 1
  segments[1, :100] = 1
  return q, k, v, segments


def value_and_gradient(segments, local, backend, mesh=None, **options):
  """A function of q, k and v: attention on tokens that are no padding, and the gradient of a fixed projection."""

  def loss(q, k, v):
    out = models.self_attention(q, k, v, segments, scale=0.3, local=local, backend=backend, mesh=mesh, **options)
    out = jnp.where(segments[:, :, None, None] > 0, out, 0.0)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize(
  ("local", "options"), [(True, {}), (True, {"window": 7, "softcap": 2.0}), (False, {"window": 7})]
)
def test_splash_equals_xla(local, options, monkeypatch):
  monkeypatch.setattr(_splash_attention, "_LARGEST_BLOCK", 128)  # so that there are several blocks
  *qkv, segments = inputs()
  (_, got), got_grads = value_and_gradient(segments, local, "splash", **options)(*qkv)
  (_, expected), expected_grads = value_and_gradient(segments, local, "xla", **options)(*qkv)
  np.testing.assert_allclose(got, expected, atol=2e-5)
  for a, b in zip(got_grads, expected_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("groups", [2, 1])  # one that "tensor" divides and one that it does not
def test_splash_on_a_mesh_equals_xla(groups):
  *qkv, segments = inputs(groups=groups)
  mesh = rollout.make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
  placed = jax.device_put(qkv, NamedSharding(mesh, PartitionSpec("fsdp")))
  (_, got), _ = value_and_gradient(segments, True, "splash", mesh, window=30)(*placed)
  (_, expected), _ = value_and_gradient(segments, True, "xla", window=30)(*qkv)
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_a_policy_can_use_splash():
  config = models.ModelConfig(
    vocab_size=64, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=32,
    sliding_window=5, global_every=2,
  )  # fmt: skip
  tokens = np.random.default_rng(0).integers(0, 64, (1, 20)).astype(np.int32)
  inputs = tokens, np.ones_like(tokens), np.arange(20, dtype=np.int32)[None]
  policy = functools.partial(models.Policy, config, dtype="float32")
  params = jax.jit(policy().init)(jax.random.key(0))

  def gradient(policy):
    loss = lambda p: jnp.mean(models.score(policy, p, *inputs).logprobs[:, 1:])
    return jax.jit(jax.value_and_grad(loss))(params)

  got, expected = gradient(policy(attention="splash", remat="attention")), gradient(policy(attention="xla"))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)


def cudnn_calls(text):
  """The operand shapes of each call of cuDNN's attention in a lowered program, e.g. "2x64x2x16xbf16"."""
  calls = re.findall(r"custom_call @__cudnn\$fmhaScaleBiasSoftmax\w*\(.*?: \(([^)]*)\) ->", text)
  return [re.findall(r"tensor<([^>]*)>", operands) for operands in calls]


@pytest.fixture
def cudnn_is_found(monkeypatch):
  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 90800)


@pytest.mark.usefixtures("cudnn_is_found")
@pytest.mark.parametrize("tensor", [1, 2])
def test_each_gpu_calls_cudnn_on_its_own_rows_and_heads(tensor):
  """Lowered for GPUs. The mask of a prefill is a constant, which the compiler would not split as it splits queries."""
  mesh = rollout.make_mesh(jax.devices()[:4], tensor=tensor)
  config = models.ModelConfig(
    vocab_size=64, d_model=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=32,
    sliding_window=5, global_every=2,
  )  # fmt: skip
  policy = models.Policy(config, attention="cudnn", mesh=mesh)
  rows = jax.ShapeDtypeStruct((8, 64), jnp.int32)

  def prefill(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(64)[None], tokens.shape)
    return policy.prefill(params, tokens, jnp.ones_like(tokens), positions)

  def gradient(params, tokens, segments):
    return jax.grad(lambda p: jnp.mean(models.score(policy, p, tokens, segments, segments).logprobs))(params)

  lower = lambda f, *x: jax.jit(f).trace(policy.abstract(), *x).lower(lowering_platforms=("cuda",)).as_text()
  queries, keys = f"{2 * tensor}x64x{4 // tensor}x16xbf16", f"{2 * tensor}x64x{2 // tensor}x16xbf16"
  operands = [queries, keys, keys, f"{2 * tensor}x1x64x64xbf16"]
  forward = cudnn_calls(lower(prefill, rows))
  assert forward == [operands] * 2  # a window, and none
  both = cudnn_calls(lower(gradient, rows, rows))
  assert len(both) == 4  # forward and backward
  assert all(call[:3] == operands[:3] for call in both)


def test_places_of_segments():
  segments = np.zeros((4, 12), np.int32)
  segments[1] = 1
  segments[2, :5], segments[2, 5:9] = 1, 2
  segments[3, :1], segments[3, 1:7], segments[3, 7:] = 1, 2, 3
  starts, lengths = _attention._places(segments, 3)
  np.testing.assert_array_equal(starts, [[0, -1, -1], [0, -1, -1], [0, 5, 9], [0, 1, 7]])
  np.testing.assert_array_equal(lengths, [[12, -1, -1], [12, -1, -1], [5, 4, 3], [1, 6, 5]])


@pytest.mark.usefixtures("cudnn_is_found")
@pytest.mark.parametrize("axes", [None, {"tensor": 2}])
def test_cudnn_is_told_the_places_of_segments_where_their_number_is_bounded(axes, monkeypatch):
  monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
  monkeypatch.setattr(_attention, "_packs_segments", lambda mesh: True)
  mesh = axes and rollout.make_mesh(jax.devices()[:4], **axes)
  q, k = (jax.ShapeDtypeStruct((4, 64, n, 16), jnp.bfloat16) for n in (4, 2))

  def calls(**options):
    def loss(q, k, v, segments):
      out = models.self_attention(q, k, v, segments, scale=0.3, backend="cudnn", mesh=mesh, **options)
      return jnp.sum(out.astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, jax.ShapeDtypeStruct((4, 64), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"custom_call @__cudnn\$fmha(\w*)\(.*?: \(([^)]*)\) ->", text)
    return {name: re.findall(r"tensor<(\w*xi32)>", operands) for name, operands in found}

  rows = 4 if mesh is None else 2
  places = [f"{rows}x3xi32"] * 2 + [f"{rows}x4xi32"] * 2  # lengths and starts, of queries and of keys
  assert calls(max_segments=3) == {"Softmax": places, "SoftmaxBackward": places}
  masked = {"ScaleBiasSoftmax": [], "ScaleBiasSoftmaxBackward": []}
  assert calls() == calls(max_segments=3, window=5, local=True) == masked


@pytest.mark.usefixtures("cudnn_is_found")
@pytest.mark.parametrize(
  ("dtype", "length", "width", "options"),
  [
    (jnp.float32, 64, 16, {}),
    (jnp.bfloat16, 63, 16, {}),
    (jnp.bfloat16, 64, 12, {}),
    (jnp.bfloat16, 64, 16, {"softcap": 5.0}),
    (jnp.bfloat16, 64, 16, None),
  ],
)
def test_shapes_that_cudnn_refuses_are_left_to_the_compiler(dtype, length, width, options):
  q = jax.ShapeDtypeStruct((2, length, 2, width), dtype)
  segments = jnp.ones((2, length), jnp.int32)
  attend = functools.partial(models.self_attention, segments=segments, scale=0.3, backend="cudnn", **(options or {}))
  text = jax.jit(lambda q, k, v: attend(q, k, v)).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
  assert len(cudnn_calls(text)) == (options is None)


@pytest.mark.parametrize(
  ("platform", "capability", "head_dim", "expected"),
  [
    ("cpu", None, 128, "xla"),
    ("tpu", None, 128, "ragged"),
    ("gpu", "7.5", 64, "xla"),
    ("gpu", "8.0", 128, "cudnn"),
    ("gpu", "8.9", 256, "xla"),
    ("gpu", "9.0", 256, "cudnn"),
    ("gpu", "10.0", 256, "cudnn"),
  ],
)
def test_auto_is_the_backend_of_the_device(platform, capability, head_dim, expected):
  device = types.SimpleNamespace(platform=platform, compute_capability=capability)
  assert _attention.resolve_backend("auto", device, head_dim) == expected
  assert _attention.resolve_backend("xla", device, head_dim) == "xla"
  with pytest.raises(ValueError, match="attention. must be one of .* got attention='flash'"):
    _attention.resolve_backend("flash", device, head_dim)


@pytest.mark.parametrize(
  ("width", "changes", "expected"),
  [
    *(
      (16, {}, "cudnn"),
      (32, {}, "triton"),
      (96, {}, "cudnn"),
      (256, {}, "triton"),
      (512, {}, "cudnn"),
      (20, {}, "xla"),
    ),
    *((64, {"dtype": "float16"}, "triton"), (64, {"dtype": "float32"}, "xla")),
    *((64, {"window": 8}, "xla"), (64, {"softcap": 5.0}, "xla")),
  ],
)
def test_decode_steps_on_gpus_use_the_kernel_that_takes_the_heads(width, changes, expected):
  heads = {"dtype": "bfloat16", "head_dim": width, "num_kv_heads": 2} | changes
  assert _attention.cache_backend("cudnn", **heads) == expected
  assert _attention.cache_backend("xla", **heads) == "xla"


def test_attention_to_a_cache_that_already_holds_the_token_is_not_for_the_kernel_that_puts_it_there():
  with pytest.raises(ValueError, match="backend. must be one of .* got backend='triton'"):
    models.cache_attention(None, (), None, num_kv_heads=1, scale=1.0, backend="triton")


@pytest.mark.parametrize(
  ("backend", "platform", "capability", "head_dim", "refused"),
  [
    ("ragged", "tpu", None, 128, None),
    ("ragged", "cpu", None, 128, "attention='ragged' needs TPUs, got a kind; choose 'auto'"),
    ("ragged", "gpu", "9.0", 128, "attention='ragged' needs TPUs"),
    ("cudnn", "gpu", "8.0", 128, None),
    ("cudnn", "gpu", "9.0", 256, None),
    ("cudnn", "gpu", "8.9", 256, "needs NVIDIA GPUs of compute capability 9.0 for heads of width 256"),
    ("cudnn", "gpu", "7.5", 64, "needs NVIDIA GPUs of compute capability 8.0 for heads of width 64"),
    ("cudnn", "tpu", None, 64, "attention='cudnn' needs NVIDIA GPUs"),
    ("splash", "cpu", None, 64, None),
    ("xla", "tpu", None, 64, None),
    ("auto", "cpu", None, 64, None),
  ],
)
def test_a_backend_that_does_not_run_on_the_device_is_refused(backend, platform, capability, head_dim, refused):
  device = types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="a kind")
  with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
    _attention.check_backend(backend, device, head_dim)
