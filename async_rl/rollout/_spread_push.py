"""The way of weights to devices between which no program runs: each of them receives all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl.models import Params
from async_rl.models import mesh_of_one
from async_rl.rollout._weight_link import WeightLink
from async_rl.rollout._weight_push import Arrived
from async_rl.rollout._weight_push import Staged
from async_rl.rollout._weight_push import WeightPush


class SpreadPush:
  """Moves parameters whole to each device of a generation mesh, with the methods of `WeightPush`.

  Args:
    abstract: as in `WeightPush`.
    dtype: the compute dtype.
    targets: the sampler's NamedShardings, all of arrays that every device holds whole.
    link: as in `WeightPush`.

  Attributes:
    nbytes: the bytes of the arrays that travel, each counted once.
  """

  def __init__(self, abstract: Params, dtype: str, targets: Params, link: WeightLink | None = None):
    self._targets = {part: targets[part] for part in abstract}
    (mesh,) = {sharding.mesh for sharding in jax.tree.leaves(targets)}
    self._pushes = [WeightPush(abstract, dtype, _on_one(device, targets), link) for device in mesh.devices.flat]
    self.nbytes = self._pushes[0].nbytes

  def stage(self, params: Params) -> Staged:
    """Starts the cast on the learner mesh, see `WeightPush.stage`; all devices receive the same blocks."""
    return self._pushes[0].stage(params)

  def copy(self, staged: Staged) -> list[Arrived]:
    """Starts the copies of this process's blocks to each of its generation devices. Launches no program."""
    return [push.copy(staged) for push in self._pushes]

  def gather(self, arrived: list[Arrived]) -> Params:
    """Starts a program on each generation device that joins what it received. Empties `arrived`."""
    trees = [push.gather(arrived.pop(0)) for push in self._pushes]
    return jax.tree.map(_assemble, self._targets, *trees)


def _on_one(device: jax.Device, targets: Params) -> Params:
  """Returns the shardings of the same arrays on one device."""

  def on_one(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(mesh_of_one(device, sharding.mesh.axis_names), PartitionSpec())

  return jax.tree.map(on_one, targets)


def _assemble(sharding: NamedSharding, *copies: jax.Array) -> jax.Array:
  """Returns one array of its copies on the devices, in their order."""
  local: Sequence[Any] = [copy.addressable_data(0) for copy in copies if copy.is_fully_addressable]
  first = copies[0]
  return jax.make_array_from_single_device_arrays(first.shape, sharding, local, dtype=first.dtype)
