"""Runs whose folder is in a bucket; `test_hosts.py` has one of two processes, which is as on a disk bit for bit."""

import pytest
from runtime_helpers import assert_identical
from runtime_helpers import rows
from runtime_helpers import run
from tiny import DigitSums
from tiny import tiny

from async_rl import recording
from async_rl import runtime
from async_rl.recording import _bucket_lock

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture
def make(tmp_path, monkeypatch):
  """Makes the tiny experiment in a folder anywhere, its data on the disk."""
  monkeypatch.setattr(_bucket_lock, "_LEASE_SECONDS", 0.0)  # the lock of a run that was killed is taken over at once
  task = DigitSums(numbers=2, train=64, test=8, data_dir=str(tmp_path / "data"))
  return lambda run_dir, **given: tiny(run_dir=str(run_dir), task=task, **given)


def losses_of(summary):
  return [(row["step"], row["loss"]) for row in rows(summary)]


@pytest.mark.slow
def test_a_run_killed_while_it_saves_resumes_as_the_undisturbed_one(bucket, make, draws_pictures):
  options = dict(steps=5, checkpoint_every=2, lag="heavy", max_lag=3)
  killed = {}  # what the bucket held when the checkpoint of step 4 was all but committed

  def watch(method, name):
    if method == "UPLOAD" and name == "run/checkpoints/4/commit_success.txt":
      killed.update(bucket.objects)

  bucket.watch = watch
  summary, state, host = run(make(bucket.path("run"), **options))
  folders = {name.split("/")[1] for name in bucket.names()}
  assert folders == {
    "checkpoints",
    "config.txt",
    "metrics.jsonl",
    "report.png",
    "run.json",
    "schedule.jsonl",
    "tensorboard",
  }
  expected = losses_of(summary)

  bucket.watch = lambda method, name: None
  bucket.objects = killed  # as if the process had been killed then
  assert {"run/.lock", "run/checkpoints/4/params/manifest.ocdbt"} < set(killed)
  assert losses_of(summary)[:4] == expected[:4]  # more than the checkpoint before has
  resumed, resumed_state, resumed_host = run(make(bucket.path("run"), **options))
  assert_identical(resumed_state, state)
  assert resumed_host["ledger"] == host["ledger"]
  assert losses_of(resumed) == expected


def test_a_run_that_cannot_start_leaves_the_bucket_as_it_was(bucket, make):
  def start(run):
    raise ZeroDivisionError

  with recording.RunFolder.open(bucket.path("run"), "text", {"seed": 1}) as folder:
    folder.metrics.write_text('{"step": 1}\n')
    (folder.checkpoints / "1" / "commit_success.txt").write_text("")
  before = bucket.contents()
  with pytest.raises(ZeroDivisionError):
    runtime.train(make(bucket.path("run"), start=start, overwrite=True))
  assert bucket.contents() == before


def test_a_run_that_lost_its_folder_ends_at_the_next_checkpoint(bucket, make, monkeypatch):
  monkeypatch.setattr(_bucket_lock, "_RENEW_SECONDS", 0.01)

  def watch(method, name):
    if method == "UPLOAD" and name == "run/checkpoints/0/commit_success.txt":
      bucket.put("run/.lock", b"process 7 on a host\n", {})

  bucket.watch = watch
  with pytest.raises(recording.RunFolderError, match="run was taken over by process 7 on a host"):
    runtime.train(make(bucket.path("run"), steps=50, checkpoint_every=1))
  assert bucket.contents("run/.lock") == {"run/.lock": b"process 7 on a host\n"}
