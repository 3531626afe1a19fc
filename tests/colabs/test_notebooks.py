"""The quickstart notebook runs from top to bottom, from `colabs/`, and shows its two pictures."""

import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")  # of the notebook's machinery
def test_notebook_runs_and_shows_its_pictures(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2")
  notebook = nbformat.read(ROOT / "colabs/quickstart.ipynb", as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
  nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  text = "".join(o.get("text", "") for o in outputs)
  assert "step 10: lag" in text
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
