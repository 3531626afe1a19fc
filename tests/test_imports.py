"""Imports go one way, and importing a folder loads no more than it needs."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

import async_rl

PACKAGE = pathlib.Path(__file__).parents[1] / "async_rl"

#: What each folder may import of the package, beside itself.
ALLOWED = {
  "types": set(),
  "_validation": {"_suggestions"},
  "_arrays": {"_validation"},
  "_monitor": set(),
  "_suggestions": set(),
  "_paths": set(),
  "_buckets": {"_paths"},
  "stabilizers": {"_arrays", "_validation"},
  "losses": {"_arrays", "_validation"},
  "models": {"types", "_buckets", "_paths", "_suggestions", "_validation"},
  "tasks": {"types", "_buckets", "_monitor", "_paths", "_suggestions"},
}
ALLOWED["sampling"] = ALLOWED["learning"] = {
  "types",
  "_arrays",
  "_buckets",
  "_paths",
  "_suggestions",
  "_validation",
  "stabilizers",
  "losses",
  "models",
  "tasks",
}
ALLOWED["rollout"] = ALLOWED["recording"] = ALLOWED["sampling"] | {"sampling", "learning", "_monitor"}
ALLOWED["runtime"] = ALLOWED["rollout"] | {"rollout", "recording"}


def folder_of(module):
  """The first name below the package of a dotted module name, if it is of the package."""
  parts = module.split(".")
  return parts[1] if parts[0] == "async_rl" and len(parts) > 1 else None


def imported(file):
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{file} uses a relative import"
      names = [node.module] if node.module != "async_rl" else [f"async_rl.{a.name}" for a in node.names]
    elif isinstance(node, ast.Import):
      names = [a.name for a in node.names]
    else:
      continue
    yield from names


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
  relative = file.relative_to(PACKAGE)
  folder = relative.parts[0].removesuffix(".py")
  if folder == "__init__":
    return
  for module in imported(file):
    assert module.split(".")[0] != "experiments", f"{relative} imports {module}"
    target = folder_of(module)
    assert target in (None, folder, *ALLOWED[folder]), f"{relative} imports {module}"


def test_files_do_not_import_each_other_in_circles():
  """Not even for types alone; a folder's own `__init__` counts as none, since its files name each other."""
  files = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
  graph = {}
  for name, file in files.items():
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    members = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    graph[name] = {module for module in {*imported(file), *members} if module in files}
  assert sum(map(len, graph.values())) > 200
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def output(program):
  """What a Python of its own prints."""
  command = [sys.executable, "-c", program]
  return subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout.strip()


@pytest.mark.parametrize(
  ("module", "unwanted"),
  [
    ("stabilizers", "flax tokenizers tensorflow_datasets grain orbax sentencepiece matplotlib tensorflow"),
    ("losses", "optax flax tokenizers tensorflow_datasets grain orbax sentencepiece"),
    ("tasks", "jax flax optax tensorflow_datasets reasoning_gym"),
    ("types", "jax flax optax"),
    ("runtime", "matplotlib tensorflow tensorflow_datasets reasoning_gym tensorboardX"),
  ],
)
def test_importing_loads_no_more_than_needed(module, unwanted):
  found = output(f"import sys, async_rl.{module}; print([m for m in {unwanted.split()} if m in sys.modules])")
  assert found == "[]"


def test_the_package_loads_a_folder_when_it_is_first_asked_for():
  loaded = "print(sorted({'.'.join(m.split('.')[:2]) for m in sys.modules if m.startswith(('async_rl.', 'jax'))}))"
  assert output(f"import sys, async_rl; dir(async_rl); {loaded}") == "[]"
  found = ast.literal_eval(output(f"import sys, async_rl; async_rl.stabilizers.scale_by_ess; {loaded}"))
  assert {"async_rl.stabilizers"} == {name for name in found if re.match(r"async_rl\.[a-z]", name)}


def test_the_package_lists_its_folders():
  folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
  assert set(async_rl.__all__) == folders | {"types"}
  assert set(async_rl.__all__) <= set(dir(async_rl))
  assert all(getattr(async_rl, name).__name__ == f"async_rl.{name}" for name in async_rl.__all__)
  with pytest.raises(AttributeError, match="module 'async_rl' has no attribute 'stabilisers'"):
    async_rl.stabilisers  # noqa: B018
