"""Weights arrive on the generation mesh: equal, cast, never aliased, never through a recompilation."""

import contextlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from async_rl._monitor import Closed
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._mesh import replicated
from async_rl.rollout._weight_store import WeightStore


@pytest.fixture
def transfers_are_explicit_and_direct(monkeypatch):
  """Fails on implicit transfers in any thread, and where JAX would reshard by way of a copy on the host."""

  def host_copy(array):
    raise AssertionError(f"{array.shape} was fetched to the host")

  @contextlib.contextmanager
  def guard():
    with monkeypatch.context() as patch:
      patch.setattr(type(jnp.zeros(())), "_value", property(host_copy))
      jax.config.update("jax_transfer_guard", "disallow")
      yield
    jax.config.update("jax_transfer_guard", "allow")

  yield guard
  jax.config.update("jax_transfer_guard", "allow")


SPECS = {"layers": [P(None, "tensor"), P(None, "tensor")], "scale": P(), "table": P("tensor", "fsdp")}


def prepare(params):
  """Unstacks the layers and casts the matrices, as a policy does."""
  layers = [layer.astype(jnp.bfloat16) for layer in params["layers"]]
  return {"layers": layers, "scale": params["scale"], "table": params["table"].astype(jnp.bfloat16)}


def make_params(meshes, value=1.0):
  params = {
    "layers": np.arange(2 * 8 * 4, dtype=np.float32).reshape(2, 8, 4) * value,
    "scale": np.full(8, value, np.float32),
    "table": np.arange(48, dtype=np.float32).reshape(12, 4) * value,
  }
  specs = {"layers": P(None, "fsdp"), "scale": P(), "table": P(None, "fsdp")}
  return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(meshes.learner, s)), params, specs)


def make_store(meshes, prepare=prepare):
  shardings = jax.tree.map(lambda s: NamedSharding(meshes.generation, s), SPECS, is_leaf=lambda x: isinstance(x, P))
  return WeightStore(prepare, shardings, meshes.learner), shardings


SPLITS = {
  "tensor 2": {"generation": 4, "fsdp": 2, "tensor": 2},
  "tensor 1": {"generation": 2, "fsdp": 2},
  "uneven": {"generation": 6, "fsdp": 1, "tensor": 2},
  "shared": {"generation": 0, "fsdp": 4, "tensor": 2},
}


@pytest.mark.parametrize("split", SPLITS)
def test_arrives_equal_and_in_the_wanted_layout(split, transfers_are_explicit_and_direct):
  meshes = make_meshes(**SPLITS[split])
  store, shardings = make_store(meshes)
  params = make_params(meshes)
  expected = jax.tree.map(np.asarray, prepare(jax.device_get(params)))
  assert store.ready_at == np.inf
  before = time.monotonic()
  with transfers_are_explicit_and_direct():
    store.publish(0, params)
    version, got = store.latest()
  assert version == 0
  assert before <= store.ready_at <= time.monotonic()
  assert jax.tree.map(lambda x: x.sharding, got) == shardings
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b, strict=True), got, expected)
  assert store.push_seconds > 0
  store.close()


def test_tensor_size_that_learner_devices_cannot_hold(transfers_are_explicit_and_direct):
  """3 learner devices cannot make shards for tensor = 4 by themselves: one of them is cut instead."""
  generation = make_meshes(0, tensor=4, devices=jax.devices()[4:]).generation
  learner = make_meshes(0, devices=jax.devices()[:3]).learner
  store = WeightStore(lambda x: x, {"x": NamedSharding(generation, P("tensor"))}, learner)
  x = jax.device_put(np.arange(8.0, dtype=np.float32), replicated(learner))
  with transfers_are_explicit_and_direct():
    store.publish(0, {"x": x})
    got = store.latest()[1]["x"]
  assert got.sharding.shard_shape(got.shape) == (2,)
  np.testing.assert_array_equal(got, np.arange(8.0))
  store.close()


@pytest.mark.parametrize("generation", [0, 4])
def test_nothing_is_shared_with_donated_parameters(generation):
  meshes = make_meshes(generation)
  sharding = replicated(meshes.generation)
  store = WeightStore(lambda params: params, {"x": sharding}, meshes.learner)
  step = jax.jit(lambda params: params + 1, donate_argnums=0)
  params = jax.device_put(np.zeros(8, np.float32), replicated(meshes.learner))
  for version in range(3):
    old = params
    store.publish(version, {"x": params})
    params = step(params)
    assert old.is_deleted()
    got_version, got = store.latest(at_least=version)
    assert got_version == version
    np.testing.assert_array_equal(got["x"], np.full(8, version))
  store.close()


def test_compiles_once():
  meshes = make_meshes(4, fsdp=2, tensor=2)
  traces = []
  store, _ = make_store(meshes, lambda params: traces.append(1) or prepare(params))
  for version in range(4):
    store.publish(version, make_params(meshes, version))
    _, params = store.latest(at_least=version)
    np.testing.assert_array_equal(params["scale"], np.full(8, version))
  assert len(traces) == 1
  store.close()


@pytest.mark.parametrize("generation", [0, 4])
def test_adapters_move_with_every_version_and_the_rest_once(generation, transfers_are_explicit_and_direct):
  meshes = make_meshes(generation, fsdp=2, tensor=2)
  _, shardings = make_store(meshes)
  prepare_all = lambda params: prepare(params) | {"adapters": params["adapters"]}
  store = WeightStore(prepare_all, shardings | {"adapters": {"a": replicated(meshes.generation)}}, meshes.learner)
  base, versions, sizes = make_params(meshes), [], []
  adapters = [jax.device_put(np.full(8, v, np.float32), replicated(meshes.learner)) for v in range(4)]
  with transfers_are_explicit_and_direct():
    for version in range(4):
      store.publish(version, base | {"adapters": {"a": adapters[version]}})
      versions.append(store.latest(at_least=version))
      sizes.append(store.push_bytes)
  assert sizes == [2 * 64 + 4 * 8 + 2 * 48 + 4 * 8] + [4 * 8] * 3
  for version, (got_version, got) in enumerate(versions):  # also the old ones, which a replay keeps
    assert got_version == version
    np.testing.assert_array_equal(got["adapters"]["a"], np.full(8, version))
    first = versions[0][1]
    assert all(got[part] is first[part] for part in ("layers", "scale", "table"))
  jax.tree.map(np.testing.assert_array_equal, {k: got[k] for k in SPECS}, prepare(jax.device_get(base)))
  store.close()


def test_waits_for_the_version_asked_for_and_wakes_on_close():
  meshes = make_meshes(4)
  store, _ = make_store(meshes)
  with pytest.raises(TimeoutError):
    store.latest(timeout=0.01)
  store.publish(3, make_params(meshes))
  store.latest()
  results = []
  assert store.latest(at_least=4, timeout=0.01)[0] == 3

  def fetch():
    try:
      results.append(store.latest(at_least=4)[0])
      store.latest(at_least=9)
    except Closed:
      results.append("closed")

  thread = threading.Thread(target=fetch, daemon=True)
  thread.start()
  assert store.latest()[0] == 3
  with pytest.raises(ValueError, match="version 3 is published after version 3"):
    store.publish(3, make_params(meshes))
  store.publish(4, make_params(meshes))
  assert store.latest(at_least=4)[0] == 4
  store.close()
  thread.join(timeout=10)
  assert results[-1] == "closed"
  with pytest.raises(Closed):
    store.publish(5, make_params(meshes))


def test_failed_push_reaches_both_sides():
  meshes = make_meshes(4)
  store = WeightStore(lambda x: x, {"x": NamedSharding(meshes.generation, P("data"))}, meshes.learner)
  good = {"x": jax.device_put(np.zeros(8, np.float32), replicated(meshes.learner))}
  store.publish(0, good)
  store.latest()
  store._shardings = {"x": {"another": "structure"}}
  store.publish(1, good)
  with pytest.raises(ValueError, match="structure"):
    store.latest(at_least=1)
  with pytest.raises(ValueError, match="structure"):
    store.publish(2, good)
  store.close()
