"""A wheel works outside the clone beside what it requires; `experiments` is installed nowhere; all is declared."""

import ast
import importlib.metadata
import pathlib
import re
import sys
import zipfile

import pytest
from installing import make_environment
from installing import read_metadata
from installing import requirements
from installing import run

import async_rl

ROOT = pathlib.Path(__file__).parents[1]
#: What comes with Python, with JAX, or is asked for where it is used with a sentence of its own.
UNDECLARED = {"async_rl", "experiments", "jaxlib", "wandb", *sys.stdlib_module_names}
#: The distributions of modules that have other names and are not installed here.
DISTRIBUTIONS = {"tunix": "google-tunix"}


@pytest.fixture(scope="module")
def metadata(wheel):
  return read_metadata(wheel)


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
    (("async_rl", "experiments"), ("train", "reasoning", "weights", "gcs", "tpu", "peers")),
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
      found = {canonical(name) for name in owners.get(module, [DISTRIBUTIONS.get(module, module)])} & declared
      assert module in UNDECLARED or found, f"{file} imports {module}, which setup.py does not name"
