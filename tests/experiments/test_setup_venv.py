"""The Python that .venv is made of: the first one that works, or the one that is asked for."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def commands(tmp_path):
  """A folder of commands that is all of the PATH: a Python 3.12 that fails as shims do, and this one as `python3`."""
  (tmp_path / "python3.12").write_text("#!/bin/sh\necho python3.12: command not found >&2\nexit 127\n")
  (tmp_path / "python3.12").chmod(0o755)
  (tmp_path / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
  (tmp_path / "python3").chmod(0o755)
  return tmp_path


def find_python(commands, **variables):
  environment = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {"PATH": str(commands)} | variables
  command = [shutil.which("bash"), "-euc", "source experiments/setup_venv.sh; find_python"]
  return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_python_that_fails_is_passed_over(commands):
  found = find_python(commands)
  assert (found.returncode, found.stdout, found.stderr) == (0, f"{commands}/python3\n", "")


def test_the_python_that_is_asked_for_is_taken(commands):
  assert find_python(commands, PYTHON=sys.executable).stdout == f"{sys.executable}\n"


@pytest.mark.parametrize("python", ["python3.12", "no-such-python"])
def test_no_python_that_works_is_one_sentence(commands, python):
  found = find_python(commands, PYTHON=python)
  assert (found.returncode, found.stdout) == (1, "")
  assert found.stderr == "Python 3.11 or newer with the module ensurepip is needed; install it and run this again.\n"
