"""The kernel of decode steps on GPUs, interpreted, against norms, rotation and scatters; alone and in a policy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import models
from async_rl import rollout
from async_rl.models import _attention
from async_rl.models._fused_decode import rotate_and_store
from async_rl.models._layers import Norms
from async_rl.models._layers import RMSNorm
from async_rl.models._layers import Rotation

ROWS, LENGTH, GROUPS, WIDTH = 4, 12, 2, 32
CONFIG = models.ModelConfig(
  vocab_size=48, d_model=64, num_layers=2, num_heads=6, num_kv_heads=GROUPS, head_dim=WIDTH, d_ff=64
)


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotation(normed):
  """Norms with scales of their own, about their offset, and angles."""
  norms = [RMSNorm(WIDTH, dataclasses.replace(CONFIG, norm_offset=1.0)) for _ in range(2)]
  for i, norm in enumerate(norms):
    norm.scale[...] = normal(i, WIDTH) / 10
  return Rotation(Norms(), *(norms if normed else (None, None)), normal(2, ROWS, WIDTH // 2))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("queries", [2, 3])  # of a key
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "tensor": 2}], ids=str)
def test_it_norms_rotates_and_stores(axes, queries, normed):
  q, k, v = normal(3, ROWS, queries * GROUPS, WIDTH), normal(4, ROWS, GROUPS, WIDTH), normal(5, ROWS, GROUPS, WIDTH)
  kv = normal(6, ROWS, GROUPS, LENGTH, WIDTH), normal(7, ROWS, GROUPS, LENGTH, WIDTH)
  entries, rows = np.array([0, 11, 3, 3], np.int32), np.arange(ROWS)
  mesh = axes and rollout.make_mesh(jax.devices()[:4], **axes)
  store = lambda *arrays: rotate_and_store(*arrays, rotation(normed), mesh=mesh, interpret=True)
  got_q, got = jax.jit(store)(q, k, v, kv, entries)
  expected_q, new_k = rotation(normed)(q, k)
  np.testing.assert_allclose(got_q, expected_q, atol=2e-6)
  for cache, new, old in zip(got, (new_k, v), kv, strict=True):
    expected = old.copy()
    expected[rows, :, entries] = new
    np.testing.assert_allclose(cache, expected, atol=2e-6)


@pytest.mark.usefixtures("lowers_for_gpus")
def test_it_becomes_one_kernel_that_writes_into_the_cache():
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  cache = array(ROWS, GROUPS, LENGTH, WIDTH)
  arrays = (array(ROWS, 4, WIDTH), array(ROWS, GROUPS, WIDTH), array(ROWS, GROUPS, WIDTH), (cache, cache))
  store = lambda *arrays: rotate_and_store(*arrays, rotation(normed=True))
  traced = jax.jit(store).trace(*arrays, jax.ShapeDtypeStruct((ROWS,), jnp.int32))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1
  assert text.count("output_operand_alias<") == 2


def attend_to_cache(q, k, v, positions, *, scale):
  """What cuDNN computes."""
  return _attention.cache_attention(q, (k, v), positions, num_kv_heads=GROUPS, scale=scale)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_policy_with_cudnn_decodes_with_it_as_without(qk_norm, monkeypatch):
  config = dataclasses.replace(CONFIG, qk_norm=qk_norm)
  policy = models.Policy(config, dtype="float32")
  params = models.unstack_layers(policy.init(jax.random.key(0)))
  cache = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), policy.init_cache(ROWS, LENGTH))
  step = params, np.arange(ROWS, dtype=np.int32), np.array([0, 11, 3, 3], np.int32), cache
  expected = jax.jit(policy.decode)(*step)
  monkeypatch.setattr(models.Policy, "cache_backend", "cudnn")
  monkeypatch.setattr(_attention, "_cudnn_cache_attention", attend_to_cache)
  traced = jax.jit(policy.decode).trace(*step)
  assert str(traced.jaxpr).count("name=rotate_and_store") == config.num_layers
  got = traced.lower().compile()(*step)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6), got, expected)
