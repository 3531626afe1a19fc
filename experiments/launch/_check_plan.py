"""The question whether a run fits on its chips, to the compiler of `experiments.plan`."""

from __future__ import annotations

import shlex
import subprocess
import sys

from experiments.launch._commands import Command
from experiments.launch._drive import LaunchError
from experiments.launch._job import Job


def plan_command(job: Job, more: str = "") -> Command:
  """Returns the command that compiles a run for its slices; `more` are other options of it."""
  where = (f"--topology={job.topology}", f"--slices={job.slices}")
  return ("python", "-m", "experiments.plan", job.config, *where, *shlex.split(more), *job.arguments)


def check_plan(command: Command) -> None:
  """Plans a run, and prints the plan.

  Raises:
    LaunchError: if it does not fit on its chips, or cannot be planned.
  """
  status = subprocess.run((sys.executable, *command[1:]), check=False).returncode
  if status:
    reason = "does not fit on these chips" if status == 1 else "could not be planned"
    raise LaunchError(f"the run {reason}, see above; --no-plan launches it all the same")
