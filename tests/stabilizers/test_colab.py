"""The notebook on stabilizers runs from top to bottom and shows its plot."""

import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")  # of the notebook's machinery
def test_notebook_runs_and_shows_its_plot():
  notebook = nbformat.read(ROOT / "colabs/stabilizers.ipynb", as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
  nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  rewards = [float(r) for r in re.findall(r"updates: (\d\.\d+)", "".join(o.get("text", "") for o in outputs))]
  assert len(rewards) == 5
  assert rewards[2] > rewards[1] + 0.05  # with the ESS scale, above without
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
