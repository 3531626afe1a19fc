"""The description of a run on TPUs, which is the same for all back ends."""

from __future__ import annotations

import dataclasses
import re
import shlex

from experiments.launch._topology import Topology

#: Exit statuses of training after which a restart helps: what asks for one by convention, an abort (by which a process
#: ends that has lost another one), SIGKILL (memory, or a machine that goes), SIGTERM (preemption, maintenance). All
#: others are errors that would come again.
RESTART_STATUSES = (42, 134, 137, 143)
#: The label of everything that is created, with the name of the run as its value.
LABEL = "async_rl"


@dataclasses.dataclass(frozen=True)
class Job:
  """A run on TPUs.

  Attributes:
    name: the name of what is created for it.
    config: the name of the config, or the path of its file below the root of the code.
    arguments: the options of the config, as on the command line.
    run_dir: the folder of the run.
    topology: the slice.
    slices: the number of slices.
    spot: whether the machines may be preempted, for less money.
    max_restarts: the number of restarts after which the run ends.
    env: environment variables of the run, each NAME=VALUE.
  """

  name: str
  config: str
  arguments: tuple[str, ...]
  run_dir: str
  topology: Topology
  slices: int = 1
  spot: bool = False
  max_restarts: int = 50
  env: tuple[str, ...] = ()

  def __post_init__(self):
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,26}[a-z0-9])?", self.name):
      raise ValueError(
        f"*name* must be at most 28 lowercase letters, digits and hyphens, from a letter to a letter or digit, got "
        f"name={self.name!r}."
      )
    if self.slices < 1:
      raise ValueError(f"*slices* must be an integer at least 1, got slices={self.slices}.")
    if self.max_restarts < 0:
      raise ValueError(f"*max_restarts* must be an integer at least 0, got max_restarts={self.max_restarts}.")
    for variable in self.env:
      if not re.fullmatch(r"[A-Za-z_]\w*=.*", variable):
        raise ValueError(f"*env* must be of the form NAME=VALUE, got env={variable!r}.")
    check_folder("run_dir", self.run_dir)

  @property
  def training(self) -> tuple[str, ...]:
    """Returns the command of training, to be run by each host."""
    return ("python", "-m", "experiments.train", self.config, *self.arguments)

  @property
  def hosts(self) -> int:
    """Returns the number of hosts of all slices."""
    return self.slices * self.topology.hosts

  def __str__(self) -> str:
    slices = f"{self.slices} slices {self.topology}" if self.slices > 1 else str(self.topology)
    chips = self.slices * self.topology.chips
    hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
    return f"{self.config} on {slices} ({chips} chip{'s' * (chips > 1)} of {hosts}{', spot' * self.spot})"


def check_folder(name: str, folder: str) -> None:
  """Refuses a folder that machines which come and go could not share; `name` is its option."""
  if not re.fullmatch(r"(gs:/)?(/[\w.-]+)+/?", folder, re.ASCII):
    raise ValueError(
      f"*{name}* must be a folder gs://BUCKET/PATH (or an absolute path that all hosts mount) of letters, digits, '.', "
      f"'_' and '-', got {name}={folder!r}."
    )


def make_name(folder: str) -> str:
  """Returns a name for the run of a folder."""
  last = re.sub(r"[^a-z0-9]+", "-", folder.rstrip("/").rpartition("/")[2].lower())
  return re.sub(r"^(?![a-z])", "run-", last.strip("-"))[:28].strip("-")


def show(command: tuple[str, ...] | list[str]) -> str:
  """Returns a command as text for a shell, with long ones on several lines."""
  lines: list[str] = []
  for part in command:
    quoted = shlex.quote(part)
    if lines and not part.startswith("-"):
      lines[-1] += f" {quoted}"
    else:
      lines.append(quoted)
  text = " ".join(lines)
  return text if len(text) <= 118 else " \\\n    ".join(lines)
