"""The kernels of norms on GPUs, interpreted, against plain ones and their autodiff; and that they lower for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import rollout
from async_rl.models import _layers
from async_rl.models._fused_norms import add_and_norm
from async_rl.models._fused_norms import norm_and_rotate

EPS = 1e-3
CPU = {"eps": EPS, "interpret": True}


def normal(*shape):
  return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def normed(x, scale):
  return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * jnp.expand_dims(scale, range(x.ndim - 1))


def assert_same(f, g, *arguments):
  """Values and gradients of a fixed projection agree."""

  def loss(f):
    def project(*arguments):
      outs = jax.tree.leaves(f(*arguments))
      return sum(jnp.sum(out * jnp.cos(i + jnp.arange(out.size)).reshape(out.shape)) for i, out in enumerate(outs))

    return jax.jit(jax.value_and_grad(project, argnums=tuple(range(len(arguments)))))

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-5), loss(f)(*arguments), loss(g)(*arguments)
  )


MESHES = [None, {"fsdp": 2, "tensor": 2}]


def mesh_of(axes):
  return axes and rollout.make_mesh(jax.devices()[:4], **axes)


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("heads", [6, 1])  # some that "tensor" divides, of which two make a block, and one
def test_norm_and_rotation(heads, axes):
  x, scale, angles = normal(4, 12, heads, 32), 1 + normal(32) / 10, normal(4, 12, 16)
  fused = lambda x, scale: norm_and_rotate(x, scale, angles, mesh=mesh_of(axes), **CPU)
  assert_same(fused, lambda x, scale: _layers.rotated(normed(x, scale), angles), x, scale)


@pytest.mark.parametrize("axes", MESHES)
def test_sum_and_norm(axes):
  x, h, scale = normal(4, 12, 64), normal(4, 12, 64)[::-1], 1 + normal(64) / 10
  mesh = mesh_of(axes)
  fused = lambda x, h, scale: add_and_norm(x, h, scale, uses=2, mesh=mesh, **CPU)
  assert_same(fused, lambda x, h, scale: (x + h, *[normed(x + h, scale)] * 2), x, h, scale)
  fused = lambda x, scale: add_and_norm(x, None, scale, uses=3, mesh=mesh, **CPU)
  assert_same(fused, lambda x, scale: (x, *[normed(x, scale)] * 3), x, scale)


def test_a_residual_stream_can_have_another_dtype():
  x, h, scale = normal(4, 12, 64), normal(4, 12, 64).astype(np.float16), 1 + normal(64) / 10
  loss = lambda x, h: sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in fused(x, h))
  fused = lambda x, h: add_and_norm(x, h, scale, uses=1, dtype=jnp.float16, **CPU)
  assert [y.dtype for y in fused(x, h)] == [jnp.float32, jnp.float16]
  np.testing.assert_array_equal(fused(x, h)[0], x + h.astype(np.float32))
  dx, dh = jax.grad(loss, argnums=(0, 1))(x, h)
  assert (dx.dtype, dh.dtype) == (jnp.float32, jnp.float16)
  np.testing.assert_array_equal(dx.astype(np.float16), dh)


@pytest.mark.usefixtures("lowers_for_gpus")
def test_they_become_one_kernel_for_each_pass():
  def loss(x, heads, scale, angles):
    x, y = add_and_norm(x, x, scale, uses=1, eps=EPS)
    return jnp.sum(x * y) + jnp.sum(norm_and_rotate(heads, scale[:32], angles, eps=EPS) ** 2)

  shapes = ((4, 12, 64), jnp.bfloat16), ((4, 12, 2, 32), jnp.bfloat16), ((64,), jnp.float32), ((4, 12, 16), jnp.float32)
  traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 4
