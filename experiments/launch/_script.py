"""The start-up script of a host, and the code that it installs."""

from __future__ import annotations

import pathlib
import shlex
import tarfile

from experiments.launch._job import RESTART_STATUSES
from experiments.launch._job import Job

ROOT = pathlib.Path(__file__).parents[2]
#: Seconds that a run has to save when its machine is stopped.
GRACE_SECONDS = 120
CODE = ("setup.py", "README.md", "LICENSE", "async_rl", "experiments")


def render_script(job: Job, staging: str, *, extras: str = "", prepare: str = "", join_by_bucket: bool = False) -> str:
  """Returns the start-up script of every host of a run.

  Args:
    job: the run.
    staging: the folder gs://... of this attempt, with the code.
    extras: the extras of the package to install, separated by commas.
    prepare: a command for the shell between the installation and the run.
    join_by_bucket: whether the processes find each other by the bucket, because JAX cannot on these machines.
  """
  values: dict[str, str | int] = {
    "STAGING": staging,
    "HOSTS": job.hosts,
    "JOIN": "bucket" if join_by_bucket else "environment",
    "EXTRAS": f"[{extras}]" if extras else "",
    "PREPARE": prepare,
    "GRACE_SECONDS": GRACE_SECONDS,
    "MAX_RESTARTS": job.max_restarts,
    "RESTART_STATUSES": " ".join(map(str, RESTART_STATUSES)),
  }
  lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
  lines += [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
  lines += [f"export {name}={shlex.quote(value)}" for name, _, value in (v.partition("=") for v in job.env)]
  lines += [f"TRAINING=({shlex.join(job.training[1:])})", ""]
  return "\n".join(lines) + pathlib.Path(__file__).with_name("start.sh").read_text()


def pack_code(file: pathlib.Path) -> None:
  """Writes what the hosts need of the working tree, without results of experiments, to a .tar.gz file."""

  def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    folders = pathlib.PurePath(entry.name).parts
    return None if "__pycache__" in folders or "results" in folders else entry

  with tarfile.open(file, "w:gz") as archive:
    for name in CODE:
      archive.add(ROOT / name, name, filter=wanted)
