"""A folder holds one run of one process: the same resumes, another is refused, nothing foreign is deleted."""

import errno
import itertools
import pathlib
import signal
import subprocess
import sys

import pytest

from async_rl.recording import _run_folder
from async_rl.recording._run_folder import RunFolder
from async_rl.recording._run_folder import RunFolderError

RUN = {"seed": 0, "optimizer": {"rate": 1e-4, "betas": (0.9, 0.999)}}


def test_same_run_resumes(tmp_path):
  with RunFolder.open(tmp_path / "deep" / "run", "text", RUN) as folder:
    assert not folder.resumed
    folder.metrics.write_text("kept")
  again = RunFolder.open(tmp_path / "deep" / "run", "text with more steps", RUN)
  again.close()
  assert again.resumed
  assert again.metrics.read_text() == "kept"
  assert again.config.read_text() == "text with more steps"


def test_a_home_folder_is_expanded_and_spaces_are_kept(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  with RunFolder.open("~/my runs/a", "text", RUN) as folder:
    assert folder.path == tmp_path / "my runs" / "a"


def test_another_run_is_refused_or_overwritten(tmp_path):
  with RunFolder.open(tmp_path, "text", RUN) as folder:
    folder.metrics.write_text("old")
    folder.checkpoints.mkdir()
  other = {"seed": 1, "optimizer": {"rate": 2e-4, "betas": (0.9, 0.999)}}
  with pytest.raises(
    RunFolderError,
    match=r"holds another run \(seed: 0 -> 1; optimizer.rate: 0.0001 -> 0.0002\): undo .*, or pass --overwrite",
  ):
    RunFolder.open(tmp_path, "text", other)
  with RunFolder.open(tmp_path, "other text", other, overwrite=True) as folder:
    assert not folder.resumed
    assert not folder.metrics.exists()
    assert not folder.checkpoints.exists()
  with RunFolder.open(tmp_path, "other text", other) as folder:
    assert folder.resumed


def test_overwrite_deletes_nothing_but_runs(tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  for overwrite in (False, True):
    with pytest.raises(RunFolderError, match="contains files that do not belong to a run: choose another folder"):
      RunFolder.open(tmp_path, "text", RUN, overwrite=overwrite)
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
  assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_unwritable_folder(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(RunFolderError, match=r"cannot write the run folder .*file/run: Not a directory"):
    RunFolder.open(tmp_path / "file" / "run", "text", RUN)
  with pytest.raises(RunFolderError, match=r"cannot write the run folder .*file: File exists"):
    RunFolder.open(tmp_path / "file", "text", RUN)


def test_damaged_mark(tmp_path):
  RunFolder.open(tmp_path, "text", RUN).close()
  (tmp_path / "run.json").write_text("{")
  with pytest.raises(RunFolderError, match=r"run.json is damaged"):
    RunFolder.open(tmp_path, "text", RUN)
  with RunFolder.open(tmp_path, "text", RUN, overwrite=True) as folder:
    assert not folder.resumed


HOLDER = """
import sys
from async_rl.recording import RunFolder

folder = RunFolder.open(sys.argv[1], "text", {"seed": 0})
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path, overwrite):
  run = {"seed": 0}
  command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
  with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(RunFolderError, match=rf"run is in use by process {holder.pid} on .*: wait .*--run-dir"):
      RunFolder.open(tmp_path / "run", "other text", run, overwrite=overwrite)
    assert (tmp_path / "run" / "config.txt").read_text() == "text"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
  with RunFolder.open(tmp_path / "run", "other text", run, overwrite=overwrite) as folder:
    assert folder.resumed != overwrite


def test_a_removed_folder_can_be_opened_again(tmp_path):
  folder = RunFolder.open(tmp_path / "run", "text", RUN)
  folder.remove()
  assert not (tmp_path / "run").exists()
  with RunFolder.open(tmp_path / "run", "text", RUN) as again:
    assert not again.resumed


def test_a_run_to_be_replaced_is_kept_until_the_new_one_has_begun(tmp_path):
  with RunFolder.open(tmp_path, "old text", RUN) as folder:
    folder.metrics.write_text("old")
    folder.checkpoints.mkdir()
  (tmp_path / "exported").mkdir()  # not of a run, such as what was exported to its folder
  files = sorted(path.name for path in tmp_path.iterdir())
  other = {"seed": 1}
  folder = RunFolder.open(tmp_path, "new text", other, overwrite=True)
  assert not folder.metrics.exists()
  folder.metrics.write_text("new")
  folder.remove()
  assert sorted(path.name for path in tmp_path.iterdir()) == files
  with RunFolder.open(tmp_path, "old text", RUN) as again:
    assert again.resumed
    assert again.metrics.read_text() == "old"
  with RunFolder.open(tmp_path, "new text", other, overwrite=True) as folder:
    folder.discard_replaced()
  assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.txt", "exported", "run.json"]


def test_another_process_joins_the_folder_that_the_first_has_opened(tmp_path):
  with pytest.raises(RunFolderError, match="process 1 does not see .*/run, which process 0 has opened: choose"):
    RunFolder.join(tmp_path / "run", 1)
  with RunFolder.open(tmp_path / "run", "text", RUN) as first, RunFolder.join(tmp_path / "run", 1) as second:
    assert second.metrics == first.metrics
    assert [folder.schedule.name for folder in (first, second)] == ["schedule.jsonl", "schedule_1.jsonl"]
    second.schedule.touch()
  RunFolder.open(tmp_path / "run", "text", RUN, overwrite=True).close()
  assert not second.schedule.exists()


class Killed(BaseException):
  """Stands in for the end of the process at this point."""


def make_old_run(path):
  """Writes a run with a checkpoint; returns its files and their content."""
  RunFolder.open(path, "old", {"seed": 0}).close()
  (path / "checkpoints" / "4").mkdir(parents=True)
  (path / "checkpoints" / "4" / "params").write_text("old")
  (path / "metrics.jsonl").write_text("old")
  (path / "exported").mkdir()  # not of a run
  (path / "exported" / "config.json").write_text("old")
  return content(path)


def content(path):
  return {str(x.relative_to(path)): x.read_text() for x in path.rglob("*") if x.is_file() and x.name != ".lock"}


def ends_after(function, count):
  """`function` until it was called `count` times; then the process ends."""
  calls = itertools.count()

  def limited(*args):
    if next(calls) == count:
      raise Killed
    return function(*args)

  return limited


@pytest.mark.parametrize("failing", ["run.json", "config.txt"])
def test_a_run_is_put_back_if_the_disk_is_too_full_to_replace_it(tmp_path, monkeypatch, failing):
  old = make_old_run(tmp_path)
  write = _run_folder.write_text

  def full(path, text):
    if path.name == failing:
      raise OSError(errno.ENOSPC, "No space left on device")
    write(path, text)

  with monkeypatch.context() as patch:
    patch.setattr(_run_folder, "write_text", full)
    with pytest.raises(RunFolderError, match="cannot write the run folder .*: No space left on device"):
      RunFolder.open(tmp_path, "new", {"seed": 1}, overwrite=True)
  assert content(tmp_path) == old
  with RunFolder.open(tmp_path, "old", {"seed": 0}) as folder:
    assert folder.resumed


@pytest.mark.parametrize("moves", range(4))
def test_a_run_that_was_being_set_aside_when_the_process_ended_is_whole_at_the_next_start(tmp_path, monkeypatch, moves):
  old = make_old_run(tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr(_run_folder, "move", ends_after(_run_folder.move, moves))
    with pytest.raises(Killed):
      RunFolder.open(tmp_path, "new", {"seed": 1}, overwrite=True)
  with RunFolder.open(tmp_path, "old", {"seed": 0}) as folder:
    assert folder.resumed
  assert content(tmp_path) == old


def test_a_process_that_ends_between_setting_aside_and_beginning_loses_nothing(tmp_path, monkeypatch):
  old = make_old_run(tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr(_run_folder, "write_text", ends_after(_run_folder.write_text, 0))
    with pytest.raises(Killed):
      RunFolder.open(tmp_path, "new", {"seed": 1}, overwrite=True)
  with RunFolder.open(tmp_path, "old", {"seed": 0}) as folder:
    assert folder.resumed
  assert content(tmp_path) == old


@pytest.mark.parametrize("deletions", range(5))
def test_a_new_run_stays_as_it_is_if_the_process_ends_while_the_old_one_is_deleted(tmp_path, monkeypatch, deletions):
  make_old_run(tmp_path)
  folder = RunFolder.open(tmp_path, "new", {"seed": 1}, overwrite=True)
  folder.metrics.write_text("new")
  with monkeypatch.context() as patch:
    patch.setattr(_run_folder, "delete", ends_after(_run_folder.delete, deletions))
    with pytest.raises(Killed):
      folder.discard_replaced()
  folder.close()
  with RunFolder.open(tmp_path, "new", {"seed": 1}) as folder:
    assert folder.resumed
    folder.discard_replaced()
  assert set(content(tmp_path)) == {"run.json", "config.txt", "metrics.jsonl", "exported/config.json"}
  assert folder.metrics.read_text() == "new"


def test_a_run_is_put_back_also_if_two_others_in_its_place_never_began(tmp_path):
  old = make_old_run(tmp_path)
  RunFolder.open(tmp_path, "new", {"seed": 1}, overwrite=True).close()  # its process was killed
  with RunFolder.open(tmp_path, "newer", {"seed": 2}, overwrite=True) as folder:
    folder.remove()
  assert content(tmp_path) == old


def test_a_run_without_its_mark_is_named_as_such(tmp_path):
  old = make_old_run(tmp_path)
  (tmp_path / "run.json").unlink()
  with pytest.raises(RunFolderError, match="holds a run whose run.json is missing: restore it, or choose"):
    RunFolder.open(tmp_path, "old", {"seed": 0})
  (tmp_path / "run.json").write_text(old["run.json"])
  with RunFolder.open(tmp_path, "old", {"seed": 0}) as folder:
    assert folder.resumed


def test_what_a_full_disk_leaves_of_a_new_folder_is_no_obstacle(tmp_path, monkeypatch):
  def full(self, text):
    self.touch()
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(RunFolderError, match="No space left"):
      RunFolder.open(tmp_path / "run", "text", {"seed": 0})
  with RunFolder.open(tmp_path / "run", "text", {"seed": 0}) as folder:
    assert not folder.resumed
