"""Queued resources: one slice or several of the Cloud TPU API, which come when they are free."""

from __future__ import annotations

import dataclasses
from typing import Any
from typing import ClassVar

from experiments.launch._commands import Command
from experiments.launch._job import LABEL
from experiments.launch._job import Job
from experiments.launch._machines import Condition
from experiments.launch._machines import Host
from experiments.launch._machines import Place
from experiments.launch._machines import Run
from experiments.launch._machines import State
from experiments.launch._machines import Zone
from experiments.launch._machines import label_of
from experiments.launch._machines import state_from
from experiments.launch._tpu_vm import accelerator_of
from experiments.launch._tpu_vm import check_generation
from experiments.launch._tpu_vm import list_hosts_of_node
from experiments.launch._tpu_vm import shell_of

_GCLOUD = ("gcloud", "compute", "tpus", "queued-resources")
_WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")


@dataclasses.dataclass(frozen=True)
class Queued:
  """The machines of a queued resource."""

  job: Job
  place: Place
  join_by_bucket: ClassVar[bool] = False

  def __post_init__(self):
    check_generation(self.job)

  def create(self, script: str) -> list[Command]:
    nodes: Command = (f"--node-id={self.job.name}",)
    if self.job.slices > 1:
      nodes = (f"--node-count={self.job.slices}", f"--node-prefix={self.job.name}")
    spot = ("--spot",) * self.job.spot
    minutes = max(1, round(60 * self.place.wait_hours))
    return [
      (
        *(*_GCLOUD, "create", self.job.name, *self.place.where, *accelerator_of(self.job)),
        *(f"--runtime-version={self.job.topology.names.runtime}", *nodes, *spot, label_of(self.job)),
        *("--scopes=cloud-platform", f"--valid-until-duration={minutes}m"),
        *(f"--metadata-from-file=startup-script={script}", *self.place.more),
      )
    ]

  def describe(self) -> Command:
    return (*_GCLOUD, "describe", self.job.name, *self.place.where, "--format=json")

  def read_state(self, described: Any) -> State:
    state = described["state"]
    found = state_from(state["state"], "ACTIVE", _WAITING, ("FAILED",))
    if found.condition is Condition.FAILED:
      reason = state.get("failedData", {}).get("error", {}).get("message", "no reason was given")
      return State(found.condition, f"FAILED: {reason}")
    return found

  def list_hosts(self, run: Run) -> list[Host]:
    name, slices = self.job.name, self.job.slices
    nodes = [f"{name}-{i}" for i in range(slices)] if slices > 1 else [name]
    return [host for node in nodes for host in list_hosts_of_node(node, self.place, run)]

  def shell(self, host: Host, command: str) -> Command:
    return shell_of(host, command, self.place)

  def delete(self) -> list[Command]:
    return delete_commands(self.job.name, self.place)


def delete_commands(name: str, zone: Zone) -> list[Command]:
  """Returns the commands that delete the machines of a run."""
  return [(*_GCLOUD, "delete", name, *zone.where, "--force", "--quiet")]


def list_command(zone: Zone) -> Command:
  """Returns the command that lists all queued resources of a zone."""
  return (*_GCLOUD, "list", *zone.where, "--format=json")


def read_list(described: Any) -> list[tuple[str, str, str]]:
  """Returns name, kind and state of the queued resources in a list, and of what was launched from here alone."""
  rows = []
  for resource in described:
    nodes = resource.get("tpu", {}).get("nodeSpec", [])
    if any(LABEL in spec.get("node", {}).get("labels", {}) for spec in nodes):
      kind = nodes[0]["node"].get("acceleratorType", "?")
      rows.append((resource["name"].rpartition("/")[2], kind, resource["state"]["state"]))
  return rows
