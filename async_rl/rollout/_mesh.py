"""The split of the devices into a generation mesh and a learner mesh.

Every host splits its own devices in the same way. The learner mesh spans all hosts; each host's generation mesh is
its own, so that weights and rollouts cross hosts only in the learner's collectives. Where both roles share the
devices ("colocated") the learner mesh has all of them, and the generation mesh all local ones.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl.models import named_mesh
from async_rl.rollout._tpu_chips import choose_learners

D = TypeVar("D", bound=Any)  # a jax.Device


class Meshes(NamedTuple):
  """The devices by role.

  Attributes:
    generation: the local devices of this process that sample.
    learner: the devices of all processes that train.
    colocated: whether both roles share the devices.
  """

  generation: Mesh
  learner: Mesh
  colocated: bool

  def describe(self) -> str:
    """Returns a sentence on who has which devices."""
    if not self.colocated:
      return f"{self.generation.size} devices sample and {self.learner.size} learn, side by side"
    devices = "one device" if self.learner.size == 1 else f"{self.learner.size} devices"
    return f"sampling and learning take turns on {devices}, so that neither overlaps with the other"


def make_meshes(
  generation: float | None = None,
  *,
  fsdp: int = 1,
  tensor: int = 1,
  generation_tensor: int | None = None,
  devices: Sequence[jax.Device] | None = None,
) -> Meshes:
  """Splits the devices by role.

  Args:
    generation: the number of devices of each host that sample, or a fraction below 1 of the host's devices. 0 gives all
      devices both roles; None takes half of them, or all where a host has one.
    fsdp: the size of the learner's fsdp axis; its data axis takes the remaining devices. Generation meshes have fsdp 1,
      since decoding would gather the parameters for every token.
    tensor: the size of the learner's tensor axis.
    generation_tensor: the size of the generation meshes' tensor axis; None takes `tensor`.
    devices: all devices of all processes; the default is `jax.devices()`.

  Raises:
    ValueError: if the split leaves a role without devices, or axis sizes do not divide the number of devices; it names
      the nearest sizes that do.
  """
  sampling, learning = split_devices(jax.devices() if devices is None else devices, generation, jax.process_index())
  wanted = tensor if generation_tensor is None else generation_tensor
  if wanted < 1 or len(sampling) % wanted:
    nearest = _nearest_divisor(len(sampling), wanted)
    raise ValueError(
      f"*generation_tensor*, by default tensor, must divide the {len(sampling)} generation devices of a host, got "
      f"generation_tensor={wanted}; the nearest that does is generation_tensor={nearest}."
    )
  return Meshes(
    generation=make_mesh(sampling, tensor=wanted),
    learner=make_mesh(learning, fsdp=fsdp, tensor=tensor),
    colocated=not set(sampling).isdisjoint(learning),
  )


def split_devices(devices: Sequence[D], generation: float | None, process_index: int) -> tuple[list[D], list[D]]:
  """Returns the devices on which process `process_index` samples, and those of all processes that learn.

  Both are in order of process and id. The last devices of a process sample; on TPUs, the chips of which the compiler
  accepts the others for one program, see `choose_learners`. See `make_meshes` for `generation`.
  """
  hosts: dict[int, list[D]] = collections.defaultdict(list)
  for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
    hosts[device.process_index].append(device)
  sizes = {index: len(host) for index, host in hosts.items()}
  size = sizes[process_index]
  if set(sizes.values()) != {size}:
    raise ValueError(f"every process must have equally many devices, got {sizes} by process")
  if generation is None:
    count = size // 2
  else:
    count = int(generation * size if generation < 1 else generation)
    if not 0 <= count < size or (count == 0) != (generation == 0) or (generation >= 1 and count != generation):
      raise ValueError(
        f"generation_devices={generation} of {size} devices per process leaves no whole device for one of the roles: "
        f"give a number from 1 to {size - 1}, a fraction, or 0 to share the devices"
      )
  local = hosts[process_index]
  if count == 0:
    return local, [device for host in hosts.values() for device in host]
  learners = _choose_learners(list(hosts.values()), size - count)
  learning = [device for host in learners for device in host]
  return [device for device in local if device not in learning], learning


def _choose_learners(hosts: Sequence[Sequence[D]], count: int) -> Sequence[Sequence[D]]:
  """Returns the `count` devices of every host that learn.

  Raises:
    ValueError: if a TPU's compiler refuses all sets of so many; it names the nearest number of generation devices.
  """
  if hosts[0][0].platform != "tpu":
    return [host[:count] for host in hosts]
  if chosen := choose_learners(hosts, count):
    return chosen
  size = len(hosts[0])
  accepted = [n for n in range(1, size) if choose_learners(hosts, size - n)]
  nearest = min(accepted, key=lambda n: abs(n - (size - count)), default=0)
  raise ValueError(
    f"*generation_devices* must leave chips for which the compiler makes one program, got generation_devices="
    f"{size - count} of {size} on each of {len(hosts)} hosts with {hosts[0][0].device_kind}; the nearest that works is "
    f"generation_devices={nearest}{'' if accepted else ', by which all chips do both'}."
  )


def make_mesh(devices: Sequence[jax.Device], *, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """Returns a mesh of `models.AXES` over the devices in their order.

  Raises:
    ValueError: if fsdp times tensor does not divide the number of devices; it names the nearest sizes that do.
  """
  count = len(devices)
  if fsdp < 1 or tensor < 1 or count % (fsdp * tensor):
    near_tensor = _nearest_divisor(count, tensor)
    near_fsdp = _nearest_divisor(count // near_tensor, fsdp)
    raise ValueError(
      f"*fsdp* times *tensor* must divide the {count} devices of the mesh, got fsdp={fsdp}, tensor={tensor}; the "
      f"nearest that does is fsdp={near_fsdp}, tensor={near_tensor}."
    )
  shape = (count // (fsdp * tensor), fsdp, tensor)
  return named_mesh(np.asarray(devices).reshape(shape))


def _nearest_divisor(count: int, wanted: int) -> int:
  """Returns the divisor of `count` that is nearest to `wanted`; of two, the larger, which splits memory further."""
  divisors = [n for n in range(1, count + 1) if count % n == 0]
  return min(divisors, key=lambda n: (abs(n - wanted), -n))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays that every device has whole."""
  return NamedSharding(mesh, PartitionSpec())
