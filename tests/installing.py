"""Builds the wheel, and environments that hold nothing but what they are asked for; without a network."""

import email
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]


def offline_environment():
  """Returns the environment of a process that sees neither the clone nor a package index."""
  environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "XLA_"))}
  return environment | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(*command, cwd, status=0):
  """Runs a command that sees neither the clone nor a package index; returns what it prints, errors last."""
  done = subprocess.run(list(map(str, command)), cwd=cwd, env=offline_environment(), capture_output=True, text=True)
  assert done.returncode == status, done.stdout + done.stderr
  return done.stdout + done.stderr


def requirements(metadata, extra=""):
  """The requirements of a distribution here and now, with those of an extra."""
  required = map(Requirement, metadata.get_all("Requires-Dist") or [])
  return [r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]


def closure(names):
  """The installed distributions that pip would install for requirements such as "numpy" or "etils[epath]"."""
  found, waiting, seen = {}, [Requirement(name) for name in names], set()
  while waiting:
    wanted = waiting.pop()
    for extra in ("", *wanted.extras):
      if (wanted.name, extra) not in seen:
        seen.add((wanted.name, extra))
        found[wanted.name] = importlib.metadata.distribution(wanted.name)
        waiting += requirements(found[wanted.name].metadata, extra)
  return found.values()


def make_environment(folder, *names):
  """A virtual environment that shows nothing but the requirements `names` and what these require; its Python."""
  run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
  (packages,) = folder.glob("lib/python*/site-packages")
  for distribution in closure(names):
    for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
      if not (packages / top).exists():
        (packages / top).symlink_to(distribution.locate_file(top))
  return folder / "bin" / "python"


def copy_sources(folder):
  """Copies what the package is built from to a folder, so that the build leaves nothing in the clone."""
  for name in ("setup.py", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, folder)
  for name in ("async_rl", "experiments"):
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))


def build_wheel(sources, folder):
  """Builds the wheel of a copy of the sources into a folder; returns its path."""
  run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources, cwd=folder)
  return next(folder.glob("async_rl-*.whl"))


def read_metadata(wheel):
  """Returns the metadata of a wheel."""
  with zipfile.ZipFile(wheel) as archive:
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))
