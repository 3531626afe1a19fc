"""Weights arrive on the generation mesh: equal, cast, never aliased, never through a recompilation."""

import collections
import contextlib
import dataclasses
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import models
from async_rl import sampling
from async_rl._monitor import Closed
from async_rl.rollout import _weight_push
from async_rl.rollout import _weight_store
from async_rl.rollout._mesh import make_meshes
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


CONFIG = models.ModelConfig(vocab_size=24, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=32)
POLICY = models.Policy(CONFIG)
ADAPTED = dataclasses.replace(POLICY, lora=models.LoRA(rank=2))


def make_params(meshes, version=0, policy=POLICY):
  """Parameters on the learner mesh, other ones for every version."""
  shardings = models.param_shardings(policy.abstract(), meshes.learner)
  return jax.device_put(random_params(version, policy), shardings)


@functools.cache
def random_params(version, policy):
  return jax.device_get(jax.jit(policy.init)(jax.random.key(version)))


def expected_weights(version=0, policy=POLICY):
  """The sampler's weights, as the engine itself would make them."""
  return jax.tree.map(np.asarray, sampling.prepare_weights(policy, random_params(version, policy)))


def weight_shardings(mesh, policy=POLICY):
  prepare = functools.partial(sampling.prepare_weights, policy)
  return models.param_shardings(jax.eval_shape(prepare, policy.abstract()), mesh)


def make_store(meshes, policy=POLICY):
  return WeightStore(policy, weight_shardings(meshes.generation, policy), meshes.learner)


def assert_equal(got, expected):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b, strict=True), got, expected)


SPLITS = {
  "equal sizes, tensor 2": dict(generation=4, fsdp=2, tensor=2),
  "equal sizes, tensor only for generation": dict(generation=4, fsdp=4, generation_tensor=4),
  "equal sizes, tensor only for learning": dict(generation=4, fsdp=1, tensor=4, generation_tensor=1),
  "learners copy": dict(generation=4, generation_tensor=2),
  "more learners": dict(generation=2, fsdp=6),
  "more learners, both axes": dict(generation=2, fsdp=3, tensor=2),
  "one sampler": dict(generation=1, fsdp=7),
  "one learner": dict(generation=7),
  "fewer learners": dict(generation=6, fsdp=2, generation_tensor=2),
  "fewer learners, other tensor": dict(generation=6, tensor=2, generation_tensor=3),
  "no common divisor": dict(generation=3, fsdp=5),
  "shared": dict(generation=0, fsdp=4, tensor=2),
  "shared, other tensor": dict(generation=0, fsdp=8, tensor=1, generation_tensor=2),
}


@pytest.mark.parametrize("split", ["equal sizes, tensor 2", "more learners, both axes", "fewer learners, other tensor"])
def test_the_programs_of_a_push_are_known_before_its_arrays(split):
  meshes = make_meshes(**SPLITS[split])
  params = make_params(meshes)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
  push = _weight_push.WeightPush(abstract, POLICY.dtype, weight_shardings(meshes.generation))
  traces = push.trace()
  assert list(traces) == ["stage", "gather"]
  arrived = push.copy(push.stage(params))
  expected = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(arrived)]
  gather = traces["gather"]()
  compiled = gather.lower().compile()
  got = jax.tree.leaves(compiled.input_shardings)
  assert all(a.is_equivalent_to(b, len(shape)) for a, (shape, _, b) in zip(got, expected, strict=True))
  assert [(x.shape, x.dtype) for x in jax.tree.leaves(gather.in_avals)] == [x[:2] for x in expected]


@pytest.mark.parametrize("split", SPLITS)
def test_arrives_equal_and_in_the_wanted_layout(split, transfers_are_explicit_and_direct):
  meshes = make_meshes(**SPLITS[split])
  store, params = make_store(meshes), make_params(meshes)
  assert store.ready_at == np.inf
  before = time.monotonic()
  with transfers_are_explicit_and_direct():
    store.publish(0, params)
    version, got = store.latest()
    jax.block_until_ready(got)
  assert version == 0
  assert before <= store.ready_at <= time.monotonic()
  assert jax.tree.map(lambda x: x.sharding, got) == weight_shardings(meshes.generation)
  assert_equal(got, expected_weights())
  assert store.push_seconds > 0
  assert store.push_bytes == sum(x.nbytes for x in jax.tree.leaves(expected_weights()))
  store.close()


@pytest.mark.parametrize("split", SPLITS)
def test_no_learner_device_stages_more_than_the_part_that_it_trains(split):
  meshes = make_meshes(**SPLITS[split])
  params = make_params(meshes)
  own = models.as_used(params, POLICY.dtype)
  assert bytes_by_device(make_store(meshes)._trained_push.stage(params)) == bytes_by_device(own)


@pytest.mark.parametrize("split", ["equal sizes, tensor 2", "more learners, both axes", "learners copy", "shared"])
def test_every_generation_device_receives_an_equal_part(split):
  """What the axis sizes divide travels once in all; parts that they do not divide are small."""
  meshes = make_meshes(**SPLITS[split])
  push = make_store(meshes)._trained_push
  received = bytes_by_device(push.copy(push.stage(make_params(meshes))))
  assert set(received) == set(meshes.generation.devices.flat)
  assert len(set(received.values())) == 1
  assert push.nbytes <= sum(received.values()) <= 1.2 * push.nbytes


def bytes_by_device(tree):
  found = collections.Counter()
  for leaf in jax.tree.leaves(tree):
    for shard in leaf.addressable_shards:
      found[shard.device] += shard.data.nbytes
  return found


def test_large_models_are_gathered_in_groups(monkeypatch):
  """Their arrays are freed as they are gathered, and the result is the same."""
  monkeypatch.setattr(_weight_push, "_GROUP_BYTES", 2000)
  meshes = make_meshes(4, fsdp=2)
  push = make_store(meshes)._trained_push
  arrived = push.copy(push.stage(make_params(meshes)))
  assert len(arrived) > 3
  assert_equal(push.gather(arrived), expected_weights())
  assert not arrived


@pytest.mark.parametrize("generation", [0, 4])
def test_nothing_is_shared_with_donated_parameters(generation):
  meshes = make_meshes(generation)
  store = make_store(meshes)
  step = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
  params = make_params(meshes)
  expected = random_params(0, POLICY)
  for version in range(3):
    old = params
    store.publish(version, params)
    params = step(params)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    got_version, got = store.latest(at_least=version)
    assert got_version == version
    assert_equal(got, jax.tree.map(np.asarray, sampling.prepare_weights(POLICY, expected)))
    expected = jax.tree.map(lambda x: x + np.float32(1), expected)
  store.close()


def test_compiles_once():
  meshes = make_meshes(4, fsdp=2, tensor=2)
  store = make_store(meshes)
  for version in range(4):
    store.publish(version, make_params(meshes, version))
    assert_equal(store.latest(at_least=version)[1], expected_weights(version))
  push = store._trained_push
  assert [program._cache_size() for program in (push._stage, *push._gather)] == [1, 1]
  store.close()


@pytest.mark.parametrize("generation", [0, 4])
def test_adapters_move_with_every_version_and_the_rest_once(generation, transfers_are_explicit_and_direct):
  meshes = make_meshes(generation, fsdp=2, tensor=2)
  store, versions, sizes = make_store(meshes, ADAPTED), [], []
  base = make_params(meshes, 0, ADAPTED)
  adapters = [make_params(meshes, version, ADAPTED)["adapters"] for version in range(4)]
  with transfers_are_explicit_and_direct():
    for version in range(4):
      store.publish(version, base | {"adapters": adapters[version]})
      if version > 0:  # the first is replaced before anyone fetches it
        versions.append(store.latest(at_least=version))
        sizes.append(store.push_bytes)
  expected = [expected_weights(version, ADAPTED) for version in range(4)]
  size_of = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  assert sizes == [size_of(expected[0]["adapters"])] * 3
  first = versions[0][1]
  for version, (got_version, got) in enumerate(versions, 1):  # also the old ones, which a replay keeps
    assert got_version == version
    assert_equal(got, expected[0] | {"adapters": expected[version]["adapters"]})
    assert all(a is b for part in ("layers", "ends") for a, b in zip(*map(jax.tree.leaves, (got[part], first[part]))))
  store.close()


def test_waits_for_the_version_asked_for_and_wakes_on_close():
  meshes = make_meshes(4)
  store = make_store(meshes)
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


def test_failed_push_reaches_both_sides(monkeypatch):
  meshes = make_meshes(4)
  store = make_store(meshes)
  store.publish(0, make_params(meshes))
  store.latest()

  def lose(self, staged):
    jax.tree.map(lambda x: x.delete(), staged)
    return copy(self, staged)

  copy = _weight_push.WeightPush.copy
  monkeypatch.setattr(_weight_push.WeightPush, "copy", lose)
  store.publish(1, make_params(meshes))
  with pytest.raises(RuntimeError, match="deleted"):
    store.latest(at_least=1)
  with pytest.raises(RuntimeError, match="deleted"):
    store.publish(2, make_params(meshes))
  store.close()


@pytest.mark.parametrize(
  "split", [dict(generation=4, fsdp=4), dict(generation=2, fsdp=3, tensor=2), dict(generation=0)]
)
def test_devices_without_a_program_of_several_receive_all_blocks(split, monkeypatch, transfers_are_explicit_and_direct):
  monkeypatch.setattr(_weight_store, "takes_programs", lambda mesh: False)
  meshes = make_meshes(**({"generation_tensor": 1} | split))
  store, wanted = make_store(meshes, ADAPTED), weight_shardings(meshes.generation, ADAPTED)
  for version in range(2):
    params = make_params(meshes, version, ADAPTED)
    with transfers_are_explicit_and_direct():
      store.publish(version, params)
      found, got = store.latest(at_least=version)
      jax.block_until_ready(got)
    assert found == version
    assert jax.tree.map(lambda x: x.sharding, got) == wanted
    expected = expected_weights(version, ADAPTED)
    assert_equal(got["adapters"], expected["adapters"])
    assert_equal(got["layers"], expected_weights(0, ADAPTED)["layers"])  # frozen: sent once
    for copy in range(meshes.generation.size):
      table = got["ends"]["embed"].addressable_data(copy)
      np.testing.assert_array_equal(table, expected_weights(0, ADAPTED)["ends"]["embed"])
  store.close()
