"""What the tests of notebooks share: the archive that they install from, and the environment of their kernels."""

import os

import pytest
from notebooks import ROOT
from notebooks import make_kernel_environment
from notebooks import pack
from notebooks import pictures
from notebooks import printed
from notebooks import run_notebook


@pytest.fixture(scope="module")
def archive(sources, wheel, tmp_path_factory):
  return pack(sources, wheel, tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
  return make_kernel_environment(tmp_path_factory.mktemp("kernel") / "environment", wheel)


@pytest.fixture
def run(archive, python, tmp_path):
  """Runs a notebook with these parameters on so many devices; returns what it printed and its pictures."""

  def run(name, parameters, devices=1):
    shared = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
    shared["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    done = run_notebook(ROOT / "colabs" / f"{name}.ipynb", python, archive, tmp_path, parameters, shared)
    return printed(done), pictures(done)

  return run
