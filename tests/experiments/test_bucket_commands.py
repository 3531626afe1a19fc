"""The commands on a run whose folder is in a bucket."""

import io
import sys

import matplotlib.image
import pytest

from async_rl import runtime
from experiments import evaluate
from experiments import export
from experiments import report
from experiments import train

CONFIG = """
'''The tiny experiment, its data on the disk.'''

import dataclasses

import tiny

Options = tiny.Options


def build(options):
  task = tiny.DigitSums(numbers=2, train=64, test=8, data_dir="data")
  return dataclasses.replace(tiny.build(options), task=task)
"""


@pytest.mark.usefixtures("two_devices")
def test_a_run_in_a_bucket_is_trained_drawn_exported_and_evaluated(
  bucket, tmp_path, monkeypatch, capsys, draws_pictures
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(sys, "path", [*sys.path])
  (tmp_path / "tiny_in_bucket.py").write_text(CONFIG)
  run, exported = bucket.path("runs/first"), bucket.path("exported")
  assert train.main(["tiny_in_bucket.py", "--steps", "1", "--run-dir", run]) == 0
  assert f" -m experiments.evaluate {run} --samples 8" in capsys.readouterr().out

  del bucket.objects["runs/first/report.png"]
  assert report.main([run]) == 0
  assert f"Plots: {run}/report.png" in capsys.readouterr().out
  assert matplotlib.image.imread(io.BytesIO(bucket.contents()["runs/first/report.png"])).ndim == 3
  assert runtime.Schedule(mode="simulated", lag=f"{run}/schedule.jsonl").max_lag == 4
  with pytest.raises(ValueError, match="got lag='gs://.*/none.jsonl', which is no file"):
    runtime.Schedule(mode="simulated", lag=f"{run}/none.jsonl")
  assert export.main([run, exported, "--dtype", "float32"]) == 0
  assert f"{exported} holds step 1 of {run}" in capsys.readouterr().out
  assert evaluate.main([run, "--prompts", "8", "--weights", exported]) == 0
  assert f"{exported}, 8 test prompts" in capsys.readouterr().out
  assert export.main([run, exported]) == 2
  assert f"{exported} exists" in capsys.readouterr().err
  assert not (tmp_path / "gs:").exists()


@pytest.mark.parametrize("command", [evaluate, report, export])
def test_what_cannot_be_read_is_one_sentence(bucket, capsys, command):
  more = ["exported"] if command is export else []
  assert command.main(["s3://bucket/run", *more]) == 2
  assert "='s3://bucket/run'; no other store is supported." in capsys.readouterr().err
  assert command.main(["gs://nowhere/run", *more]) == 2
  assert "error: there is no bucket gs://nowhere for gs://nowhere/run; correct the name" in capsys.readouterr().err
  bucket.rights.clear()
  assert command.main([bucket.path("run"), *more]) == 2
  error = capsys.readouterr().err
  assert "cannot be read with these credentials" in error
  assert error.count("\n") == 1


def test_a_run_that_may_not_write_is_one_sentence(bucket, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  bucket.rights.remove("storage.objects.delete")
  assert train.main(["quickstart", "--run-dir", bucket.path("run")]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: cannot write the run folder gs://")
  assert "storage.objects.delete access" in error
  assert error.count("\n") == 1
