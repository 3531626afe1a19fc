"""Runs notebooks as a stranger does: in an empty folder, and in an environment that has all but the package."""

import importlib.util
import os
import shutil

import nbclient
import nbformat
from installing import ROOT
from installing import make_environment
from installing import offline_environment
from installing import read_metadata
from installing import requirements
from jupyter_client.manager import AsyncKernelManager

NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))


def pack(sources, wheel, folder):
  """Packs the wheel and `experiments` as the archive from which notebooks install; returns its path."""
  content = folder / "content"
  shutil.copytree(sources / "experiments", content / "async_rl-HEAD" / "experiments")
  shutil.copy(wheel, content / "async_rl-HEAD")
  return shutil.make_archive(str(folder / "archive"), "zip", content)


def make_kernel_environment(folder, wheel):
  """Returns the Python of an environment with what the notebooks install, the wheel aside, and Jupyter's kernel."""
  metadata = read_metadata(wheel)
  wanted = [requirement for extra in ("train", "weights") for requirement in requirements(metadata, extra)]
  names = [str(requirement).partition(";")[0] for requirement in wanted]
  compiler = ["jax[tpu]"] if importlib.util.find_spec("libtpu") else []
  return make_environment(folder, *names, *compiler, "equinox", "ipykernel", "pip")


def run_notebook(path, python, archive, folder, parameters="", environment=None, limit=600):
  """Runs a notebook in a folder and returns it with its outputs.

  Args:
    path: the notebook.
    python: the interpreter of its kernel.
    archive: the archive that its first cell installs from.
    folder: the folder that it runs in.
    parameters: code that runs after the cell with the tag "parameters".
    environment: further variables of its environment.
    limit: the seconds that a cell may take.
  """
  notebook = nbformat.read(path, as_version=4)
  (tagged,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
  notebook.cells.insert(tagged + 1, nbformat.v4.new_code_cell(parameters))
  manager = AsyncKernelManager()
  manager.kernel_spec.argv[0] = str(python)
  client = nbclient.NotebookClient(notebook, km=manager, timeout=limit, resources={"metadata": {"path": str(folder)}})
  own = {"ASYNC_RL_SOURCE": str(archive), "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
  return client.execute(cleanup_kc=True, env=offline_environment() | own | (environment or {}))


def printed(notebook):
  """Returns what the cells of a notebook printed."""
  return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def pictures(notebook):
  """Returns the pictures of a notebook, base64-encoded PNGs."""
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
