"""The way of one array from the learner mesh to a generation mesh, in equal blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import SingleDeviceSharding

from async_rl.models import named_mesh

Array = jax.Array


class _Dimension(NamedTuple):
  """One dimension of an array as it travels.

  Attributes:
    size: its length.
    spread: the mesh axes over which the learner splits it.
    axes: those of them that lie within a host.
    ways: the number of parts into which `axes` split it.
    wanted: the mesh axes over which the target splits it.
    wanted_ways: the number of parts into which they split it.
  """

  size: int
  spread: tuple[str, ...]
  axes: tuple[str, ...]
  ways: int
  wanted: tuple[str, ...] = ()
  wanted_ways: int = 1


class Route:
  """Moves an array between meshes so that no learner device ever holds more of it than its own part.

  A learner device holds one block. Blocks are cut into pieces where there are fewer of them than generation devices,
  and travel in waves where there are more, so that each generation device receives an equal share. There the
  waves are gathered and joined.

  Where a host's learner devices lack blocks, the hosts exchange them first; each device then holds one block for every
  host over which the array was spread. Where hosts do not cut the mesh axes evenly, it holds the whole array.

  Args:
    shape: the array's shape.
    source: its sharding on the learner mesh.
    target: its sharding on the generation mesh of this process; where this one only learns, of one that samples.

  Attributes:
    staging: the sharding, on the learner mesh, of each of the arrays into which `cut` cuts it.
    devices: the generation devices, in their order.
  """

  def __init__(self, shape: Sequence[int], source: NamedSharding, target: NamedSharding):
    self.devices = list(target.mesh.devices.flat)
    self._target = target
    self._shape = tuple(shape)
    assert isinstance(source.mesh, Mesh)
    mesh, hosts = _split_by_host(source.mesh)
    dims = list(_dimensions(shape, source, target, hosts))
    self._sizes = [dim.size for dim in dims]
    self._ways = [dim.ways for dim in dims]
    self._spread = NamedSharding(mesh, PartitionSpec(*(dim.spread for dim in dims)))
    self.staging = NamedSharding(mesh, PartitionSpec(*(dim.axes for dim in dims)))

    # The innermost devices receive the parts that the target wants of them, where these are blocks or pieces of blocks.
    # Blocks of other dimensions are dealt to the outer devices, then pieces of one dimension to those that remain.
    fits = [dim.wanted_ways % dim.ways == 0 and dim.wanted_ways > 1 for dim in dims]
    kept = [dim.ways if fit else 1 for dim, fit in zip(dims, fits, strict=True)]
    trimmed = [dim.wanted_ways // dim.ways if fit else 1 for dim, fit in zip(dims, fits, strict=True)]
    free = len(self.devices) // math.prod(kept + trimmed)
    dealt = []
    for dim, fit in zip(dims, fits, strict=True):
      dealt.append(1 if fit else math.gcd(dim.ways, free))
      free //= dealt[-1]
    pieces = [1 if fit else math.gcd(dim.size // dim.ways, free) for dim, fit in zip(dims, fits, strict=True)]
    most = pieces.index(max(pieces))
    shared = [count if i == most else 1 for i, count in enumerate(pieces)]
    self._pieces = _products(shared, trimmed)
    self._taken = _products(dealt, kept)
    self._waves = [dim.ways // taken for dim, taken in zip(dims, self._taken, strict=True)]
    kinds = {"shared": shared, "dealt": dealt, "kept": kept, "trimmed": trimmed}
    names = [f"{kind} {i}" for kind in kinds for i in range(len(dims))]
    sizes = [size for of_dims in kinds.values() for size in of_dims]
    arrival = named_mesh(target.mesh.devices.reshape(-1, *sizes), ["copies", *names])
    blocks_first = ("dealt", "kept", "shared", "trimmed")
    axes = (tuple(f"{kind} {i}" for kind in blocks_first) for i in range(len(dims)))
    self._arrival = NamedSharding(arrival, PartitionSpec(*axes))
    whole = [dim.wanted if waves == 1 else () for dim, waves in zip(dims, self._waves, strict=True)]
    self._gathered = NamedSharding(target.mesh, PartitionSpec(*whole))

  def cut(self, x: Array) -> list[Array]:
    """Returns the pieces of an array on the learner mesh. Traceable; their shardings are to be `staging`."""
    x = jax.lax.with_sharding_constraint(x.reshape(self._sizes), self._spread)
    dims = list(zip(self._sizes, self._ways, self._pieces, strict=True))
    x = x.reshape([n for size, ways, pieces in dims for n in (ways, pieces, size // (ways * pieces))])
    whole = slice(None)
    return [
      x[tuple(at for i in piece for at in (whole, i, whole))].reshape([size // pieces for size, _, pieces in dims])
      for piece in np.ndindex(*self._pieces)
    ]

  def blocks(self, staged: Sequence[Array]) -> list[list[Array]]:
    """Returns the blocks to copy, for each wave one to every generation device in their order.

    Args:
      staged: the pieces on the learner mesh; this process's devices hold all of them.
    """
    holders: dict[tuple[int, ...], list[Array]] = {}
    for piece, array in zip(np.ndindex(*self._pieces), staged, strict=True):
      for shard in array.addressable_shards:
        starts = [at.start or 0 for at in shard.index]
        block = (at * ways // size for at, ways, size in zip(starts, self._ways, array.shape, strict=True))
        holders.setdefault((*piece, *block), []).append(shard.data)
    rank, devices = len(self._sizes), self._arrival.mesh.devices
    waves = []
    for number, wave in enumerate(np.ndindex(*self._waves)):
      chosen = []
      for (copy, *places), device in np.ndenumerate(devices):
        shared, dealt, kept, trimmed = np.reshape(places, (4, rank))
        piece, block = shared + trimmed, np.multiply(wave, self._taken) + dealt + kept
        sources = holders[(*piece.tolist(), *block.tolist())]
        own = [x for x in sources if x.devices() == {device}] or sources
        chosen.append(own[(copy + sum(piece) + number) % len(own)])  # in turn, to load the learner's devices evenly
      waves.append(chosen)
    return waves

  def abstract_blocks(self, dtype: jnp.dtype) -> list[list[jax.ShapeDtypeStruct]]:
    """Returns the shapes and shardings of the result of `blocks`, once these are on the generation devices."""
    shape = self._arrival.shard_shape(self._wave_shape())
    wave = [jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device)) for device in self.devices]
    return [wave] * math.prod(self._waves)

  def arrive(self, blocks: Sequence[Sequence[Array]] | None, dtype: jnp.dtype) -> list[Array]:
    """Returns each wave as one array on the generation mesh, from its blocks on the devices in their order.

    Args:
      blocks: the waves; `None` where the generation devices are of another process, of which the arrays have no data.
      dtype: the dtype of the array.
    """
    shape = self._wave_shape()
    waves = [()] * math.prod(self._waves) if blocks is None else blocks
    return [jax.make_array_from_single_device_arrays(shape, self._arrival, list(wave), dtype=dtype) for wave in waves]

  def abstract_arrived(self, dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of the result of `arrive`."""
    wave = jax.ShapeDtypeStruct(self._wave_shape(), dtype, sharding=self._arrival)
    return [wave] * math.prod(self._waves)

  def _wave_shape(self) -> tuple[int, ...]:
    return tuple(size // waves for size, waves in zip(self._sizes, self._waves, strict=True))

  def join(self, waves: Sequence[Array]) -> Array:
    """Returns the array, laid out as `target`, from what arrived. Traceable."""
    parts = [jax.lax.with_sharding_constraint(wave, self._gathered) for wave in waves]
    for dim in reversed(range(len(self._waves))):
      count = self._waves[dim]
      parts = [jnp.concatenate(parts[i : i + count], dim) for i in range(0, len(parts), count)]
    return jax.lax.with_sharding_constraint(parts[0].reshape(self._shape), self._target)


def _dimensions(
  shape: Sequence[int], source: NamedSharding, target: NamedSharding, hosts: dict[str, int]
) -> Iterator[_Dimension]:
  """Yields the dimensions as they travel: one that is spread over hosts becomes two, hosts first."""
  for size, axes, wanted in zip(shape, _entries(source, len(shape)), _entries(target, len(shape)), strict=True):
    across = math.prod(hosts[axis] for axis in axes)
    within = math.prod(source.mesh.shape[axis] for axis in axes) // across
    if across > 1:
      yield _Dimension(across, tuple(f"hosts of {axis}" for axis in axes), (), 1)
      yield _Dimension(size // across, axes, axes, within)
    else:
      yield _Dimension(size, axes, axes, within, wanted, math.prod(target.mesh.shape[axis] for axis in wanted))


def _entries(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
  """Returns the mesh axes that split each dimension."""
  entries = (*sharding.spec, *[None] * (rank - len(sharding.spec)))
  return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]


def _split_by_host(mesh: Mesh) -> tuple[Mesh, dict[str, int]]:
  """Returns the learner mesh, each axis split into hosts and devices of a host, and the hosts of each axis.

  Hosts that hold all blocks need no split. Otherwise, since devices are in order of process, a host has the innermost
  axes as far as they fill its devices.
  """
  processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
  if all(np.any(processes == process, axis=mesh.axis_names.index("data")).all() for process in set(processes.flat)):
    return mesh, dict.fromkeys(mesh.axis_names, 1)
  first = mesh.devices.flat[0].process_index
  free = sum(device.process_index == first for device in mesh.devices.flat)
  hosts = {}
  for axis, size in reversed(mesh.shape.items()):
    if free % size and size % free:
      hosts = dict(mesh.shape)  # no even cut: every device gathers everything
      break
    hosts[axis] = max(1, size // free)
    free = max(1, free // size)
  names = [name for axis in mesh.axis_names for name in (f"hosts of {axis}", axis)]
  sizes = [size for axis, whole in mesh.shape.items() for size in (hosts[axis], whole // hosts[axis])]
  return named_mesh(mesh.devices.reshape(sizes), names), hosts


def _products(a: Sequence[int], b: Sequence[int]) -> list[int]:
  return [x * y for x, y in zip(a, b, strict=True)]
