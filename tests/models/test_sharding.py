"""Sharding rules, and that a sharded policy computes the same with an even share of work on every device."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from async_rl import models
from async_rl.models import _sharding
from async_rl.models import _token_stats


def make_mesh(*shape):
  return models.named_mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape))


def batch(rows, length):
  tokens = np.random.default_rng(0).integers(0, 50, (rows, length)).astype(np.int32)
  return tokens, np.ones_like(tokens), np.tile(np.arange(length, dtype=np.int32), (rows, 1))


def compiled_gradient(policy, mesh, rows, length):
  """A compiled gradient of the mean log-probability, its parameters and its inputs, on `mesh` or on one device."""

  def loss(params, *inputs):
    return jnp.mean(models.score(policy, params, *inputs, chunk=4).logprobs[:, 1:])

  params, inputs = jax.jit(policy.init)(jax.random.key(0)), batch(rows, length)
  shardings = None
  if mesh is not None:
    shardings = models.param_shardings(policy.abstract(), mesh)
    params = jax.device_put(params, shardings)
    inputs = jax.device_put(inputs, NamedSharding(mesh, P(models.ROWS)))
  step = jax.jit(jax.value_and_grad(loss), out_shardings=None if mesh is None else (None, shardings))
  return step.lower(params, *inputs).compile(), params, inputs


@pytest.mark.parametrize("name", reference.CONFIGS)
def test_sharded_equals_unsharded(name):
  policy, mesh = models.Policy(reference.CONFIGS[name], dtype="float32"), make_mesh(2, 2, 2)
  alone, params, inputs = compiled_gradient(policy, None, 8, 8)
  expected, expected_grads = alone(params, *inputs)
  sharded, params, inputs = compiled_gradient(dataclasses.replace(policy, mesh=mesh), mesh, 8, 8)
  loss, grads = sharded(params, *inputs)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  scale = max(np.max(np.abs(x)) for x in jax.tree.leaves(expected_grads))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), grads, expected_grads)
  for path, ways in {("ends", "embed"): 4, ("layers", "q", "kernel"): 4, ("layers", "down", "kernel"): 4}.items():
    for tree in (params, grads):
      leaf = functools.reduce(lambda node, key: node[key], path, tree)
      assert leaf.addressable_shards[0].data.size * ways == leaf.size


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_every_device_does_an_even_share(shape):
  # Long rows of a wide model, so that the matrix products of all tokens are what counts.
  config = models.ModelConfig(
    vocab_size=512, d_model=64, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=8, d_ff=256
  )
  policy, mesh = models.Policy(config, dtype="float32"), make_mesh(*shape)
  one, *_ = compiled_gradient(policy, None, 8, 32)
  each, *_ = compiled_gradient(dataclasses.replace(policy, mesh=mesh), mesh, 8, 32)
  assert each.cost_analysis()["flops"] < 1.25 * one.cost_analysis()["flops"] / 8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [(1, 4, 2), (2, 2, 2)])
def test_no_device_sums_the_whole_gradient_of_the_table(shape, tied, monkeypatch):
  """Each gets the part that it holds of the parameters, in pieces that the compiler does not turn into whole sums."""
  monkeypatch.setattr(_token_stats, "_LARGEST_EXCHANGE", 2**13)
  config = models.ModelConfig(
    vocab_size=1024, d_model=64, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=8, d_ff=16, tie_embeddings=tied
  )
  mesh = make_mesh(*shape)
  alone, params, inputs = compiled_gradient(models.Policy(config, dtype="float32"), None, 8, 8)
  _, expected = alone(params, *inputs)
  program, params, inputs = compiled_gradient(models.Policy(config, dtype="float32", mesh=mesh), mesh, 8, 8)
  _, got = program(params, *inputs)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), got["ends"], expected["ends"]
  )
  summed = re.findall(r"= (\(?f32\[.*?) (all-reduce|reduce-scatter)\(", program.as_text())
  sizes = {kind: [] for kind in ("all-reduce", "reduce-scatter")}
  for result, kind in summed:
    sizes[kind] += [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", result)]
  _, fsdp, tensor = shape
  part = 1024 * 64 // (fsdp * tensor)
  assert sizes["reduce-scatter"] == [part // 4] * 4
  assert max(sizes["all-reduce"]) <= part


def test_a_sum_is_scattered_in_columns_and_then_in_rows(monkeypatch):
  """As some chips of a slice do it: eight devices as four by two, each with its part of the sum at the end."""
  monkeypatch.setattr(_sharding, "_LARGEST_RING", 4)
  mesh = make_mesh(1, 8, 1)
  assert (_sharding.scatter_groups(mesh), _sharding.sums_whole(mesh)) == ([None], False)  # not on CPUs
  monkeypatch.setattr(_sharding, "_is_part_of_torus", lambda mesh: True)
  assert _sharding.scatter_groups(mesh) == [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]]
  assert _sharding.scatter_groups(make_mesh(1, 4, 2)) == _sharding.scatter_groups(make_mesh(2, 4, 1)) == [None]
  parts = jax.device_put(
    np.random.default_rng(0).normal(size=(8, 16, 6)).astype(np.float32), NamedSharding(mesh, P("fsdp"))
  )
  program = jax.jit(lambda parts: _token_stats._sum_over_devices(parts, mesh)).lower(parts).compile()
  np.testing.assert_allclose(program(parts), np.sum(parts, axis=0), atol=1e-5)
  scattered = re.findall(r"= f32\[([\d,]+)\]\S* reduce-scatter\(", program.as_text())
  assert scattered == ["4,6", "2,6"]


@pytest.mark.parametrize("name", reference.CONFIGS)
def test_rules_cover_every_parameter_stacked_or_not(name):
  abstract = models.Policy(reference.CONFIGS[name]).abstract()
  specs = models.param_specs(abstract)
  assert specs["layers"]["q"]["kernel"] == P(None, "fsdp", "tensor")
  unstacked = jax.eval_shape(models.unstack_layers, abstract)
  assert models.param_specs(unstacked)["layers"][1]["q"]["kernel"] == P("fsdp", "tensor")


def test_an_uncovered_parameter_is_named():
  with pytest.raises(ValueError, match=r"layers/router/kernel.*\(2, 3\)"):
    models.param_specs({"layers": {"router": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}}})


def test_an_axis_that_does_not_divide_leaves_the_dimension_whole():
  abstract = {"ends": {"embed": jax.ShapeDtypeStruct((7, 4), jnp.float32)}}
  sharding = models.param_shardings(abstract, make_mesh(2, 2, 2))["ends"]["embed"]
  assert sharding.shard_shape((7, 4)) == (7, 2)
