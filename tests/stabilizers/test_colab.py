"""The notebook on stabilizers runs from top to bottom and shows shapes and its plot."""

import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")  # of the notebook's machinery
def test_notebook_runs_and_shows_shapes_and_its_plot():
  notebook = nbformat.read(ROOT / "colabs/stabilizers.ipynb", as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
  seeds = [cell for cell in notebook.cells if "SEEDS = 16, 300, 8" in cell.source]
  seeds[0].source = seeds[0].source.replace("SEEDS = 16, 300, 8", "SEEDS = 16, 300, 4")  # take half of the time
  nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  text = "".join(o.get("text", "") for o in outputs)
  assert "words [B, T] (64, 6)" in text
  assert "log_weights [B] (64,)" in text
  rewards = [float(r) for r in re.findall(r"updates: (\d\.\d+)", text)]
  assert len(rewards) == 6
  assert rewards[2] > rewards[1] + 0.05  # at the same lag, with the ESS scale and without
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
