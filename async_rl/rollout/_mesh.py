"""The split of the devices into a generation mesh and a learner mesh.

A split has one of three shapes. "Columns": every host splits its own devices in the same way; the learner mesh spans
all hosts, and each host's generation mesh is its own, so that weights and rollouts cross hosts only in the learner's
collectives. "Hosts": the first hosts learn on all of their devices, and each of the others generates on its own.
"Colocated": both roles share the devices; the learner mesh has all of them, and the generation mesh all local ones.
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
from async_rl.rollout._tpu_chips import takes_hosts
from async_rl.rollout._tpu_chips import takes_one_host

D = TypeVar("D", bound=Any)  # a jax.Device


class Meshes(NamedTuple):
  """The devices by role.

  Attributes:
    generation: the local devices of this process that sample; those of another one where this one only learns. JAX runs
      no program on a process without devices of its mesh: results are arrays of which nothing is local.
    learner: the devices of all processes that train.
    colocated: whether both roles share the devices.
    samplers: the processes that only sample, while the others only learn; empty where all do both.
  """

  generation: Mesh
  learner: Mesh
  colocated: bool
  samplers: tuple[int, ...] = ()

  def describe(self) -> str:
    """Returns a sentence on who has which devices."""
    if self.samplers:
      count, size = len(self.samplers), self.generation.size
      who = f"1 host samples on {size} devices" if count == 1 else f"{count} hosts sample on {size} devices each"
      return f"{who}, and {self.learner.size} devices of the others learn, side by side"
    if not self.colocated:
      return f"{self.generation.size} devices sample and {self.learner.size} learn, side by side"
    devices = "one device" if self.learner.size == 1 else f"{self.learner.size} devices"
    return f"sampling and learning take turns on {devices}, so that neither overlaps with the other"


def make_meshes(
  generation: float | None = None,
  *,
  hosts: int | None = None,
  fsdp: int = 1,
  tensor: int = 1,
  generation_tensor: int | None = None,
  devices: Sequence[jax.Device] | None = None,
) -> Meshes:
  """Splits the devices by role.

  Args:
    generation: the number of devices of each host that sample, or a fraction below 1 of the host's devices. 0 gives all
      devices both roles; None takes half of them, or all where a host has one.
    hosts: the number of hosts that only sample, the last ones, while the others only learn; 0 has every host do both.
      None has them do both, too, unless `generation` is None and a TPU's compiler refuses half of every host: then half
      of the hosts sample, or all devices get both roles if it refuses that as well.
    fsdp: the size of the learner's fsdp axis; its data axis takes the remaining devices. Generation meshes have fsdp 1,
      since decoding would gather the parameters for every token.
    tensor: the size of the learner's tensor axis.
    generation_tensor: the size of the generation meshes' tensor axis; None takes `tensor`.
    devices: all devices of all processes; the default is `jax.devices()`.

  Raises:
    ValueError: if the split leaves a role without devices, or axis sizes do not divide the number of devices; it names
      the nearest sizes that do.
  """
  devices = jax.devices() if devices is None else devices
  sampling, learning = split_devices(devices, generation, jax.process_index(), hosts)
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
    samplers=tuple(sorted({d.process_index for d in devices} - {d.process_index for d in learning})),
  )


def split_devices(
  devices: Sequence[D], generation: float | None, process_index: int, sampling_hosts: int | None = None
) -> tuple[list[D], list[D]]:
  """Returns the devices on which process `process_index` samples, and those of all processes that learn.

  Both are in order of process and id. The last devices of a process sample; on TPUs, the chips of which the compiler
  accepts the others for one program, see `choose_learners`. A process that only learns is given the devices of the
  first one that samples. See `make_meshes` for `generation` and, as `hosts`, for `sampling_hosts`.
  """
  hosts: dict[int, list[D]] = collections.defaultdict(list)
  for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
    hosts[device.process_index].append(device)
  sizes = {index: len(host) for index, host in hosts.items()}
  size = sizes[process_index]
  if set(sizes.values()) != {size}:
    raise ValueError(f"every process must have equally many devices, got {sizes} by process")
  if sampling_hosts:
    return _split_hosts(hosts, sampling_hosts, process_index)
  if generation is None:
    count = size // 2
  else:
    count = int(generation * size if generation < 1 else generation)
    if not 0 <= count < size or (count == 0) != (generation == 0) or (generation >= 1 and count != generation):
      found = "1 device" if size == 1 else f"{size} devices"
      whole = {1: "", 2: "1, or "}.get(size, f"a number from 1 to {size - 1}, or ")
      raise ValueError(
        f"generation_devices={generation} of {found} per process leaves no whole device for one of the roles: give "
        f"{whole}0, by which all devices do both."
      )
  local = hosts[process_index]
  if generation is None and count and not _takes_columns(list(hosts.values()), size - count):
    half = len(hosts) // 2
    if sampling_hosts is None and half and takes_hosts(list(hosts.values()), half):
      return _split_hosts(hosts, half, process_index)
    count = 0
  if count == 0:
    return local, [device for host in hosts.values() for device in host]
  learners = _choose_learners(list(hosts.values()), size - count)
  learning = [device for host in learners for device in host]
  return [device for device in local if device not in learning], learning


def _split_hosts(hosts: dict[int, list[D]], count: int, process_index: int) -> tuple[list[D], list[D]]:
  """Has the last `count` processes sample and the others learn; see `split_devices`.

  Raises:
    ValueError: if no process is left to learn, or a TPU's compiler refuses their chips.
  """
  if count >= len(hosts):
    raise ValueError(
      f"*generation_hosts* must leave a host to learn, got generation_hosts={count} of {len(hosts)}; with 0 every host "
      "does both."
    )
  chips = next(iter(hosts.values()))
  if chips[0].platform == "tpu" and not takes_hosts(list(hosts.values()), count):
    accepted = [n for n in range(1, len(hosts)) if takes_hosts(list(hosts.values()), n)]
    nearest = min(accepted, key=lambda n: abs(n - count), default=0)
    raise ValueError(
      f"*generation_hosts* must leave hosts for whose chips the compiler makes one program, got generation_hosts="
      f"{count} of {len(hosts)} with {chips[0].device_kind}; the nearest that works is generation_hosts={nearest}."
    )
  learners, samplers = list(hosts)[:-count], list(hosts)[-count:]
  local = process_index if process_index in samplers else samplers[0]
  return hosts[local], [device for index in learners for device in hosts[index]]


def _takes_columns(hosts: Sequence[Sequence[D]], count: int) -> bool:
  """Returns whether `count` devices of every host can learn together, as far as the compiler is concerned."""
  return hosts[0][0].platform != "tpu" or choose_learners(hosts, count) is not None


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


def takes_programs(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> bool:
  """Returns whether the compiler makes programs for the devices of a host together, and not for each alone.

  Args:
    mesh: devices of one host.
    devices: all devices of all processes; the default is `jax.devices()`.
  """
  if mesh.size == 1 or mesh.devices.flat[0].platform != "tpu":
    return True
  hosts = collections.defaultdict(list)
  for device in jax.devices() if devices is None else devices:
    hosts[device.process_index].append(device)
  return takes_one_host(list(hosts.values()))


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
