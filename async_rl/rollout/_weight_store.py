"""The weight store: the learner publishes its parameters, samplers fetch copies that are ready on their devices."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl._monitor import Monitor
from async_rl.models import split_trainable

Params = Any


class WeightStore:
  """Moves parameters from the learner mesh to the generation mesh of this process and keeps the newest.

  One jitted call on the learner mesh casts the parameters and lays them out so that every shard the generation mesh
  wants exists whole on a local learner device; from there shards are copied from device to device. The copy runs in a
  thread of its own: publishing does not stall the learner, and a version is only seen once it is ready. What the
  store hands out never shares memory with the learner's parameters, which may be donated right after `publish`.

  Where the parameters have adapters, the rest of them moves once, with the first version; later versions are new
  adapters beside the same arrays, so that keeping several costs little.

  Args:
    prepare: maps the learner's parameters to the sampler's, dicts both (casts, unstacks layers); called under `jit`.
    shardings: NamedSharding on the generation mesh for each leaf that `prepare` returns.
    learner: the learner mesh.
  """

  def __init__(self, prepare: Callable[[Params], Params], shardings: Params, learner: Mesh):
    self._shardings = shardings
    staging = jax.tree.map(lambda target: _staging_sharding(target, learner), shardings)
    trained, frozen = split_trainable(staging)
    self._prepare = jax.jit(lambda params: split_trainable(prepare(params))[0], out_shardings=trained)
    self._prepare_frozen = jax.jit(lambda params: split_trainable(prepare(params))[1], out_shardings=frozen)
    self._frozen: Params = None if frozen else {}  # on the generation mesh, once it is there
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
    self._monitor = Monitor("the weight store")
    self._newest: tuple[int, Params] = (-1, None)
    self._published = -1
    self._push_seconds = 0.0
    self._push_bytes = 0
    self._ready_at = math.inf
    self._pushing = False

  def publish(self, version: int, params: Params) -> None:
    """Starts moving `params`; waits only if the version before is still on its way.

    Args:
      version: larger than any published before.
      params: on the learner mesh. They may be donated as soon as this returns.

    Raises:
      Exception: whatever the push before failed with.
      Closed: if the store was closed.
    """
    with self._monitor:
      if version <= self._published:
        raise ValueError(f"version {version} is published after version {self._published}")
      self._monitor.wait_for(lambda: not self._pushing)
      self._monitor.check_open()
    staged = self._prepare(params)
    if self._frozen is None:
      staged |= self._prepare_frozen(params)
    self._published = version
    self._pushing = True
    self._ready_at = math.inf
    self._thread.submit(self._push, version, staged)

  def latest(self, at_least: int = 0, timeout: float | None = None) -> tuple[int, Params]:
    """Returns the newest version that is ready on the generation mesh, and its parameters.

    Args:
      at_least: wait for this version or a later one, for an idle sampler whose weights are used up.
      timeout: seconds to wait for it; then an older one is returned if there is any.

    Raises:
      Exception: whatever a push failed with.
      Closed: if the store was closed.
      TimeoutError: if there are no weights at all within `timeout`.
    """
    with self._monitor:
      self._monitor.wait_for(lambda: self._newest[0] >= at_least, timeout)
      self._monitor.check_open()
      if self._newest[0] < 0:
        raise TimeoutError(f"no weights within {timeout} s")
      return self._newest

  @property
  def ready_at(self) -> float:
    """The time (`time.monotonic`) at which the learner had computed the newest weights; infinity while it computes."""
    return self._ready_at

  @property
  def push_seconds(self) -> float:
    """The seconds of the last push, from ready on the learner mesh to ready on the generation mesh."""
    return self._push_seconds

  @property
  def push_bytes(self) -> int:
    """The size of the arrays that the last push moved, each counted once however many devices have it."""
    return self._push_bytes

  def close(self) -> None:
    """Wakes all waiters and releases the parameters."""
    self._monitor.close()
    self._thread.shutdown()
    self._newest = (-1, None)
    self._frozen = None

  def _push(self, version: int, staged: Params) -> None:
    try:
      jax.block_until_ready(staged)
      start = self._ready_at = time.monotonic()
      leaves, tree = jax.tree.flatten(staged)
      local = jax.tree.unflatten(tree, map(_local_copy, leaves, itertools.count()))
      moved = jax.block_until_ready(jax.device_put(local, {part: self._shardings[part] for part in staged}))
      seconds = time.monotonic() - start
      if self._frozen is None:
        self._frozen = split_trainable(moved)[1]
      with self._monitor:
        self._newest = (version, {**self._frozen, **moved})
        self._push_seconds, self._push_bytes = seconds, sum(leaf.nbytes for leaf in leaves)
    except BaseException as error:
      self._monitor.close(error)
    finally:
      with self._monitor:
        self._pushing = False
        self._monitor.notify()


def _staging_sharding(target: NamedSharding, learner: Mesh) -> NamedSharding:
  """The layout on the learner mesh from which the shards of `target` can be copied one by one.

  A device-to-device copy cannot cut or join shards (JAX would go through the host), so the learner's own collectives
  make the shards first: the axes over which `target` splits the array, repeated over the learner's devices.
  """
  devices = learner.devices.flatten()
  if list(devices) == list(target.mesh.devices.flat):
    return target
  entries = [(entry,) if isinstance(entry, str) else entry or () for entry in target.spec]
  names = list(itertools.chain(*entries))
  sizes = [target.mesh.shape[name] for name in names]
  local_count = sum(device.process_index == jax.process_index() for device in devices)
  if local_count % math.prod(sizes):
    return NamedSharding(learner, PartitionSpec())
  return NamedSharding(_mesh(devices, names, sizes), target.spec)


def _local_copy(staged: jax.Array, index: int) -> jax.Array:
  """The part of a staged array on this process's devices, which holds all of it."""
  shards = staged.addressable_shards
  if staged.is_fully_replicated:
    return shards[index % len(shards)].data  # in turn, to load the devices evenly
  if staged.is_fully_addressable:
    return staged
  assert isinstance(staged.sharding, NamedSharding)
  mesh, spec = staged.sharding.mesh, staged.sharding.spec
  devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
  local = NamedSharding(_mesh(devices, mesh.axis_names[1:], mesh.devices.shape[1:]), spec)
  return jax.make_array_from_single_device_arrays(staged.shape, local, [shard.data for shard in shards])


def _mesh(devices: Any, names: Any, sizes: Any) -> Mesh:
  return Mesh(np.reshape(devices, (-1, *sizes)), ("copies", *names), axis_types=(AxisType.Auto,) * (len(sizes) + 1))
