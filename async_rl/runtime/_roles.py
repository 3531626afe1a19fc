"""Which processes of a run learn and which sample: all do both, or each does one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax

from async_rl.recording._archive import from_archive
from async_rl.recording._archive import to_archive
from async_rl.runtime._experiment import Experiment
from async_rl.runtime._hosts import Hosts

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Roles:
  """The processes of a run by role.

  Attributes:
    index: the number of this process.
    learners: the processes that learn, in order, 0 first.
    samplers: the processes that sample, in order. Ticket t is of the process in place t modulo their number.
  """

  index: int
  learners: tuple[int, ...]
  samplers: tuple[int, ...]

  @property
  def apart(self) -> bool:
    """Returns whether some processes only learn and the others only sample."""
    return self.learners != self.samplers

  @property
  def learns(self) -> bool:
    """Returns whether this process learns."""
    return self.index in self.learners

  @property
  def samples(self) -> bool:
    """Returns whether this process samples."""
    return self.index in self.samplers

  @property
  def place(self) -> int:
    """Returns the place of this process among those that sample; 0 if it is not one of them."""
    return self.samplers.index(self.index) if self.samples else 0

  def share(self, groups: int) -> int:
    """Returns how many of the groups of a step this process samples."""
    return groups // len(self.samplers) if self.samples else 0

  def made(self, saved: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the host states of a checkpoint are those of as many processes in these roles."""
    samplers = tuple(i for i, host in enumerate(saved) if host["buffer"]["groups_per_step"])
    return samplers == self.samplers and len(saved) == len({*self.learners, *self.samplers})

  def sampler_of(self, ticket: int) -> int:
    """Returns the process that samples the group of a ticket."""
    return self.samplers[ticket % len(self.samplers)]


def assign_roles(experiment: Experiment, hosts: Hosts) -> Roles:
  """Returns the roles of the processes by the split of their devices.

  Raises:
    ValueError: if they cannot do in these roles what the experiment asks for.
  """
  everyone = tuple(range(hosts.count))
  samplers = experiment.make_meshes().samplers
  roles = Roles(hosts.index, tuple(i for i in everyone if i not in samplers), samplers or everyone)
  groups, count = experiment.options.training.groups, len(roles.samplers)
  if groups % count:
    raise ValueError(
      f"*groups* must be a multiple of the number of processes{' that sample' if roles.apart else ''}, got "
      f"groups={groups} on {count}; each of them samples as many."
    )
  if roles.apart and experiment.scorer is not None:
    raise ValueError(
      "A trained scorer, such as a reward model, must be where samples are drawn, got hosts that only generate; give "
      "generation_hosts=0, by which every host does both."
    )
  return roles


def done_by_learners(hosts: Hosts, roles: Roles, work: Callable[[], Result]) -> Result:
  """Does work in the processes that learn, while others go on sampling; returns its result in all.

  Args:
    hosts: the processes.
    roles: their roles.
    work: the work, which spans no process that does not learn.

  Raises:
    Exception: as `Hosts.agree`.
  """
  if not roles.apart:
    return work()
  return from_first(hosts, hosts.agree(work if roles.learns else lambda: None))


def from_first(hosts: Hosts, value: Any) -> Any:
  """Returns the first process's value in all of them: what `to_archive` takes, tuples as lists."""
  return from_archive(hosts.gather(to_archive({"value": value}) if hosts.first else b"")[0])["value"]


def states_of_samplers(hosts: Hosts, roles: Roles, state: Mapping[str, Any]) -> dict[int, bytes]:
  """Returns the states of the processes that only sample, in the one that saves them; see `Checkpointer.save`."""
  if not roles.apart:
    return {}
  archives = hosts.gather(b"" if roles.learns else to_archive(state))
  return {i: archives[i] for i in roles.samplers} if hosts.first else {}


def remote_array(abstract: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns an array on devices of other processes, of which this one has no data."""
  return jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, [], dtype=abstract.dtype)
