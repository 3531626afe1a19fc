"""Compute Engine: one machine, or a managed group of them that makes a slice; the way that Google recommends."""

from __future__ import annotations

import dataclasses
import json
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

_GCLOUD = ("gcloud", "compute")
_WAITING = ("PENDING", "PROVISIONING", "STAGING")


@dataclasses.dataclass(frozen=True)
class ComputeEngine:
  """The machines of a slice: an instance, or an instance template, a workload policy and a managed group."""

  job: Job
  place: Place
  #: JAX looks for the other processes in metadata that only the Cloud TPU API sets.
  join_by_bucket: ClassVar[bool] = True

  def __post_init__(self):
    topology = self.job.topology
    if self.job.slices > 1:
      raise ValueError(
        f"*slices* must be 1 for gce, got slices={self.job.slices}; queued, xpk and jobset take several slices."
      )
    if topology.generation == "v5e" and topology.hosts > 1:
      raise ValueError(
        f"*topology* must be of v5p, v6e or tpu7x for a slice of several hosts in gce, got topology={topology}; "
        "queued, xpk and jobset have it."
      )
    if self._is_group and self.place.project is None:
      raise ValueError("*project* must be given for a slice of several hosts in gce, got project=None.")

  @property
  def _is_group(self) -> bool:
    return self.job.topology.hosts > 1

  def create(self, script: str) -> list[Command]:
    job, place = self.job, self.place
    spot = ("--provisioning-model=SPOT", "--instance-termination-action=STOP") if job.spot else ()
    machine = (
      *(f"--machine-type={job.topology.machine_type}", "--maintenance-policy=TERMINATE", *spot),
      *(f"--image-family={job.topology.names.image}", "--image-project=ubuntu-os-accelerator-images"),
      *("--boot-disk-size=200GB", "--scopes=cloud-platform", label_of(job)),
      *(f"--metadata-from-file=startup-script={script}", *place.more),
    )
    if not self._is_group:
      return [(*_GCLOUD, "instances", "create", job.name, *place.where, *machine)]
    return [
      (
        *(*_GCLOUD, "resource-policies", "create", "workload-policy", job.name, *place.account),
        *(f"--region={place.region}", "--type=HIGH_THROUGHPUT", f"--accelerator-topology={job.topology.shape}"),
      ),
      (*_GCLOUD, "instance-templates", "create", job.name, *place.account, *machine),
      (
        *(*_GCLOUD, "instance-groups", "managed", "create", job.name, *place.where, f"--template={job.name}"),
        *(f"--size={job.topology.hosts}", "--default-action-on-vm-failure=do-nothing"),
        f"--workload-policy=projects/{place.project}/regions/{place.region}/resourcePolicies/{job.name}",
      ),
    ]

  def describe(self) -> Command:
    if not self._is_group:
      return (*_GCLOUD, "instances", "describe", self.job.name, *self.place.where, "--format=json")
    group = (*_GCLOUD, "instance-groups", "managed", "list-instances", self.job.name)
    return (*group, *self.place.where, "--format=json")

  def read_state(self, described: Any) -> State:
    if not self._is_group:
      return state_from(described["status"], "RUNNING", _WAITING)
    states = [_state_of_member(member) for member in described]
    if len(states) < self.job.topology.hosts:
      return State(Condition.WAITING, f"{len(states)} of {self.job.topology.hosts} machines")
    for condition in (Condition.FAILED, Condition.LOST, Condition.WAITING):
      if found := [state.words for state in states if state.condition is condition]:
        return State(condition, f"{len(found)} of {len(states)} machines {found[0]}")
    return State(Condition.READY, "RUNNING")

  def list_hosts(self, run: Run) -> list[Host]:
    if not self._is_group:
      return [Host(self.job.name)]
    return [Host(member["instance"].rpartition("/")[2]) for member in json.loads(run(self.describe()))]

  def shell(self, host: Host, command: str) -> Command:
    alive = "--ssh-flag=-o ServerAliveInterval=30"
    return (*_GCLOUD, "ssh", host.machine, *self.place.where, alive, f"--command={command}")

  def delete(self) -> list[Command]:
    instance, *group = delete_commands(self.job.name, self.place)
    return group if self._is_group else [instance]


def delete_commands(name: str, zone: Zone) -> list[Command]:
  """Returns the commands that delete the machine of a run, or its group; one of the two is missing."""
  return [
    (*_GCLOUD, "instances", "delete", name, *zone.where, "--quiet"),
    (*_GCLOUD, "instance-groups", "managed", "delete", name, *zone.where, "--quiet"),
    (*_GCLOUD, "instance-templates", "delete", name, *zone.account, "--quiet"),
    (*_GCLOUD, "resource-policies", "delete", name, *zone.account, f"--region={zone.region}", "--quiet"),
  ]


def list_command(zone: Zone) -> Command:
  """Returns the command that lists all machines of a zone."""
  return (*_GCLOUD, "instances", "list", *zone.account, f"--zones={zone.zone}", "--format=json")


def read_list(described: Any) -> list[tuple[str, str, str]]:
  """Returns name, kind and state of the runs in a list of machines, and of what was launched from here alone."""
  runs: dict[str, tuple[str, list[str]]] = {}
  for machine in described:
    if name := machine.get("labels", {}).get(LABEL):
      runs.setdefault(name, (machine["machineType"].rpartition("/")[2], []))[1].append(machine["status"])
  return [
    (name, f"{len(states)} x {kind}", ", ".join(f"{states.count(s)} {s}" for s in sorted(set(states))))
    for name, (kind, states) in runs.items()
  ]


def _state_of_member(member: Any) -> State:
  """Returns the state of a machine of the group: one that is not there yet has none, and perhaps errors."""
  errors = [error["message"] for error in member.get("lastAttempt", {}).get("errors", {}).get("errors", [])]
  if not member.get("instanceStatus"):
    quota = [message for message in errors if "quota" in message.lower()]
    return State(Condition.FAILED if quota else Condition.WAITING, "; ".join(["PENDING", *(quota or errors)]))
  return state_from(member["instanceStatus"], "RUNNING", _WAITING)
