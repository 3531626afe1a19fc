"""Run folders of which something was lost, replaced or renamed: resumed with what is left, or refused in a sentence."""

import re
import shutil
import threading

import pytest
from tiny import tiny

from async_rl import recording
from async_rl import runtime
from async_rl.runtime import _run
from async_rl.runtime import _session

pytestmark = pytest.mark.usefixtures("two_devices")

WHOLE = [0, 1, 2, 3, 4, 4, 5, 5]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """The folder of a run of four steps."""
  folder = tmp_path_factory.mktemp("stopped") / "run"
  make(folder, steps=4)
  return folder


def make(folder, steps):
  return runtime.train(tiny(run_dir=str(folder), steps=steps, checkpoint_every=2, eval_prompts=4))


def write(name, content):
  return lambda folder: (folder / name).write_bytes(content)


def remove(*names):
  def damage(folder):
    for name in names:
      shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

  return damage


def make_folder(name, replace=False):
  def damage(folder):
    if replace:
      remove(name)(folder)
    (folder / name).mkdir()

  return damage


def rename(name, to):
  return lambda folder: (folder / name).rename(folder / to)


def empty_checkpoints(folder):
  for checkpoint in (folder / "checkpoints").iterdir():
    remove(checkpoint)(folder)
    checkpoint.mkdir()


@pytest.mark.parametrize(
  ("damage", "kind", "words"),
  [
    pytest.param(write("run.json", b""), recording.RunFolderError, "run.json is damaged: .* --overwrite", id="no mark"),
    pytest.param(
      write("run.json", b"[1]"), recording.RunFolderError, "run.json is damaged", id="a mark of another kind"
    ),
    pytest.param(make_folder(".lock", replace=True), recording.RunFolderError, "Is a directory", id="a folder as lock"),
    pytest.param(
      remove("checkpoints"),
      recording.CheckpointError,
      "checkpoints are missing: restore .*, or pass",
      id="no checkpoints",
    ),
    pytest.param(
      make_folder("checkpoints", replace=True),
      recording.CheckpointError,
      "checkpoints are missing: restore .*, or pass",
      id="an empty folder of checkpoints",
    ),
    pytest.param(
      rename("checkpoints/4", "checkpoints/7"), recording.CheckpointError, "7 holds step 4: give", id="a renamed one"
    ),
    pytest.param(
      empty_checkpoints, recording.DamagedCheckpointError, "none of the checkpoints .* or start again", id="empty ones"
    ),
    pytest.param(
      make_folder("metrics.jsonl", replace=True), IsADirectoryError, "metrics.jsonl", id="a folder as metrics"
    ),
  ],
)
def test_what_cannot_be_resumed_is_refused_in_one_sentence(stopped, tmp_path, damage, kind, words):
  folder = tmp_path / "run"
  shutil.copytree(stopped, folder)
  damage(folder)
  before = sorted(folder.rglob("*"))
  with pytest.raises(kind, match=words) as error:
    make(folder, steps=5)
  assert "\n" not in str(error.value)
  assert set(before) <= set(folder.rglob("*"))  # nothing was deleted


@pytest.mark.parametrize(
  ("damage", "steps", "words"),
  [
    pytest.param(remove("schedule.jsonl"), WHOLE, "has 0 of the .* events .* cannot be replayed", id="no schedule"),
    pytest.param(write("schedule.jsonl", b'["weights", 0]\n["sub'), WHOLE, "has 1 of the", id="a schedule cut off"),
    pytest.param(remove("metrics.jsonl"), [5, 5], "metrics.jsonl has 0 of the 6 rows", id="no metrics"),
    pytest.param(remove("tensorboard", "config.txt"), WHOLE, "resumed at step 4", id="no plots, no configuration"),
    pytest.param(remove("checkpoints/4/params"), [0, 1, 2, 3, 4, 5, 5], "step 4 cannot be read", id="no parameters"),
    pytest.param(make_folder("checkpoints/99"), WHOLE, "resumed at step 4", id="an empty checkpoint of later"),
  ],
)
def test_what_is_left_is_resumed_and_the_loss_is_told(stopped, tmp_path, capfd, damage, steps, words):
  folder = tmp_path / "run"
  shutil.copytree(stopped, folder)
  damage(folder)
  summary = make(folder, steps=5)
  assert [row["step"] for row in recording.read_metrics(folder / "metrics.jsonl")] == steps
  assert (summary.folder.checkpoints / "5" / "params").is_dir()
  console = capfd.readouterr().err
  assert re.search(words, console), console


def test_the_first_process_alone_looks_for_checkpoints(tmp_path):
  """It deletes an unfinished one when it opens them, which another process may see as none at all."""
  hosts = runtime.Hosts()
  with recording.RunFolder.open(tmp_path / "run", "run", {}) as folder:
    folder.metrics.write_text('{"step": 1}\n')
    (folder.checkpoints / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    _run.check_checkpoints(folder, hosts)
    (folder.checkpoints / "0.orbax-checkpoint-tmp").rmdir()
    with pytest.raises(recording.CheckpointError, match="checkpoints are missing"):
      _run.check_checkpoints(folder, hosts)
    hosts.index = 1
    _run.check_checkpoints(folder, hosts)


def test_a_start_that_ends_before_a_first_checkpoint_is_complete_is_no_loss(stopped, tmp_path, monkeypatch):
  folder = tmp_path / "run"
  shutil.copytree(stopped, folder)
  shutil.rmtree(folder / "checkpoints")
  (folder / "checkpoints" / "0.orbax-checkpoint-tmp").mkdir(parents=True)

  def dies(self, stack):
    self._checkpoints.close()
    raise KeyboardInterrupt

  others = set(threading.enumerate())
  with monkeypatch.context() as patch:
    patch.setattr(_session.Session, "open", dies)
    with pytest.raises(KeyboardInterrupt):
      make(folder, steps=4)
  for thread in set(threading.enumerate()) - others:  # Orbax deletes what is unfinished in one
    thread.join()
  assert not any((folder / "checkpoints").iterdir())
  assert make(folder, steps=1).version == 1
