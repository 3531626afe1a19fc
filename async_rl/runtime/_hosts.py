"""The processes of a run on several hosts: what they decide together, and what they tell one another.

Every process runs the same program and takes part in every program that spans the processes; only its main thread may
launch those, because all processes must launch them in the same order. `Hosts` is the one process of an ordinary run,
and costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl.models import named_mesh
from async_rl.rollout._buffer import EndOfData
from async_rl.runtime._signals import StopRequested
from async_rl.runtime._signals import StopSignal
from async_rl.runtime._watch import Watch

Result = TypeVar("Result")

#: How the work of a process ended, in order of precedence.
_DONE, _END_OF_DATA, _FAILED = range(3)


class Hosts:
  """The processes of a run: this one alone.

  Attributes:
    index: the number of this process.
    count: N, the number of processes.
    stop: the signals that ask this process to end.
  """

  index = 0
  count = 1

  def __init__(self) -> None:
    self.stop = StopSignal()

  @property
  def first(self) -> bool:
    """Returns whether this process writes what the processes share."""
    return self.index == 0

  def agree(self, work: Callable[[], Result]) -> Result:
    """Does work that spans no other process, and ends it in all processes alike.

    Args:
      work: the work of this process; it may be done in vain.

    Returns:
      What `work` returned, once all processes have done theirs.

    Raises:
      StopRequested: in all processes, if a signal asked one of them to end.
      EndOfData: in all processes, if the data of one ended.
      HostError: if the work of another process failed.
      Exception: what `work` raised.
    """
    return work()

  def gather(self, data: bytes) -> list[bytes]:
    """Returns the data of all processes, in their order."""
    return [data]

  def barrier(self) -> None:
    """Waits for all processes."""
    self.gather(b"")

  def among(self, members: Sequence[int]) -> Hosts:
    """Returns some of the processes as a run of their own; all of them, and no other one, must call it together.

    Args:
      members: the numbers of those processes in ascending order, of which this is one.
    """
    del members
    return self


class JoinedHosts(Hosts):
  """Several processes of one JAX job.

  They exchange over one CPU device of each, whatever accelerators they have: the main thread can pack a batch while the
  learner's devices compute, and no topology has to accept the set of devices.

  Args:
    stop: the signals that ask this process to end.
    watch: the watch over the others.
    devices: one CPU device of each process; `None` takes those of all processes.
    index: the number of this process among them, if they are given.
  """

  def __init__(
    self, stop: StopSignal, watch: Watch, devices: Sequence[jax.Device] | None = None, index: int | None = None
  ):
    self.stop = stop
    self.index = jax.process_index() if index is None else index
    self._watch = watch
    self._device = jax.local_devices(backend="cpu")[0]
    if devices is None:
      by_process = {device.process_index: device for device in reversed(jax.devices("cpu"))}
      devices = [by_process[i] for i in sorted(by_process)]
    self.count = len(devices)
    self._devices = devices
    mesh = named_mesh(np.array(devices), ["hosts"])
    self._rows = NamedSharding(mesh, PartitionSpec("hosts"))
    self._all_gather = jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))
    # Accelerators may number the processes otherwise than CPUs do. This first exchange also connects the processes,
    # which must not take long; later ones may wait for the slowest.
    self._order = np.arange(self.count)
    self._order = np.argsort(self._exchange(np.array([self.index], np.int32))[:, 0])

  def agree(self, work: Callable[[], Result]) -> Result:
    ending = _DONE
    error: Exception | None = None
    try:
      result = work()
    except StopRequested:
      pass  # all learn of the signal below
    except EndOfData as end:
      ending, error = _END_OF_DATA, end
    except Exception as failure:
      self._watch.announce(failure)
      ending, error = _FAILED, failure
    endings, signals = self._exchange(np.array([ending, self.stop.number], np.int32)).T
    if ending == _FAILED and error is not None:
      raise error
    if _FAILED in endings:
      raise self._watch.wait_for_failure()
    if signals.any():
      self.stop.request(int(signals.max()))
      raise StopRequested
    if _END_OF_DATA in endings:
      raise error or EndOfData("the data of another process ended")
    return result

  def gather(self, data: bytes) -> list[bytes]:
    sizes = self._exchange(np.array([len(data)], np.int32))[:, 0]
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # few lengths: each is compiled once
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = self._exchange(padded) if sizes.any() else np.zeros((self.count, 0), np.uint8)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

  def among(self, members: Sequence[int]) -> Hosts:
    if len(members) == self.count:
      return self
    if len(members) > 1:
      devices = [self._devices[self._order[i]] for i in members]
      return JoinedHosts(self.stop, self._watch, devices, list(members).index(self.index))
    alone = Hosts()
    alone.stop = self.stop
    return alone

  def _exchange(self, row: np.ndarray) -> np.ndarray:
    """Returns the rows of all processes, [N, ...]."""
    assert threading.current_thread() is threading.main_thread()
    shape = (self.count, *row.shape)
    placed = jax.device_put(row[None], self._device)
    rows = self._all_gather(jax.make_array_from_single_device_arrays(shape, self._rows, [placed]))
    return np.asarray(rows)[self._order]


def _identity(x: jax.Array) -> jax.Array:
  return x
