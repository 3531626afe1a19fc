"""A wheel works outside the clone beside what it requires; `experiments` is installed nowhere; all is declared."""

import ast
import email
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement

import async_rl

ROOT = pathlib.Path(__file__).parents[1]
#: What comes with Python, with JAX, or is asked for where it is used with a sentence of its own.
UNDECLARED = {"async_rl", "experiments", "jaxlib", "torch", "transformers", "wandb", *sys.stdlib_module_names}


def run(*command, cwd, status=0):
  """Runs a command that sees neither the clone nor a package index; returns what it prints, errors last."""
  environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "XLA_"))}
  environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
  done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
  assert done.returncode == status, done.stdout + done.stderr
  return done.stdout + done.stderr


def requirements(metadata, extra=""):
  """The requirements of a distribution here and now, with those of an extra."""
  required = map(Requirement, metadata.get_all("Requires-Dist") or [])
  return [r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]


def closure(names):
  """The installed distributions that pip would install for `names`."""
  found, waiting = {}, list(names)
  while waiting:
    name = waiting.pop()
    if name not in found:
      found[name] = importlib.metadata.distribution(name)
      waiting += [requirement.name for requirement in requirements(found[name].metadata)]
  return found.values()


def make_environment(folder, *names):
  """A virtual environment that shows nothing but the distributions `names` and what they require; its Python."""
  run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
  (packages,) = folder.glob("lib/python*/site-packages")
  for distribution in closure(names):
    for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
      if not (packages / top).exists():
        (packages / top).symlink_to(distribution.locate_file(top))
  return folder / "bin" / "python"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
  """A copy of what the package is built from, so that the build leaves nothing in the clone."""
  folder = tmp_path_factory.mktemp("sources")
  for name in ("setup.py", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, folder)
  for name in ("async_rl", "experiments"):
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
  return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
  folder = tmp_path_factory.mktemp("wheel")
  run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sources, cwd=folder)
  return next(folder.glob("async_rl-*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel):
  with zipfile.ZipFile(wheel) as archive:
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def test_an_installed_wheel_works_beside_its_requirements_alone(wheel, metadata, tmp_path):
  required = [requirement.name for requirement in requirements(metadata)]
  assert sorted(required) == ["jax", "numpy", "optax"]
  python = make_environment(tmp_path / "environment", *required)
  run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=tmp_path)
  first, *_, last = run(python, "-I", ROOT / "tests" / "installed.py", cwd=tmp_path, status=1).splitlines()
  version, file = first.split()
  assert version == async_rl.__version__ == metadata["Version"]
  assert pathlib.Path(file).is_relative_to(tmp_path)
  expected = r"async_rl.runtime needs the package '\w+', which is not installed; install async_rl\[train\]."
  assert re.fullmatch("ModuleNotFoundError: " + expected, last)


def test_an_editable_install_shows_the_package_and_not_the_experiments(sources, tmp_path):
  python = make_environment(tmp_path / "environment", "setuptools")
  editable = ("install", "--no-deps", "--no-build-isolation", "--editable", sources)
  run(sys.executable, "-m", "pip", "--python", python, *editable, cwd=tmp_path)
  program = "import async_rl, importlib.util; print(async_rl.__file__, importlib.util.find_spec('experiments'))"
  assert run(python, "-I", "-c", program, cwd=tmp_path).split() == [str(sources / "async_rl" / "__init__.py"), "None"]


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
  with zipfile.ZipFile(wheel) as archive:
    packed = {name for name in archive.namelist() if ".dist-info/" not in name}
  assert packed == {str(file.relative_to(ROOT)) for file in (ROOT / "async_rl").rglob("*.py")}


def canonical(name):
  """The name of a distribution in its one spelling."""
  return re.sub(r"[-_.]+", "-", name).lower()


def imported(folder):
  """The top-level names that the files of a folder import, anywhere in them."""
  for file in sorted(folder.rglob("*.py")):
    for node in ast.walk(ast.parse(file.read_text())):
      modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
      modules += [node.module] if isinstance(node, ast.ImportFrom) else []
      yield from ((module.partition(".")[0], file.relative_to(ROOT)) for module in modules)


@pytest.mark.parametrize(
  ("folders", "extras"),
  [
    (("async_rl/stabilizers", "async_rl/losses"), ()),
    (("async_rl", "experiments"), ("train", "reasoning", "weights", "gcs", "tpu")),
  ],
)
def test_every_import_is_declared(metadata, folders, extras):
  required = [r for extra in ("", *extras) for r in requirements(metadata, extra)]
  for requirement in [r for r in required if r.extras]:  # as jax[tpu], which brings libtpu
    own = importlib.metadata.metadata(requirement.name)
    required += [r for extra in requirement.extras for r in requirements(own, extra)]
  declared = {canonical(r.name) for r in required}
  owners = importlib.metadata.packages_distributions()
  for folder in folders:
    for module, file in imported(ROOT / folder):
      found = {canonical(name) for name in owners.get(module, [module])} & declared
      assert module in UNDECLARED or found, f"{file} imports {module}, which setup.py does not name"
