"""The splash kernel, interpreted, against plain attention: values, gradients, windows, soft-caps, segments, a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models
from async_rl.models import _attention
from async_rl.models import _splash

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
  monkeypatch.setattr(_splash, "_LARGEST_BLOCK", 128)  # so that there are several blocks
  *qkv, segments = inputs()
  (_, got), got_grads = value_and_gradient(segments, local, "splash", **options)(*qkv)
  (_, expected), expected_grads = value_and_gradient(segments, local, "xla", **options)(*qkv)
  np.testing.assert_allclose(got, expected, atol=2e-5)
  for a, b in zip(got_grads, expected_grads, strict=True):
    np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("groups", [2, 1])  # one that "tensor" divides and one that it does not
def test_splash_on_a_mesh_equals_xla(groups):
  *qkv, segments = inputs(batch=4 // 2 * 2, groups=groups)
  mesh = jax.make_mesh(
    (1, 2, 2), ("data", "fsdp", "tensor"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 3
  )
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


def test_auto_is_the_backend_of_the_platform():
  kinds = {platform: _attention.resolve_backend("auto", platform) for platform in ("cpu", "gpu", "tpu")}
  assert kinds == {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"}
  assert _attention.resolve_backend("xla", "tpu") == "xla"
