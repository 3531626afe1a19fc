"""Several slot engines of one device each, as one sampler."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl._validation import check_multiple
from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import mesh_of_one
from async_rl.sampling._engine import Engine
from async_rl.sampling._sampler import Counters
from async_rl.sampling._sampler import Sampler
from async_rl.sampling._sampler_config import SamplerConfig
from async_rl.sampling._samples import Snapshot
from async_rl.sampling._samples import unpack_samples
from async_rl.types import Completion
from async_rl.types import Request


class EnginePool(Sampler):
  """A sampler of engines of one device each, for devices of which the compiler takes no program of several.

  Every engine has the whole weights and an equal share of the slots. A request goes to the engine with fewest
  unfinished samples. `step` decodes one chunk on all devices at once, each driven by a thread of its own, and returns
  when the last is done. Not thread-safe otherwise.

  Attributes:
    counters: the running totals; decode steps are those of the engine that took most in each chunk.

  Args:
    policy: the architecture.
    config: the sizes of all engines together, and the sampling distribution.
    stop_ids: the tokens that end a sample.
    pad_id: the id used to fill unused positions.
    mesh: the devices, all of this process, along one axis. `None` uses the first device.

  Raises:
    ValueError: if slots cannot be shared out, or the mesh splits weights over devices.
  """

  def __init__(
    self, policy: Policy, config: SamplerConfig, stop_ids: Sequence[int], pad_id: int, mesh: Mesh | None = None
  ):
    mesh = mesh_of_one(jax.local_devices()[0]) if mesh is None else mesh
    own, meshes = split_engines(config, mesh)
    self._config = config
    self._engines = [Engine(policy, own, stop_ids, pad_id, one) for one in meshes]
    self._places = [one.devices.flat[0] for one in meshes]
    self._everywhere = NamedSharding(mesh, PartitionSpec())
    self._unfinished = [0] * len(self._engines)
    self._threads = ThreadPoolExecutor(len(self._engines), thread_name_prefix="engine")
    self.counters = Counters()

  @property
  def weight_shardings(self) -> Params:
    """Returns the shardings in which `set_weights` takes prepared weights: whole on every device."""
    return jax.tree.map(lambda _: self._everywhere, self._engines[0].weight_shardings)

  def set_weights(self, params: Params, version: int) -> None:
    """Changes the weights of all engines, see `Engine.set_weights`."""
    if self._places[0].process_index != jax.process_index():
      return  # this process only learns
    if all(x.sharding == self._everywhere for x in jax.tree.leaves(params)):
      parts = [jax.tree.map(functools.partial(_on_device, place), params) for place in self._places]
    else:
      parts = [params] * len(self._engines)
    for engine, part in zip(self._engines, parts, strict=True):
      engine.set_weights(part, version)

  @property
  def checksum(self) -> int:
    """The checksum of the weights, the same in every engine.

    Raises:
      RuntimeError: if there are no weights yet, or a device's copy is damaged.
    """
    found = [engine.checksum for engine in self._engines]
    if len(set(found)) > 1:
      copies = ", ".join(f"{checksum:08x} on {place}" for checksum, place in zip(found, self._places, strict=True))
      raise RuntimeError(f"The engines hold different weights (checksums {copies}): a copy of them is damaged.")
    return found[0]

  def submit(self, request: Request) -> None:
    """Queues a request in the engine with fewest unfinished samples, see `Engine.submit`."""
    index = self._least_busy()
    self._engines[index].submit(request)
    self._unfinished[index] += self._config.group_size

  def resume(self, request: Request, completion: Completion, tokens: Sequence[int]) -> None:
    """Resumes a finished sample in the engine with fewest unfinished ones, see `Engine.resume`."""
    index = self._least_busy()
    self._engines[index].resume(request, completion, tokens)
    self._unfinished[index] += 1

  def room(self, completion: Completion) -> int:
    """Returns the number of tokens by which `completion` may still grow."""
    return self._engines[0].room(completion)

  def has_room(self) -> bool:
    """Returns whether one more request would start at the next `step`."""
    return self._engines[self._least_busy()].has_room()

  @property
  def idle(self) -> bool:
    """Returns whether nothing is live and nothing waits."""
    return all(engine.idle for engine in self._engines)

  def step(self) -> list[Completion]:
    """Decodes a chunk in every engine that has samples and returns those that finished, in the order of engines.

    Raises:
      RuntimeError: if there are no weights yet.
    """
    start = time.perf_counter()
    busy = [i for i, engine in enumerate(self._engines) if not engine.idle] or [0]
    before = [dataclasses.replace(self._engines[i].counters) for i in busy]
    finished = list(self._threads.map(lambda i: self._engines[i].step(), busy))
    for i, completions in zip(busy, finished, strict=True):
      self._unfinished[i] -= len(completions)
    self._count([self._engines[i].counters for i in busy], before)
    self.counters.seconds += time.perf_counter() - start
    return [completion for completions in finished for completion in completions]

  def snapshot(self) -> Snapshot:
    """Returns every unfinished sample, for a checkpoint. The engines themselves go on unchanged."""
    return Snapshot(*map(np.concatenate, zip(*(engine.snapshot() for engine in self._engines), strict=True)))

  def restore(self, state: Snapshot) -> None:
    """Continues the samples of a snapshot, those of a group in one engine; see `Engine.restore`."""
    if not self.idle:
      raise RuntimeError("restore needs an idle sampler; finish its unfinished samples with step first.")
    unpack_samples(state, self._config)  # refuses what is too long before anything is restored
    tickets: list[list[int]] = [[] for _ in self._engines]
    for ticket, count in zip(*np.unique(state.tickets, return_counts=True), strict=True):
      index = self._least_busy()
      tickets[index].append(ticket)
      self._unfinished[index] += int(count)
    for engine, own in zip(self._engines, tickets, strict=True):
      rows = np.isin(state.tickets, own)
      engine.restore(Snapshot(*(array[rows] for array in state)))

  def warmup(self, resumes: bool = False) -> None:
    """Compiles everything that later calls use, see `Engine.warmup`."""
    for engine in self._engines:
      engine.warmup(resumes)

  @property
  def compilations(self) -> int:
    """Returns the number of programs compiled so far."""
    return sum(engine.compilations for engine in self._engines)

  def _least_busy(self) -> int:
    return self._unfinished.index(min(self._unfinished))

  def _count(self, now: Sequence[Counters], before: Sequence[Counters]) -> None:
    """Adds what the engines counted in a step."""

    def changes(name: str) -> list[Any]:
      return [getattr(new, name) - getattr(old, name) for new, old in zip(now, before, strict=True)]

    self.counters.tokens += sum(changes("tokens"))
    self.counters.prefill_tokens += sum(changes("prefill_tokens"))
    self.counters.chunks += max(changes("chunks"))
    self.counters.steps += max(changes("steps"))
    self.counters.slot_steps += max(changes("steps")) * self._config.slots


def split_engines(config: SamplerConfig, mesh: Mesh) -> tuple[SamplerConfig, list[Mesh]]:
  """Returns the sizes of an engine of one device, and the meshes of one device each.

  Raises:
    ValueError: if slots cannot be shared out, or the mesh splits weights over devices.
  """
  count = mesh.size
  if mesh.shape.get("tensor", 1) > 1:
    raise ValueError(
      f"*generation_tensor* must be 1 for engines of one device each, got generation_tensor={mesh.shape['tensor']}."
    )
  check_multiple("slots", config.slots, count, "the number of devices that generate")
  if config.slots // count < config.group_size:
    raise ValueError(
      f"*slots* must be at least samples on each of {count} devices, got slots={config.slots}, "
      f"samples={config.group_size}; raise it to {config.group_size * count}."
    )
  meshes = [mesh_of_one(device, mesh.axis_names) for device in mesh.devices.flat]
  return dataclasses.replace(config, slots=config.slots // count), meshes


def _on_device(device: jax.Device, x: jax.Array) -> jax.Array:
  """Returns the copy that a device has of an array."""
  return next(shard.data for shard in x.addressable_shards if shard.device == device)
