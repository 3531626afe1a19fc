"""A host of a launched run for tests: the rendered start-up script, run for real, with a bucket beside it."""

import os
import pathlib
import shlex
import subprocess
import sys
import tarfile

import fake_cloud

from experiments.launch import _script

ROOT = pathlib.Path(__file__).parents[2]
STAGING = "gs://bucket/run-launch/0001"


def make_cloud(folder, monkeypatch):
  """Makes the cloud; returns the folder of what the hosts leave."""
  staging = fake_cloud.install(folder, monkeypatch) / "bucket" / STAGING.removeprefix("gs://")
  staging.mkdir(parents=True)
  return staging


def pack_program(staging, program):
  """Leaves code in the bucket whose experiments.train is another program."""
  folder = staging.parent / "code"
  (folder / "experiments").mkdir(parents=True)
  (folder / "experiments" / "__init__.py").touch()
  (folder / "experiments" / "train.py").write_text(program)
  for name in ("setup.py", "experiments/setup_venv.sh"):
    (folder / name).write_bytes((ROOT / name).read_bytes())
  with tarfile.open(staging / "code.tar.gz", "w:gz") as archive:
    archive.add(folder, ".")


def start(home, job, worker=0, *, python=sys.executable, **options):
  """Starts the script of a job on a host.

  Args:
    home: the host's folder.
    job: the run.
    worker: the number of the host.
    python: the Python that the host has.
    **options: options of the script.
  """
  script = home / "start.sh"
  script.write_text(_script.render_script(job, STAGING, extras="train", **options))
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "ASYNC_RL_HOME": str(home),
    "ASYNC_RL_HOST": f"host-{worker}",
    "ASYNC_RL_REPORT_SECONDS": "1",
    "ASYNC_RL_RESTART_SECONDS": "0",
    "FAKE_WORKER": str(worker),
    "PYTHON": python,
  }
  return subprocess.Popen(["bash", str(script), "job"], env=environment, start_new_session=True)


def install(home):
  """Makes the home of a host that has the requirements of the extra `train`, as after its first start."""
  venv = home / "code" / ".venv"
  (venv / "bin").mkdir(parents=True, exist_ok=True)
  (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
  (venv / "bin" / "python").chmod(0o755)
  mark = subprocess.run(["cksum"], input=(ROOT / "setup.py").read_bytes(), capture_output=True, check=True).stdout
  version = f"Python{sys.version.split()[0]}"
  (venv / "installed").write_text(f"{mark.decode().split()[0]}-{version}[train]\n")
