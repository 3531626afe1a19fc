"""Runs whose folder was damaged, or whose process died at a bad moment: nothing is lost, nothing is there twice."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runtime_helpers import assert_identical
from runtime_helpers import killed_at
from runtime_helpers import restore
from runtime_helpers import rows
from runtime_helpers import run
from runtime_helpers import with_options
from tiny import tiny

from async_rl import recording
from async_rl import runtime
from async_rl.runtime import _session

pytestmark = pytest.mark.usefixtures("two_devices")


def process_environment():
  """The environment of another process that shall find what this one imports."""
  return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def all_rows(folder):
  return list(recording.read_metrics(folder / "metrics.jsonl"))


def steps_and_kinds(folder):
  """Step of each row, and whether it is of an evaluation."""
  return [(row["step"], "eval/accuracy" in row) for row in all_rows(folder)]


def test_a_run_killed_after_an_evaluation_has_no_row_twice(tmp_path, monkeypatch):
  make = lambda name: tiny(run_dir=str(tmp_path / name), steps=3, eval_every=2, eval_prompts=4)
  summary = runtime.train(make("whole"))

  def dies(self):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(_session.Session, "start_clock", dies)  # right after the first evaluation
    with pytest.raises(KeyboardInterrupt):
      runtime.train(make("killed"))
  assert steps_and_kinds(tmp_path / "killed") == [(0, True)]
  resumed = runtime.train(make("killed"))
  expected = [(0, True), (1, False), (2, False), (2, True), (3, False), (3, True)]
  assert steps_and_kinds(tmp_path / "killed") == steps_and_kinds(tmp_path / "whole") == expected
  assert resumed.accuracy == summary.accuracy
  assert resumed.accuracy_before == summary.accuracy_before


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(tmp_path, capfd):
  make = lambda name: tiny(run_dir=str(tmp_path / name), steps=6, checkpoint_every=2)
  _, whole, _ = run(make("whole"))
  with killed_at(5):
    runtime.train(make("damaged"))
  checkpoints = tmp_path / "damaged" / "checkpoints"
  (checkpoints / "4" / "host" / "process_0.npz").write_bytes(b"PK")
  summary, resumed, _ = run(make("damaged"))
  assert f"damaged: the checkpoint in {checkpoints} of step 4 cannot be read" in capfd.readouterr().err
  assert (tmp_path / "damaged" / "damaged" / "4").is_dir()
  assert [row["step"] for row in rows(summary)] == list(range(1, 7))
  assert_identical(whole, resumed)


def test_a_damaged_line_of_metrics_is_named_and_the_run_resumes(tmp_path, capfd):
  make = lambda steps: tiny(run_dir=str(tmp_path), steps=steps)
  runtime.train(make(4))
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  lines[1] = lines[1][:30]
  (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
  summary = runtime.train(make(6))
  assert f"damaged: {tmp_path / 'metrics.jsonl'}, line 2: " in capfd.readouterr().err
  assert [row["step"] for row in rows(summary)] == [1, 3, 4, 5, 6]


def test_a_run_in_a_folder_that_is_in_use_is_refused(tmp_path):
  first = tiny(run_dir=str(tmp_path / "run"), steps=1)
  with recording.RunFolder.open(tmp_path / "run", "in use", first.fingerprint()):
    for overwrite in (False, True):
      with pytest.raises(recording.RunFolderError, match=f"in use by process {os.getpid()}"):
        runtime.train(with_options(first, overwrite=overwrite))
    assert (tmp_path / "run" / "config.txt").read_text() == "in use"
  assert runtime.train(first).version == 1


def test_a_run_whose_updates_stay_non_finite_stops_with_the_last_good_checkpoint(tmp_path, capfd):
  rate = lambda count: jnp.where(count < 2, 1e-2, jnp.nan)
  experiment = tiny(optimizer=optax.sgd(rate), run_dir=str(tmp_path), steps=20, checkpoint_every=1)
  with pytest.raises(runtime.Diverged, match=r"Step 7 is the 5th in a row that was skipped.*of step \d in .* is good"):
    runtime.train(experiment)
  assert "step 3 was skipped: its loss is" in capfd.readouterr().err
  assert [r["update/skipped"] for r in all_rows(tmp_path)] == [0, 0, 1, 1, 1, 1, 1]
  state, _ = restore(tmp_path / "checkpoints", experiment)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_wandb_without_its_package_is_refused_before_anything_is_made(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "path", [])
  monkeypatch.delitem(sys.modules, "wandb", raising=False)
  with pytest.raises(ImportError, match="wandb is not installed"):
    runtime.train(tiny(run_dir=str(tmp_path / "run"), wandb=True))
  assert not (tmp_path / "run").exists()


PROGRAM = """
import sys
from async_rl import runtime
from tiny import tiny
runtime.train(tiny(run_dir=sys.argv[1], **eval(sys.argv[2])))
"""


def test_a_process_that_was_killed_resumes_as_if_undisturbed(tmp_path, capfd):
  """SIGKILL once the second step is written and the first one saved; the outcome must not depend on what else was."""
  options = dict(steps=8, checkpoint_every=1, eval_prompts=2)
  summary = runtime.train(tiny(run_dir=str(tmp_path / "whole"), **options))
  killed = tmp_path / "killed"
  command = [sys.executable, "-c", PROGRAM, str(killed), repr(options)]
  with subprocess.Popen(command, env=process_environment()) as process:
    saved = lambda: {path.name for path in (killed / "checkpoints").glob("*") if path.name.isdigit()} - {"0"}
    while process.poll() is None and not (saved() and len(all_rows(killed)) >= 3):
      time.sleep(0.02)
    assert process.poll() is None
    process.kill()
  resumed = runtime.train(tiny(run_dir=str(killed), **options))
  assert "resumed at step" in "".join(capfd.readouterr())
  assert steps_and_kinds(killed) == steps_and_kinds(tmp_path / "whole")
  assert [r["reward/mean"] for r in rows(resumed)] == [r["reward/mean"] for r in rows(summary)]


def test_an_extended_run_starts_with_less_lag(tmp_path):
  """As the last lines of `experiments.train` say: the steps after the old end were not sampled before it."""
  make = lambda name, steps: tiny(run_dir=str(tmp_path / name), steps=steps, max_lag=2)
  runtime.train(make("extended", 4))
  lags = lambda summary: [row["staleness/max"] for row in rows(summary)]
  assert lags(runtime.train(make("extended", 7))) == [0, 1, 2, 2, 0, 1, 2]
  assert lags(runtime.train(make("whole", 7))) == [0, 1, 2, 2, 2, 2, 2]
