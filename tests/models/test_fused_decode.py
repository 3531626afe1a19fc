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


def step_slowly(q, k, v, kv, entries, rotation, scale, prompts=None):
  """Attention's output, and the cache with the token, in float64; row by row and head by head."""

  def rotated(x, norm):
    x = x.astype(np.float64)
    if norm is not None:
      x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * np.asarray(norm.factors)
    (a, b), angles = np.split(x, 2, -1), rotation.angles[:, None].astype(np.float64)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

  q, k, kv = rotated(q, rotation.q_norm), rotated(k, rotation.k_norm), [x.astype(np.float64) for x in kv]
  out = np.zeros_like(q)
  for row in np.flatnonzero(entries >= 0):
    for cache, new in zip(kv, (k, v), strict=True):
      cache[row, :, entries[row]] = new[row]
    for head in range(q.shape[1]):
      group = head // (q.shape[1] // k.shape[1])
      seen = [x[row, group, : entries[row] + 1] for x in kv]
      if prompts is not None:
        prompt = np.flatnonzero((prompts.rows == row).any(1))[0]
        before = [x[prompt, group, : prompts.lengths[prompt]] for x in prompts.layers]
        seen = [np.concatenate(parts) for parts in zip(before, seen, strict=True)]
      weights = np.exp(scale * seen[0] @ q[row, head])
      out[row, head] = weights @ seen[1] / weights.sum()
  return out, kv


def make_step(queries, length=LENGTH):
  q, k, v = normal(3, ROWS, queries * GROUPS, WIDTH), normal(4, ROWS, GROUPS, WIDTH), normal(5, ROWS, GROUPS, WIDTH)
  return q, k, v, (normal(6, ROWS, GROUPS, length, WIDTH), normal(7, ROWS, GROUPS, length, WIDTH))


def make_prompts(devices):
  """Four prompts of up to three samples: the first has rows 1 and 0, the third row 3; the others none, or nothing."""
  rows = np.array([[1, ROWS, 0], [ROWS] * 3, [ROWS, 3, ROWS], [2, ROWS, ROWS]], np.int32)
  if devices:  # that have half of the rows and of the prompts each
    rows = np.where(rows < ROWS, rows % (ROWS // 2), ROWS // 2).astype(np.int32)
  layers = normal(8, 4, GROUPS, 40, WIDTH), normal(9, 4, GROUPS, 40, WIDTH)
  nothing = np.zeros(ROWS, np.int32)
  return models.SharedPrompts(layers, np.array([40, 0, 17, 0], np.int32), rows, nothing, nothing)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("queries", "normed", "scale"), [(1, False, 9.0), (3, True, 0.3), (17, True, 0.3)])  # of a key
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_it_stores_the_token_and_attends_to_all_so_far(shared, axes, queries, normed, scale, splits, monkeypatch):
  monkeypatch.setattr(_fused_decode, "_BLOCK", 8)
  monkeypatch.setattr(_fused_decode, "_QUERIES", 40)  # 3 queries of all samples, or 17 of two of them
  monkeypatch.setattr(_fused_decode, "_SPLIT", 32 // splits)
  length = 32 if splits > 1 else 31
  entries = np.array([0, length - 1, -1, 17], np.int32)
  mesh = axes and rollout.make_mesh(jax.devices()[:4], **axes)
  step = make_step(queries, length)
  attend = lambda *arrays: rotate_store_and_attend(
    *arrays[:-1], rotation(normed), scale=scale, prompts=arrays[-1], mesh=mesh, interpret=True
  )
  given = *step, entries, make_prompts(axes) if shared else None
  traced = jax.jit(attend).trace(*given)
  assert f"grid=({GROUPS // (2 if axes else 1)}, {ROWS // (2 if axes else 1)}, {splits})" in str(traced.jaxpr)
  out, kv = traced.lower().compile()(*given)
  expected = step_slowly(*step, entries, rotation(normed), scale, make_prompts(None) if shared else None)
  for x, y in zip((out, *kv), (expected[0], *expected[1]), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4 if scale > 1 else 3e-6)  # with logits of hundreds, 2^logit overflows


@pytest.mark.parametrize(
  ("enough", "programs", "length", "expected"),
  [
    (256, 8 * 8, 576, 4),
    (256, 32 * 8, 896, 1),
    (512, 32 * 8, 896, 2),
    (512, 64 * 8, 576, 1),
    (512, 1, 320, 2),
    (512, 1, 100_000, 16),
    (512, 600, 99, 1),
  ],
)
def test_rows_are_split_where_they_are_few_and_long(enough, programs, length, expected):
  assert _fused_decode._count_splits(enough, programs, length) == expected


def test_it_reads_nothing_behind_a_row_s_entry_nor_of_rows_that_are_not_wanted():
  entries = np.array([0, 7, -1, 3], np.int32)
  q, k, v, kv = make_step(2)
  spoiled = tuple(np.where(np.arange(LENGTH)[:, None] < entries[:, None, None, None], x, np.nan) for x in kv)
  attend = lambda *arrays: rotate_store_and_attend(*arrays, entries, rotation(True), scale=0.3, interpret=True)
  (out, _), (expected, _) = (jax.jit(attend)(q, k, v, x) for x in (spoiled, kv))
  np.testing.assert_array_equal(out, expected)
  assert np.isfinite(out).all()


@pytest.mark.usefixtures("lowers_for_gpus")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("length", [LENGTH, 1024])  # rows in one piece and split
def test_it_becomes_kernels_for_gpus_that_write_into_the_cache(length, shared):
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  cache = array(ROWS, GROUPS, length, WIDTH)
  arrays = (array(ROWS, 4, WIDTH), array(ROWS, GROUPS, WIDTH), array(ROWS, GROUPS, WIDTH), (cache, cache))
  prompts = make_prompts(None)._replace(layers=(array(4, GROUPS, 40, WIDTH),) * 2) if shared else None
  step = lambda *arrays: rotate_store_and_attend(*arrays[:-1], rotation(True), scale=0.3, prompts=arrays[-1])
  traced = jax.jit(step).trace(*arrays, jax.ShapeDtypeStruct((ROWS,), jnp.int32), prompts)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == (2 if shared else 1)
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
  monkeypatch.setattr(models.Policy, "cache_backend", "triton")
  traced = jax.jit(policy.decode).trace(*step)
  assert str(traced.jaxpr).count("name=rotate_store_and_attend") == 1  # in a function that all layers call
  hidden, got = traced.lower().compile()(*step)
  assert np.isfinite(hidden).all()
  wanted = lambda hidden, cache: jax.tree.map(lambda x: x[live], (hidden, cache))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6), wanted(hidden, got), wanted(*expected))
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[2], y[2]), got, cache)
