"""The splash kernel, interpreted, against plain attention: values, gradients, windows, soft-caps, segments, a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import Mesh
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


@pytest.fixture
def no_compilation_cache():
  """Programs for absent devices can be written to the cache but not read back."""
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.usefixtures("no_compilation_cache")
def test_a_sharded_policy_compiles_for_tpus(monkeypatch):
  pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no cloud machine's metadata server to ask
  topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
  axes = {"axis_names": ("data", "fsdp", "tensor"), "axis_types": (AxisType.Auto,) * 3}
  mesh = Mesh(np.array(topology.devices).reshape(1, 2, 2), **axes)
  config = models.ModelConfig(
    vocab_size=256, d_model=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64, d_ff=128,
    sliding_window=100, global_every=2,
  )  # fmt: skip
  policy = models.Policy(config, mesh=mesh, remat="attention")
  shardings = models.param_shardings(policy.abstract(), mesh)
  abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  params = jax.tree.map(abstract, policy.abstract(), shardings)
  rows = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(models.ROWS)))
  loss = lambda p, *x: jnp.mean(models.score(policy, p, *x).logprobs)
  program = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, rows, rows, rows).compile().as_text()
  # Forward, dq and dkv for each kind of layer, and no forward again: remat="attention" kept what it gave.
  assert program.count('custom_call_target="tpu_custom_call"') == 6


def test_auto_is_the_backend_of_the_platform():
  kinds = {platform: _attention.resolve_backend("auto", platform) for platform in ("cpu", "gpu", "tpu")}
  assert kinds == {"cpu": "xla", "gpu": "cudnn", "tpu": "splash"}
  assert _attention.resolve_backend("xla", "tpu") == "xla"
