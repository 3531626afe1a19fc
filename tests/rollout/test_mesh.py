"""The split of the devices, for one process and, on stand-in devices, for several."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._mesh import split_devices
from async_rl.rollout._mesh import takes_programs


def ids(mesh):
  return [d.id for d in mesh.devices.flat]


@pytest.mark.parametrize(
  ("generation", "learner_ids", "generation_ids"),
  [
    (None, [0, 1, 2, 3], [4, 5, 6, 7]),
    (2, [0, 1, 2, 3, 4, 5], [6, 7]),
    (0.75, [0, 1], [2, 3, 4, 5, 6, 7]),
    (0, [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]),
  ],
)
def test_split_of_one_process(generation, learner_ids, generation_ids):
  meshes = make_meshes(generation, tensor=2)
  assert ids(meshes.learner) == learner_ids
  assert ids(meshes.generation) == generation_ids
  assert meshes.colocated == (generation == 0)
  assert meshes.learner.axis_names == meshes.generation.axis_names == ("data", "fsdp", "tensor")
  assert set(meshes.learner.axis_types) == {AxisType.Auto}


def test_axis_sizes():
  meshes = make_meshes(2, fsdp=3, tensor=2)
  assert dict(meshes.learner.shape) == {"data": 1, "fsdp": 3, "tensor": 2}
  assert dict(meshes.generation.shape) == {"data": 1, "fsdp": 1, "tensor": 2}
  meshes = make_meshes(4, fsdp=4, generation_tensor=2)
  assert dict(meshes.learner.shape) == {"data": 1, "fsdp": 4, "tensor": 1}
  assert dict(meshes.generation.shape) == {"data": 2, "fsdp": 1, "tensor": 2}


def test_one_device_has_both_roles():
  meshes = make_meshes(devices=jax.devices()[:1])
  assert meshes.colocated
  assert ids(meshes.learner) == ids(meshes.generation) == [0]
  assert "take turns on one device" in meshes.describe()
  assert "take turns on 8 devices" in make_meshes(0).describe()
  assert "2 devices sample and 6 learn" in make_meshes(2).describe()


def test_each_process_splits_its_own_devices():
  devices = [SimpleNamespace(process_index=i % 2, id=i, platform="gpu") for i in range(8)]
  for process, sampling_ids in enumerate([[6], [7]]):
    sampling, learning = split_devices(devices, 0.25, process)
    assert [d.id for d in sampling] == sampling_ids
    assert [d.id for d in learning] == [0, 2, 4, 1, 3, 5]  # by process, so that inner axes stay within a host
  sampling, learning = split_devices(devices, 0, 1)
  assert [d.id for d in sampling] == [1, 3, 5, 7]
  assert len(learning) == 8
  with pytest.raises(ValueError, match=r"equally many devices, got \{0: 4, 1: 3\}"):
    split_devices(devices[:-1], 1, 0)


@pytest.mark.parametrize("generation", [8, 9, -1, 1.5, 0.01, -0.5])
def test_impossible_split_is_refused(generation):
  with pytest.raises(
    ValueError, match=f"generation_devices={generation} of 8 devices per process leaves no whole device"
  ):
    make_meshes(generation)


@pytest.mark.parametrize(
  ("count", "message"),
  [
    (1, "9 of 1 device per process .* roles: give 0, by which all devices do both"),
    (2, "9 of 2 devices per process .* roles: give 1, or 0, by which"),
    (4, "9 of 4 devices per process .* roles: give a number from 1 to 3, or 0, by which"),
  ],
)
def test_an_impossible_split_is_refused_with_what_is_possible(count, message):
  with pytest.raises(ValueError, match=message):
    make_meshes(9, devices=jax.devices()[:count])


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    (dict(generation=3, tensor=2), "the 3 generation .* generation_tensor=2; the nearest that does is .*=3"),
    (dict(generation=2, generation_tensor=5), "the 2 generation .* generation_tensor=5; the nearest that does is .*=2"),
    (dict(generation=2, generation_tensor=0), "generation_tensor=0; the nearest that does is .*=1"),
    (dict(generation=2, fsdp=4), "the 6 devices .* fsdp=4, tensor=1; the nearest that does is fsdp=3, tensor=1"),
    (dict(generation=4, fsdp=3, tensor=2), "fsdp=3, tensor=2; the nearest that does is fsdp=2, tensor=2"),
    (dict(generation=2, fsdp=2, tensor=4, generation_tensor=2), "the nearest that does is fsdp=2, tensor=3"),
    (dict(generation=4, fsdp=0), "fsdp=0, tensor=1; the nearest that does is fsdp=1, tensor=1"),
  ],
  ids=str,
)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_do(sizes, message):
  with pytest.raises(ValueError, match=message):
    make_meshes(**sizes)


def slice_of(kind, width, height, hosts=None):
  """Stand-ins for the chips of a planar slice, whose hosts have two by two of them unless it is all one host's."""
  chips = []
  for i in range(width * height):
    x, y = i % width, i // width
    host = 0 if hosts == 1 else x // 2 + y // 2 * (width // 2)
    chips.append(SimpleNamespace(process_index=host, id=i, coords=[x, y, 0], platform="tpu", device_kind=f"TPU {kind}"))
  return chips


def slices_of(kind, width, height):
  """Stand-ins for the chips of two such slices."""
  chips = [*slice_of(kind, width, height), *slice_of(kind, width, height)]
  for i, chip in enumerate(chips):
    chip.slice_index = i // (width * height)
    chip.process_index += chip.slice_index * width * height // 4
    chip.id = i
  return chips


@pytest.mark.parametrize(
  ("chips", "generation", "learning", "sampling"),
  [
    (slice_of("v5 lite", 2, 4, hosts=1), 2, [1, 2, 3, 4, 5, 6], [0, 7]),
    (slice_of("v5 lite", 2, 4, hosts=1), 4, [0, 1, 2, 3], [4, 5, 6, 7]),
    (slice_of("v5 lite", 2, 4), None, [2, 3, 4, 5], [0, 1]),
    (slice_of("v6 lite", 4, 4), 2, [1, 5, 2, 6, 9, 13, 10, 14], [0, 4]),
    (slice_of("v6 lite", 4, 4), 1, [0, 1, 4, 2, 3, 6, 8, 9, 12, 10, 11, 14], [5]),
    (slice_of("v5", 2, 4), 3, [0, 4], [1, 2, 3]),
  ],
)
def test_the_chips_that_learn_are_those_that_the_compiler_accepts(chips, generation, learning, sampling):
  found = split_devices(chips, generation, 0)
  assert [[chip.id for chip in role] for role in found] == [sampling, learning]


@pytest.mark.parametrize(
  ("chips", "generation", "message"),
  [
    (slice_of("v6 lite", 4, 4), 3, "generation_devices=3 of 4 on each of 4 hosts .* is generation_devices=2"),
    (slice_of("v6 lite", 8, 8), 2, "generation_devices=2 of 4 on each of 16 hosts .* is generation_devices=1"),
    (slice_of("v5 lite", 4, 8), 2, "generation_devices=2 of 4 .* generation_devices=0, by which all chips do both"),
    (slices_of("v6 lite", 4, 4), 2, "generation_devices=2 of 4 on each of 8 .* generation_devices=0, by which all"),
  ],
)
def test_chips_that_no_compiler_accepts_are_refused_with_the_nearest_that_work(chips, generation, message):
  with pytest.raises(ValueError, match=message):
    split_devices(chips, generation, 0)


@pytest.mark.parametrize(
  ("chips", "process", "learning", "sampling"),
  [
    (slice_of("v6 lite", 4, 4), 0, [1, 2, 5, 6, 9, 10, 13, 14], [0, 4]),  # columns of every host
    (slice_of("v6 lite", 8, 8), 0, list(range(32)), [32, 33, 40, 41]),  # hosts: the first one only learns
    (slice_of("v6 lite", 8, 8), 15, list(range(32)), [54, 55, 62, 63]),
    (slice_of("v5 lite", 4, 8), 0, list(range(32)), [0, 1, 4, 5]),  # colocated
    (slices_of("v6 lite", 4, 4), 0, list(range(32)), [0, 1, 4, 5]),
  ],
)
def test_the_split_has_the_first_shape_that_the_compiler_accepts(chips, process, learning, sampling):
  found = split_devices(chips, None, process)
  assert [sorted(chip.id for chip in role) for role in found] == [sampling, learning]


def test_on_large_v5e_slices_each_chip_is_taken_alone():
  for kind, width, height, expected in (("v5 lite", 4, 4, True), ("v5 lite", 4, 8, False), ("v6 lite", 8, 8, True)):
    chips = np.array(slice_of(kind, width, height))
    mesh = SimpleNamespace(size=4, devices=chips[:4])
    assert takes_programs(mesh, list(chips)) == expected
    assert takes_programs(SimpleNamespace(size=1, devices=chips[:1]), list(chips))
  assert takes_programs(make_meshes(4).generation)


def test_the_last_hosts_sample_and_the_others_learn():
  devices = [SimpleNamespace(process_index=i // 2, id=i, platform="gpu") for i in range(8)]
  for process, expected in enumerate([[4, 5], [4, 5], [4, 5], [6, 7]]):
    sampling, learning = split_devices(devices, None, process, 2)
    assert [d.id for d in sampling] == expected
    assert [d.id for d in learning] == [0, 1, 2, 3]
  assert [d.id for d in split_devices(devices, None, 3, 0)[0]] == [7]
  with pytest.raises(
    ValueError, match="must leave a host to learn, got generation_hosts=4 of 4; with 0 every host does"
  ):
    split_devices(devices, None, 0, 4)


@pytest.mark.parametrize(
  ("chips", "hosts", "nearest"),
  [
    (slice_of("v5 lite", 4, 8), 4, 0),
    (slice_of("v6 lite", 8, 8), 4, 8),
    (slices_of("v6 lite", 4, 4), 4, 0),
  ],
)
def test_hosts_whose_chips_no_compiler_accepts_are_refused_with_the_nearest_that_work(chips, hosts, nearest):
  with pytest.raises(ValueError, match=f"got generation_hosts={hosts} of .* that works is generation_hosts={nearest}"):
    split_devices(chips, None, 0, hosts)


@dataclasses.dataclass(frozen=True)
class Device:
  """A stand-in that a mesh takes."""

  process_index: int
  id: int
  platform: str = "gpu"


def test_meshes_of_hosts_that_only_learn():
  """Their generation mesh is that of the first host that samples."""
  chips = [Device(i // 2, i) for i in range(8)]
  meshes = make_meshes(hosts=1, fsdp=3, devices=chips)
  assert ids(meshes.generation) == [6, 7]
  assert dict(meshes.learner.shape) == {"data": 2, "fsdp": 3, "tensor": 1}
  assert (meshes.samplers, meshes.colocated) == ((3,), False)
  assert meshes.describe() == "1 host samples on 2 devices, and 6 devices of the others learn, side by side"
  assert make_meshes(devices=jax.devices()).samplers == ()
