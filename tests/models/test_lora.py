"""Low-rank adapters: nothing at the start, the merged weights afterwards, and the only thing that is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models
from async_rl import rollout

LORA = models.LoRA(rank=2, alpha=3.0)
PLAIN = models.Policy(reference.LLAMA, dtype="float32")
POLICY = dataclasses.replace(PLAIN, lora=LORA)


def rows(length=8):
  tokens = np.random.default_rng(0).integers(0, 64, (2, length)).astype(np.int32)
  return tokens, np.ones_like(tokens), np.tile(np.arange(length, dtype=np.int32), (2, 1))


def logprobs(policy, params):
  return jax.jit(lambda p, *x: models.score(policy, p, *x).logprobs)(params, *rows())[:, 1:]


def started():
  """Parameters whose adapters are no longer zero."""
  params = jax.jit(POLICY.init)(jax.random.key(0))
  noise = jax.random.normal(jax.random.key(1), (1000,))
  moved = {k: {**v, "b": 0.3 * jnp.resize(noise, v["b"].shape)} for k, v in params["adapters"].items()}
  return {**params, "adapters": moved}


def test_fresh_adapters_change_nothing():
  params = jax.jit(POLICY.init)(jax.random.key(0))
  _, frozen = models.split_trainable(params)
  np.testing.assert_array_equal(logprobs(POLICY, params), logprobs(PLAIN, frozen))


def test_merged_weights_compute_the_same():
  params = started()
  _, frozen = models.split_trainable(params)
  merged = models.merge_adapters(LORA, params)
  assert jax.tree.structure(merged) == jax.tree.structure(frozen)
  assert np.max(np.abs(logprobs(POLICY, params) - logprobs(PLAIN, frozen))) > 0.1
  np.testing.assert_allclose(logprobs(POLICY, params), logprobs(PLAIN, merged), atol=1e-5)


def test_merging_into_a_bfloat16_base_loses_no_small_update():
  params = started()
  base = models.as_used(models.split_trainable(params)[1], "bfloat16")
  small = {"adapters": jax.tree.map(lambda x: 0.03 * x, params["adapters"])}
  merged = models.merge_adapters(LORA, base | small)
  assert {x.dtype for x in jax.tree.leaves(merged)} == {np.dtype("float32")}
  a, b = (np.asarray(small["adapters"]["q"][part], np.float64) for part in ("a", "b"))
  added = np.asarray(merged["layers"]["q"]["kernel"]) - np.asarray(base["layers"]["q"]["kernel"], np.float32)
  np.testing.assert_allclose(added, LORA.scale * np.einsum("lir,lro->lio", a, b), atol=2e-7)
  assert 1e-4 < np.abs(added).max() < 1e-2


def test_decode_agrees_with_full_forward():
  params = started()
  tokens, segments, positions = rows()
  full = jax.jit(POLICY.hidden)(params, tokens, segments, positions)
  step, cache, unstacked = jax.jit(POLICY.decode), POLICY.init_cache(2, 8), models.unstack_layers(params)
  for t in range(8):
    hidden, cache = step(unstacked, tokens[:, t], positions[:, t], cache)
    np.testing.assert_allclose(hidden, full[:, t], atol=1e-5)


def test_training_moves_the_adapters_alone_and_needs_no_gradient_of_the_rest():
  trainable, frozen = models.split_trainable(jax.jit(POLICY.init)(jax.random.key(0)))
  optimizer = optax.adam(1e-2)

  @jax.jit
  def step(trainable, state, frozen):
    loss = lambda p: -jnp.mean(models.score(POLICY, {**frozen, **p}, *rows()).logprobs[:, 1:])
    value, grads = jax.value_and_grad(loss)(trainable)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(trainable, updates), state, value

  state, losses = optimizer.init(trainable), []
  before = jax.tree.map(np.asarray, trainable)
  for _ in range(20):
    trainable, state, value = step(trainable, state, frozen)
    losses.append(float(value))
  assert losses[-1] < losses[0] - 0.3
  for name in models.LoRA().targets:
    for part in "ab":
      moved = np.abs(np.asarray(trainable["adapters"][name][part]) - before["adapters"][name][part])
      assert moved.max() > 1e-3, (name, part)
  small, large = (sum(x.size for x in jax.tree.leaves(t)) for t in (trainable, frozen))
  assert small < large / 3


def test_targets_and_rank_count():
  few = dataclasses.replace(POLICY, lora=models.LoRA(rank=1, targets=("q", "v")))
  assert {k: v["a"].shape for k, v in few.abstract()["adapters"].items()} == {"q": (2, 32, 1), "v": (2, 32, 1)}


def test_sharded_equals_unsharded():
  params = started()
  mesh = rollout.make_mesh(jax.devices(), fsdp=2, tensor=2)
  placed = jax.device_put(params, models.param_shardings(POLICY.abstract(), mesh))
  inputs = jax.device_put(tuple(np.tile(x, (4, 1)) for x in rows()), NamedSharding(mesh, PartitionSpec(models.ROWS)))
  sharded = dataclasses.replace(POLICY, mesh=mesh)
  got = jax.jit(lambda p, *x: models.score(sharded, p, *x).logprobs)(placed, *inputs)[:2, 1:]
  np.testing.assert_allclose(got, logprobs(POLICY, params), atol=1e-5)


def test_parameters_and_policy_must_agree():
  params = jax.jit(POLICY.init)(jax.random.key(0))
  with pytest.raises(ValueError, match="have adapters"):
    logprobs(PLAIN, params)
  with pytest.raises(ValueError, match="lack adapters"):
    logprobs(POLICY, models.split_trainable(params)[1])


@pytest.mark.parametrize("bad", [{"rank": 0}, {"targets": ("q", "head")}, {"targets": ()}])
def test_bad_adapters_are_refused(bad):
  with pytest.raises(ValueError, match=next(iter(bad))):
    models.LoRA(**bad)
