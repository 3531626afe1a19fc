"""The TPU kernel of decode steps, interpreted, against plain attention over the same cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models
from async_rl import rollout
from async_rl.models import _attention
from async_rl.models import _ragged_attention

WIDTH = 128  # of those heads that need no filling up

pytestmark = pytest.mark.usefixtures("interpreted_kernels")


def inputs(batch=5, heads=4, groups=2, length=48, width=WIDTH, dtype=jnp.float32):
  """Queries, a cache whose later entries are arbitrary, and positions: of a free row, within and at the end."""
  random = np.random.default_rng(0)
  q = random.normal(size=(batch, heads, width))
  k, v = random.normal(size=(2, batch, groups, length, width))
  positions = np.resize([0, length - 1, 7, length // 2, 15, length - 17, length // 3], batch).astype(np.int32)
  return jnp.asarray(q, dtype), jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(positions)


def both(q, k, v, positions, mesh=None, **options):
  """The kernel's result and the one of plain attention."""
  attend = functools.partial(models.cache_attention, num_kv_heads=k.shape[1], scale=0.1, **options)
  sizes = {"dtype": k.dtype, "head_dim": k.shape[3], "num_kv_heads": k.shape[1]}
  arrays = _attention.cache_arrays("ragged", **sizes, mesh=mesh)
  joined = tuple(x.swapaxes(1, 2) for x in _attention.arrange(k.swapaxes(1, 2), v.swapaxes(1, 2), arrays))
  got = jax.jit(functools.partial(attend, backend="ragged", mesh=mesh))(q, joined, positions)
  expected = attend(q, (k, v), positions)
  return np.asarray(got, np.float32), np.asarray(expected, np.float32)


@pytest.mark.parametrize(
  ("shape", "options"),
  [
    ({}, {}),
    ({"heads": 2, "groups": 2}, {}),  # a query for every key
    ({"groups": 1, "length": 16}, {}),
    ({"heads": 9, "groups": 3, "width": 64}, {}),  # filled up to 12 heads, 4 of keys and 128 wide
    ({"batch": 9, "length": 272}, {}),  # two blocks, the second of one page
    ({"length": 272}, {"window": 9, "softcap": 2.0}),
    ({"batch": 9, "length": 1040}, {"window": 300}),  # 20 of 65 pages, from the first to the last ones
  ],
  ids=str,
)
def test_it_equals_plain_attention(shape, options):
  np.testing.assert_allclose(*both(*inputs(**shape), **options), atol=2e-6)


def test_it_equals_plain_attention_in_bfloat16():
  got, expected = both(*inputs(dtype=jnp.bfloat16))
  np.testing.assert_allclose(got, expected, atol=0.02)


def test_rows_of_more_pages_than_its_table_holds_are_split(monkeypatch):
  monkeypatch.setattr(_ragged_attention, "_LARGEST_TABLE", 2 * 128)
  np.testing.assert_allclose(*both(*inputs()), atol=2e-6)  # of two, two and one rows


@pytest.mark.parametrize("groups", [2, 1])  # one that "tensor" divides and one that it does not
def test_each_device_runs_it_on_its_own_rows_and_heads(groups):
  q, k, v, positions = inputs(batch=4, groups=groups)
  mesh = rollout.make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
  rows = NamedSharding(mesh, PartitionSpec("fsdp"))
  np.testing.assert_allclose(*both(*jax.device_put((q, k, v, positions), rows), mesh=mesh), atol=2e-6)


@pytest.mark.parametrize(
  ("heads", "width", "dtype", "tensor", "expected"),
  [
    (8, 128, "bfloat16", 1, (16, 128)),
    (8, 128, "bfloat16", 4, (16, 128)),
    (24, 128, "bfloat16", 1, (48, 128)),
    (8, 64, "bfloat16", 1, (16, 128)),
    (3, 64, "bfloat16", 1, (8, 128)),
    (3, 64, "bfloat16", 4, (8, 128)),  # whole on each of four devices
    (12, 128, "bfloat16", 1, (32, 128)),
    (12, 128, "bfloat16", 2, None),  # 6 on each of two devices
    (1, 256, "bfloat16", 4, (2, 256)),
    (4, 256, "bfloat16", 1, None),
    (4, 256, "bfloat16", 4, (8, 256)),
    (3, 128, "float32", 1, (8, 128)),
    (8, 128, "float32", 1, None),
    (1, 256, "float32", 1, None),
  ],
)
def test_the_cache_is_filled_up_or_what_does_not_suit_is_left_to_the_compiler(heads, width, dtype, tensor, expected):
  mesh = rollout.make_mesh(jax.devices()[:tensor], tensor=tensor)
  config = models.ModelConfig(
    vocab_size=32, d_model=32, num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=width, d_ff=32
  )
  policy = models.Policy(config, dtype=dtype, attention="ragged", mesh=mesh)
  assert policy.cache_backend == ("ragged" if expected else "xla")
  shapes = [x.shape for x in policy.init_cache(2, 16)[0]]
  assert shapes == ([(2, expected[0], 16, expected[1])] if expected else [(2, heads, 16, width)] * 2)
  assert dataclasses.replace(policy, attention="splash").cache_backend == "xla"


def test_decoding_with_it_continues_from_a_prefill():
  """With a window in one of two layers; the rows are at different positions."""
  config = models.ModelConfig(
    vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=WIDTH, d_ff=32, qk_norm=True,
    sliding_window=5, global_every=2,
  )  # fmt: skip
  tokens = np.random.default_rng(0).integers(0, 64, (2, 20)).astype(np.int32)
  rows = tokens, np.ones_like(tokens), np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
  at = np.array([5, 19], np.int32)

  def decoded(attention):
    policy = models.Policy(config, dtype="float32", attention=attention)
    params = jax.jit(policy.init)(jax.random.key(0))
    full, kv = jax.jit(policy.prefill)(params, *rows)
    cache = jax.tree.map(lambda new, old: new.at[:, :, :20].set(old), policy.init_cache(2, 32), kv)
    hidden, _ = jax.jit(policy.decode)(models.unstack_layers(params), tokens[[0, 1], at], at, cache)
    np.testing.assert_allclose(hidden, full[np.arange(2), at], atol=1e-5)
    return jax.nn.log_softmax(policy.logits(params, hidden))

  np.testing.assert_allclose(decoded("ragged"), decoded("xla"), atol=1e-5)
