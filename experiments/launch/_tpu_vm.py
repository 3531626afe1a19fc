"""TPU VMs: one slice of the Cloud TPU API, which is there within minutes or not at all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from typing import ClassVar

from experiments.launch._commands import Command
from experiments.launch._job import LABEL
from experiments.launch._job import Job
from experiments.launch._machines import Host
from experiments.launch._machines import Place
from experiments.launch._machines import Run
from experiments.launch._machines import State
from experiments.launch._machines import Zone
from experiments.launch._machines import label_of
from experiments.launch._machines import state_from

_GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")


@dataclasses.dataclass(frozen=True)
class TpuVm:
  """The machines of a slice."""

  job: Job
  place: Place
  join_by_bucket: ClassVar[bool] = False

  def __post_init__(self):
    check_generation(self.job)
    if self.job.slices > 1:
      raise ValueError(
        f"*slices* must be 1 for tpu-vm, got slices={self.job.slices}; queued, xpk and jobset take several slices."
      )

  def create(self, script: str) -> list[Command]:
    spot = ("--spot",) * self.job.spot
    return [
      (
        *(*_GCLOUD, "create", self.job.name, *self.place.where, *accelerator_of(self.job)),
        *(f"--version={self.job.topology.names.runtime}", *spot, label_of(self.job), "--scopes=cloud-platform"),
        *(f"--metadata-from-file=startup-script={script}", *self.place.more),
      )
    ]

  def describe(self) -> Command:
    return describe_node(self.job.name, self.place)

  def read_state(self, described: Any) -> State:
    return state_from(described["state"], "READY", ("CREATING", "STARTING", "RESTARTING", "REPAIRING"))

  def list_hosts(self, run: Run) -> list[Host]:
    return list_hosts_of_node(self.job.name, self.place, run)

  def shell(self, host: Host, command: str) -> Command:
    return shell_of(host, command, self.place)

  def delete(self) -> list[Command]:
    return delete_commands(self.job.name, self.place)


def delete_commands(name: str, zone: Zone) -> list[Command]:
  """Returns the commands that delete the machines of a run."""
  return [(*_GCLOUD, "delete", name, *zone.where, "--quiet")]


def list_command(zone: Zone) -> Command:
  """Returns the command that lists all TPU VMs of a zone."""
  return (*_GCLOUD, "list", *zone.where, "--format=json")


def read_list(described: Any) -> list[tuple[str, str, str]]:
  """Returns name, kind and state of the machines in a list, and of what was launched from here alone."""
  return [
    (node["name"].rpartition("/")[2], node.get("acceleratorType", "?"), node["state"])
    for node in described
    if LABEL in node.get("labels", {})
  ]


def check_generation(job: Job) -> None:
  """Refuses TPUs that the Cloud TPU API does not have."""
  if job.topology.names.runtime is None:
    raise ValueError(
      f"*topology* must be of v5e, v5p or v6e for the Cloud TPU API, got topology={job.topology}; gce, xpk and jobset "
      "have the others."
    )


def accelerator_of(job: Job) -> Command:
  """Returns the options of the Cloud TPU API that name a slice."""
  topology = job.topology
  if topology.is_usual:
    return (f"--accelerator-type={topology.accelerator_type}",)
  return (f"--type={topology.names.accelerator}", f"--topology={topology.shape}")


def describe_node(node: str, place: Place) -> Command:
  """Returns the command that describes a slice."""
  return (*_GCLOUD, "describe", node, *place.where, "--format=json")


def list_hosts_of_node(node: str, place: Place, run: Run) -> list[Host]:
  """Returns the hosts of a slice that is ready."""
  endpoints = json.loads(run(describe_node(node, place)))["networkEndpoints"]
  return [Host(node, worker) for worker in range(len(endpoints))]


def shell_of(host: Host, command: str, place: Place) -> Command:
  """Returns the command that runs one for the shell on a host of a slice."""
  alive = "--ssh-flag=-o ServerAliveInterval=30"
  return (*_GCLOUD, "ssh", host.machine, *place.where, f"--worker={host.worker}", alive, f"--command={command}")
