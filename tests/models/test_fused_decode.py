"""The kernel of decode steps on GPUs, interpreted, against a slow form of it in float64; alone and in a policy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import models
from async_rl import rollout
from async_rl.models import _fused_decode
from async_rl.models._fused_decode import rotate_and_store
from async_rl.models._fused_decode import rotate_store_and_attend
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


def step_slowly(q, k, v, kv, entries, rotation, scale):
  """Rotated queries, attention's output, and the cache with the token, in float64; row by row and head by head."""

  def rotated(x, norm):
    x = x.astype(np.float64)
    if norm is not None:
      x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * np.asarray(norm.factors)
    (a, b), angles = np.split(x, 2, -1), rotation.angles[:, None].astype(np.float64)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

  q, k, kv = rotated(q, rotation.q_norm), rotated(k, rotation.k_norm), [x.astype(np.float64) for x in kv]
  out = np.zeros_like(q)
  for row, entry in enumerate(entries):
    if entry < 0:
      q[row] = 0
      continue
    for cache, new in zip(kv, (k, v), strict=True):
      cache[row, :, entry] = new[row]
    for head in range(q.shape[1]):
      keys, values = (x[row, head // (q.shape[1] // k.shape[1]), : entry + 1] for x in kv)
      weights = np.exp(scale * keys @ q[row, head])
      out[row, head] = weights @ values / weights.sum()
  return q, out, kv


def make_step(queries, length=LENGTH):
  q, k, v = normal(3, ROWS, queries * GROUPS, WIDTH), normal(4, ROWS, GROUPS, WIDTH), normal(5, ROWS, GROUPS, WIDTH)
  return q, k, v, (normal(6, ROWS, GROUPS, length, WIDTH), normal(7, ROWS, GROUPS, length, WIDTH))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("queries", [2, 3])  # of a key
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "tensor": 2}], ids=str)
def test_it_norms_rotates_and_stores(axes, queries, normed):
  entries = np.array([0, 11, -1, 3], np.int32)
  mesh = axes and rollout.make_mesh(jax.devices()[:4], **axes)
  step = make_step(queries)
  store = lambda *arrays: rotate_and_store(*arrays, rotation(normed), mesh=mesh, interpret=True)
  got_q, got = jax.jit(store)(*step, entries)
  expected_q, _, expected = step_slowly(*step, entries, rotation(normed), 1.0)
  for x, y in zip((got_q, *got), (expected_q, *expected), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("queries", [1, 3, 17])  # of a key
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "tensor": 2}], ids=str)
def test_it_attends_to_what_was_there_and_to_the_token(axes, queries, splits, monkeypatch):
  monkeypatch.setattr(_fused_decode, "BLOCK", 8)
  monkeypatch.setattr(_fused_decode, "_SPLIT", 32 // splits)
  length = 32 if splits > 1 else 31  # at most one more than whole blocks, and a block that is not whole
  entries = np.array([0, length - 1, -1, 17], np.int32)
  mesh = axes and rollout.make_mesh(jax.devices()[:4], **axes)
  step = make_step(queries, length)
  attend = lambda *arrays: rotate_store_and_attend(*arrays, rotation(True), scale=0.3, mesh=mesh, interpret=True)
  traced = jax.jit(attend).trace(*step, entries)
  assert f"grid=({GROUPS // (2 if axes else 1)}, {ROWS // (2 if axes else 1)}, {splits})" in str(traced.jaxpr)
  got_out, got = traced.lower().compile()(*step, entries)
  _, expected_out, expected = step_slowly(*step, entries, rotation(True), 0.3)
  for x, y in zip((got_out, *got), (expected_out, *expected), strict=True):
    np.testing.assert_allclose(x, y, atol=3e-6)


def test_it_reads_nothing_behind_a_row_s_entry_nor_of_rows_that_are_not_wanted():
  entries = np.array([0, 7, -1, 3], np.int32)
  q, k, v, kv = make_step(2)
  spoiled = tuple(np.where(np.arange(LENGTH)[:, None] < entries[:, None, None, None], x, np.nan) for x in kv)
  attend = lambda *arrays: rotate_store_and_attend(*arrays, entries, rotation(True), scale=0.3, interpret=True)
  (out, _), (expected, _) = (jax.jit(attend)(q, k, v, x) for x in (spoiled, kv))
  np.testing.assert_array_equal(out, expected)
  assert np.isfinite(out).all()


@pytest.mark.usefixtures("lowers_for_gpus")
@pytest.mark.parametrize("kernel", [rotate_and_store, functools.partial(rotate_store_and_attend, scale=0.3)])
@pytest.mark.parametrize("length", [LENGTH, 1024])  # rows in one piece and split
def test_it_becomes_one_kernel_that_writes_into_the_cache(kernel, length):
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  cache = array(ROWS, GROUPS, length, WIDTH)
  arrays = (array(ROWS, 4, WIDTH), array(ROWS, GROUPS, WIDTH), array(ROWS, GROUPS, WIDTH), (cache, cache))
  step = lambda *arrays: kernel(*arrays, rotation(normed=True))
  traced = jax.jit(step).trace(*arrays, jax.ShapeDtypeStruct((ROWS,), jnp.int32))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1
  assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_policy_on_gpus_decodes_with_it_as_without(qk_norm, monkeypatch):
  config = dataclasses.replace(CONFIG, qk_norm=qk_norm)
  policy = models.Policy(config, dtype="float32")
  params = models.unstack_layers(policy.init(jax.random.key(0)))
  cache = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), policy.init_cache(ROWS, LENGTH))
  live = np.array([True, True, False, True])
  step = params, np.arange(ROWS, dtype=np.int32), np.array([0, 11, 3, 3], np.int32), cache, None, live
  expected = jax.jit(policy.decode)(*step)
  monkeypatch.setattr(models.Policy, "cache_backend", "cudnn")
  traced = jax.jit(policy.decode).trace(*step)
  assert str(traced.jaxpr).count("name=rotate_store_and_attend") == config.num_layers
  hidden, got = traced.lower().compile()(*step)
  assert np.isfinite(hidden).all()
  wanted = lambda hidden, cache: jax.tree.map(lambda x: x[live], (hidden, cache))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6), wanted(hidden, got), wanted(*expected))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[2], y[2]), got, cache)
