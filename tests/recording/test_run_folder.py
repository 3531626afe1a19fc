"""A folder holds one run: the same resumes, another is refused, nothing foreign is deleted."""

import pytest

from async_rl.recording._run_folder import RunFolder
from async_rl.recording._run_folder import RunFolderError

RUN = {"seed": 0, "optimizer": {"rate": 1e-4, "betas": (0.9, 0.999)}}


def test_same_run_resumes(tmp_path):
  folder = RunFolder.open(tmp_path / "deep" / "run", "text", RUN)
  assert not folder.resumed
  folder.metrics.write_text("kept")
  again = RunFolder.open(tmp_path / "deep" / "run", "text with more steps", RUN)
  assert again.resumed
  assert again.metrics.read_text() == "kept"
  assert again.config.read_text() == "text with more steps"


def test_another_run_is_refused_or_overwritten(tmp_path):
  RunFolder.open(tmp_path, "text", RUN).metrics.write_text("old")
  other = {"seed": 1, "optimizer": {"rate": 2e-4, "betas": (0.9, 0.999)}}
  with pytest.raises(
    RunFolderError,
    match=r"holds another run \(seed: 0 -> 1; optimizer.rate: 0.0001 -> 0.0002\): undo .*, or pass --overwrite",
  ):
    RunFolder.open(tmp_path, "text", other)
  folder = RunFolder.open(tmp_path, "other text", other, overwrite=True)
  assert not folder.resumed
  assert not folder.metrics.exists()
  assert RunFolder.open(tmp_path, "other text", other).resumed


def test_overwrite_deletes_nothing_but_runs(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  for overwrite in (False, True):
    with pytest.raises(RunFolderError, match="holds files that are not of a run: choose another folder"):
      RunFolder.open(tmp_path, "text", RUN, overwrite=overwrite)
  assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_unwritable_folder(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(RunFolderError, match=r"cannot write the run folder .*file/run: Not a directory"):
    RunFolder.open(tmp_path / "file" / "run", "text", RUN)
  with pytest.raises(RunFolderError, match=r"cannot write the run folder .*file: File exists"):
    RunFolder.open(tmp_path / "file", "text", RUN)


def test_damaged_mark(tmp_path):
  RunFolder.open(tmp_path, "text", RUN)
  (tmp_path / "run.json").write_text("{")
  with pytest.raises(RunFolderError, match=r"run.json is damaged"):
    RunFolder.open(tmp_path, "text", RUN)
  assert not RunFolder.open(tmp_path, "text", RUN, overwrite=True).resumed
