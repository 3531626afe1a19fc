"""The weight store: the learner publishes its parameters, samplers fetch copies on their own devices."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from async_rl._monitor import Monitor
from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import param_shardings
from async_rl.models import split_trainable
from async_rl.models import with_shardings
from async_rl.rollout._mesh import takes_programs
from async_rl.rollout._spread_push import SpreadPush
from async_rl.rollout._weight_link import WeightLink
from async_rl.rollout._weight_push import Staged
from async_rl.rollout._weight_push import WeightPush


class WeightStore:
  """Moves parameters from the learner mesh to the generation mesh of this process and keeps the newest.

  Where some processes learn and others sample, all have a store; what the former find in theirs has no data.

  Publishing starts a program on the learner mesh, by which each device casts what it holds, and does not wait for it. A
  thread copies the blocks from device to device; a version is only seen once they are there. The thread that fetches
  it starts the programs that gather them on the generation mesh, see `WeightPush`. The store hands out nothing that
  shares memory with the learner's parameters, which may be donated right after `publish`.

  Where the parameters have adapters, the rest of them moves once, with the first version; later versions are new
  adapters beside the same arrays, so that keeping several costs little.

  Args:
    policy: the architecture and the compute dtype.
    shardings: the NamedShardings in which the sampler takes its weights, see `sampling.Sampler.weight_shardings`.
    learner: the learner mesh.
    link: the way from the processes that learn to those that sample; `None` where every process does both.
  """

  def __init__(self, policy: Policy, shardings: Params, learner: Mesh, link: WeightLink | None = None):
    abstract = with_shardings(policy.abstract(), param_shardings(policy.abstract(), learner))
    trained, frozen = split_trainable(abstract)
    mesh = jax.tree.leaves(shardings)[0].mesh
    kind: Any = WeightPush if takes_programs(mesh) else SpreadPush
    self._trained_push = kind(trained, policy.dtype, shardings, link)
    self._frozen_push = kind(frozen, policy.dtype, shardings, link)
    self._linked = link is not None
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
    self._monitor = Monitor("the weight store")
    self._published = -1
    self._ready = -1  # the newest version of which all blocks are on the generation mesh
    self._arrived: Any = []  # its blocks, until they are gathered
    self._arrived_frozen: Any = []
    self._params: Params = {}
    self._frozen: Params = {}  # on the generation mesh, once it is there
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
    trained, frozen = split_trainable(params)
    staged = self._trained_push.stage(trained)
    staged_frozen = self._frozen_push.stage(frozen) if frozen and self._published < 0 else []
    self._published = version
    self._pushing = True
    self._ready_at = math.inf
    self._thread.submit(self._push, version, staged, staged_frozen)

  def latest(self, at_least: int = 0, timeout: float | None = None) -> tuple[int, Params]:
    """Returns the newest version that is ready on the generation mesh, and its parameters.

    Call it in the thread that launches the sampler's programs: it starts the last part of the push.

    Args:
      at_least: wait for this version or a later one, for an idle sampler whose weights are used up.
      timeout: seconds to wait for it; then an older one is returned if there is any.

    Raises:
      Exception: whatever a push failed with.
      Closed: if the store was closed.
      TimeoutError: if there are no weights at all within `timeout`.
    """
    with self._monitor:
      self._monitor.wait_for(lambda: self._ready >= at_least, timeout)
      self._monitor.check_open()
      if self._ready < 0:
        raise TimeoutError(f"no weights within {timeout} s")
      if self._arrived_frozen:
        self._frozen = self._frozen_push.gather(self._arrived_frozen)
      if self._arrived:
        self._params = {**self._frozen, **self._trained_push.gather(self._arrived)}
      return self._ready, self._params

  @property
  def ready_at(self) -> float:
    """The time (`time.monotonic`) at which the learner had computed the newest weights; infinity while it computes."""
    return self._ready_at

  @property
  def push_seconds(self) -> float:
    """The seconds of the last push, from ready on the learner mesh to the last block on the generation mesh."""
    return self._push_seconds

  @property
  def push_bytes(self) -> int:
    """The size of the arrays that the last push moved, each counted once however many devices have it."""
    return self._push_bytes

  def close(self) -> None:
    """Wakes all waiters and releases the parameters."""
    self._monitor.close()
    self._thread.shutdown()
    self._arrived = self._arrived_frozen = []
    self._params = self._frozen = {}

  def _push(self, version: int, staged: Staged, staged_frozen: Staged) -> None:
    try:
      jax.block_until_ready((staged, staged_frozen))
      start = self._ready_at = time.monotonic()
      arrived = self._trained_push.copy(staged)
      arrived_frozen = self._frozen_push.copy(staged_frozen) if staged_frozen else []
      if self._linked:  # the first block arrives as soon as another process has computed it
        jax.block_until_ready(jax.tree.leaves(arrived)[0])
        start = self._ready_at = time.monotonic()
      jax.block_until_ready((arrived, arrived_frozen))
      with self._monitor:
        self._ready, self._arrived = version, arrived
        self._arrived_frozen = arrived_frozen or self._arrived_frozen
        self._push_seconds = time.monotonic() - start
        self._push_bytes = self._trained_push.nbytes + (self._frozen_push.nbytes if staged_frozen else 0)
    except BaseException as error:
      self._monitor.close(error)
    finally:
      with self._monitor:
        self._pushing = False
        self._monitor.notify()
