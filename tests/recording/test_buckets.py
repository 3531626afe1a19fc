"""Run folders, data and weights in a bucket, against a server of Google Cloud Storage's API."""

import contextlib
import importlib.util
import itertools
import re
import time

import jax
import numpy as np
import pytest
from bucket_server import RIGHTS
from bucket_server import Failure
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import runtime
from async_rl import tasks
from async_rl._buckets import Mirror
from async_rl._buckets import copy_to_disk
from async_rl._buckets import written_on_disk
from async_rl._paths import as_path
from async_rl._paths import list_folder
from async_rl.recording import RunFolder
from async_rl.recording import RunFolderError
from async_rl.recording import _bucket_lock
from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._run_folder import find_checkpoints
from async_rl.rollout._mesh import make_mesh
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._schedule import read_schedule
from async_rl.tasks._jsonl import read_jsonl
from async_rl.types import TrainState

RUN = {"seed": 0}


@pytest.fixture
def short_lease(monkeypatch):
  """Locks are renewed, and taken over, within parts of a second."""
  monkeypatch.setattr(_bucket_lock, "_RENEW_SECONDS", 0.1)
  monkeypatch.setattr(_bucket_lock, "_LEASE_SECONDS", 1.0)


def test_a_run_folder_resumes_and_refuses_what_is_not_its_run(bucket):
  path = bucket.path("runs/a")
  with RunFolder.open(path, "text", RUN) as folder:
    assert not folder.resumed
    assert str(folder.schedule) == f"{path}/schedule.jsonl"
    assert bucket.names() == ["runs/a/.lock", "runs/a/config.txt", "runs/a/run.json"]
  assert bucket.names() == ["runs/a/config.txt", "runs/a/run.json"]
  with RunFolder.open(path, "other text", RUN) as folder:
    assert folder.resumed
    assert str(RunFolder.join(path, 1).schedule) == f"{path}/schedule_1.jsonl"
  assert bucket.contents()["runs/a/config.txt"] == b"other text"
  with pytest.raises(RunFolderError, match="gs://.*/runs/a holds another run .seed: 0 -> 1.: undo"):
    RunFolder.open(path, "text", {"seed": 1})
  bucket.put("data/train.jsonl", b"{}", {})
  with pytest.raises(RunFolderError, match="gs://.*/data contains files that do not belong to a run"):
    RunFolder.open(bucket.path("data"), "text", RUN)
  with pytest.raises(RunFolderError, match="process 1 does not see gs://.*/runs/b, which process 0 has opened"):
    RunFolder.join(bucket.path("runs/b"), 1)
  with pytest.raises(RunFolderError, match="gs://.*/runs/a has no checkpoint yet"):
    find_checkpoints(path)
  with pytest.raises(RunFolderError, match="'gs://.*' is a whole bucket: choose a folder in it, such as"):
    RunFolder.open(f"gs://{bucket.name}", "text", RUN)


def test_a_run_to_be_replaced_is_kept_until_the_new_one_has_begun(bucket):
  with RunFolder.open(bucket.path("run"), "old text", RUN) as folder:
    folder.metrics.write_text("old")
    (folder.checkpoints / "3" / "commit_success.txt").write_text("")
  bucket.put("run/exported/config.json", b"{}", {})  # not of a run
  before = bucket.contents()
  folder = RunFolder.open(bucket.path("run"), "new text", {"seed": 1}, overwrite=True)
  assert not folder.metrics.exists()
  folder.metrics.write_text("new")
  folder.remove()
  assert bucket.contents() == before
  with RunFolder.open(bucket.path("run"), "new text", {"seed": 1}, overwrite=True) as folder:
    folder.discard_replaced()
  assert bucket.names() == ["run/config.txt", "run/exported/config.json", "run/run.json"]


def test_a_folder_in_use_is_refused_and_that_of_a_dead_process_taken_over(bucket, short_lease, capsys):
  folder = RunFolder.open(bucket.path("run"), "text", RUN)
  with pytest.raises(RunFolderError, match="run is in use by process .* on .*: wait until .* --run-dir"):
    RunFolder.open(bucket.path("run"), "text", RUN)
  assert "just now; waiting up to 1 s for a sign of it" in capsys.readouterr().err
  folder._lock._ended.set()  # as if the process were killed
  folder._lock._thread.join()
  with RunFolder.open(bucket.path("run"), "text", RUN) as after:
    assert after.resumed
    assert bucket.contents("run/.lock")["run/.lock"] == after._lock._text.encode()
  # The lock of a process that died long ago is not waited for.
  capsys.readouterr()
  bucket.put("run/.lock", b"process 1 on a host\n", {})
  bucket.objects["run/.lock"] = bucket.objects["run/.lock"]._replace(updated=time.time() - 1000)
  RunFolder.open(bucket.path("run"), "text", RUN).close()
  assert capsys.readouterr().err == ""
  assert "run/.lock" not in bucket.objects


def test_a_process_that_lost_its_lock_saves_nothing_more(bucket, short_lease):
  folder = RunFolder.open(bucket.path("run"), "text", RUN)
  folder.check_lock()
  bucket.put("run/.lock", b"process 7 on a host\nother\n", {})
  folder._lock._thread.join(10)
  with pytest.raises(RunFolderError, match="run was taken over by process 7 on a host while this process could not"):
    folder.check_lock()
  mirror = Mirror(folder.metrics, folder.check_lock)
  mirror.local.write_text("of the run that lost it\n")
  with pytest.raises(RunFolderError, match="was taken over"):
    mirror.close()
  assert not folder.metrics.exists()
  folder.close()
  assert bucket.contents("run/.lock") == {"run/.lock": b"process 7 on a host\nother\n"}


def test_a_lock_whose_answer_got_lost_is_kept(bucket, short_lease):
  folder = RunFolder.open(bucket.path("run"), "text", RUN)
  renewals = itertools.count()
  ours = bucket.contents("run/.lock")["run/.lock"]

  def lose_answer(method, name):
    if method == "UPLOAD" and name == "run/.lock" and next(renewals) == 0:
      bucket.watch = lambda method, name: None
      bucket.put(name, ours, {})
      raise Failure(503, "the answer got lost")

  bucket.watch = lose_answer
  seen = bucket.objects["run/.lock"].generation
  deadline = time.monotonic() + 20
  while bucket.objects["run/.lock"].generation < seen + 3 and time.monotonic() < deadline:
    time.sleep(0.05)
  folder.check_lock()
  folder.close()
  assert bucket.names("run/.lock") == []


@pytest.mark.parametrize("right", sorted(RIGHTS))
def test_a_missing_right_is_one_sentence_with_the_remedy(bucket, right):
  bucket.rights.remove(right)
  roles = rf"grant their account roles/storage.objectAdmin and roles/storage.legacyBucketReader on gs://{bucket.name}"
  words = rf"cannot write the run folder gs://.*/run: .* with these credentials .*{right} access.*; {roles}"
  with pytest.raises(RunFolderError, match=words) as raised:
    RunFolder.open(bucket.path("run"), "text", RUN)
  assert "\n" not in str(raised.value)
  assert {name.partition("-")[0] for name in bucket.objects} <= {"run/.probe"}  # where it may not be deleted
  bucket.rights.add(right)
  RunFolder.open(bucket.path("run"), "text", RUN).close()


def test_a_missing_bucket_is_one_sentence_with_the_remedy(bucket):
  with pytest.raises(RunFolderError, match="there is no bucket gs://nowhere for gs://nowhere/run; correct .*create gs"):
    RunFolder.open("gs://nowhere/run", "text", RUN)
  with pytest.raises(FileNotFoundError, match="there is no bucket gs://nowhere"):
    read_jsonl("gs://nowhere/train.jsonl", ("question",))


def test_missing_credentials_are_one_sentence_with_the_remedy(monkeypatch):
  monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such.json")
  with pytest.raises(RunFolderError, match="gs://b/x needs valid credentials .File /no/such.json.*; run `gcloud auth"):
    RunFolder.open("gs://b/x", "text", RUN)


def test_missing_packages_are_one_sentence_with_the_remedy(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"run_dir='gs://b/x' needs gcsfs and google.cloud.storage, .*`pip install"):
    RunFolder.open("gs://b/x", "text", RUN)


@pytest.mark.parametrize(
  "path", ["s3://bucket/x", "foo://x", "gs:/bucket/x", "gs://", "file:///tmp/x", "gs:///x", "gs://b/x#1", "gs://b/*"]
)
def test_other_stores_are_refused_by_name(path):
  words = r"must be a path on a disk or of the form gs://bucket/folder, without \*\?#\[\], got {}={}; no other store is"
  for name, make in {"run_dir": runtime.Output, "init_from": runtime.Training, "lag": runtime.Schedule}.items():
    with pytest.raises(ValueError, match=words.format(name, re.escape(repr(path)))):
      make(**{name: path})
  with pytest.raises(ValueError, match=words.format("path", re.escape(repr(path)))):
    read_jsonl(path, ("question",))


def test_what_grows_is_uploaded_whole(bucket, tmp_path):
  bucket.put("run/lines.txt", b"1\n", {})
  mirror = Mirror(as_path(bucket.path("run/lines.txt")))
  with mirror.local.open("a") as lines:
    lines.write("2\n")
    lines.flush()
    assert bucket.contents() == {"run/lines.txt": b"1\n"}
    mirror.upload()
    assert bucket.contents() == {"run/lines.txt": b"1\n2\n"}
    seen = bucket.objects["run/lines.txt"].generation
    mirror.upload()
    assert bucket.objects["run/lines.txt"].generation == seen  # nothing changed
    lines.write("3\n")
    lines.flush()
    mirror.upload(at_most_every=1000)
    assert bucket.objects["run/lines.txt"].generation == seen
  mirror.close()
  assert bucket.contents() == {"run/lines.txt": b"1\n2\n3\n"}
  assert not mirror.local.exists()
  bucket.rights.remove("storage.objects.create")
  mirror = Mirror(as_path(bucket.path("run/more.txt")))
  mirror.local.write_text("1\n")
  with pytest.raises(OSError, match=r"gs://.*/more.txt cannot be written .Forbidden.*; correct this, then rerun"):
    mirror.close()
  with pytest.raises(OSError, match="No such file"):  # on a disk it is the file itself
    Mirror(tmp_path / "no" / "file").local.write_text("")


def test_a_schedule_in_a_bucket_continues_where_the_checkpoint_stands(bucket):
  path = bucket.path("run/schedule.jsonl")
  recorder = ScheduleRecorder(path)
  recorder.record("weights", 0)
  recorder.record("submit", 0)
  assert recorder.flush() == 2
  recorder.record("chunk")
  recorder.close()
  assert list(read_schedule(path)) == [("weights", 0), ("submit", 0), ("chunk",)]
  recorder = ScheduleRecorder(path, 2)
  recorder.record("train", 0, [0])
  recorder.close()
  assert list(read_schedule(path)) == [("weights", 0), ("submit", 0), ("train", 0, [0])]


def test_a_task_reads_its_prompts_from_a_bucket(bucket):
  bucket.put("data/train.jsonl", b'{"question": "1 + 1?", "answer": "#### 2"}\n', {})
  (prompt,) = tasks.GSM8K(folder=bucket.path("data")).prompts("train")
  assert prompt.answer == "#### 2"
  with pytest.raises(FileNotFoundError, match="there is no file 'gs://.*/data/test.jsonl'"):
    tasks.GSM8K(folder=bucket.path("data")).prompts("test")
  bucket.rights -= {"storage.objects.get", "storage.buckets.get"}
  with pytest.raises(OSError, match="storage.objects.get access"):
    tasks.GSM8K(folder=bucket.path("data")).prompts("train")
  bucket.rights.remove("storage.objects.list")
  with pytest.raises(PermissionError, match=r"cannot be read with these credentials .*grant .*storage.objectViewer"):
    tasks.GSM8K(folder=bucket.path("data")).prompts("train")


def test_a_copy_on_the_disk_is_made_once_for_each_state(bucket, tmp_path, monkeypatch):
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path))
  bucket.put("weights/", b"", {})  # as consoles make folders
  bucket.put("weights/config.json", b"{}", {})
  bucket.put("weights/deeper/a.txt", b"a", {})
  copy = copy_to_disk(as_path(bucket.path("weights")))
  assert copy.name == "weights"
  assert {str(file.relative_to(copy)) for file in copy.rglob("*.*")} == {"config.json", "deeper/a.txt"}
  assert (copy / "deeper" / "a.txt").read_text() == "a"
  assert copy_to_disk(as_path(bucket.path("weights/config.json"))).read_text() == "{}"
  bucket.rights.remove("storage.objects.get")  # what is there is not read again
  assert copy_to_disk(as_path(bucket.path("weights"))) == copy
  bucket.rights = RIGHTS
  bucket.put("weights/config.json", b'{"changed": 1}', {})
  changed = copy_to_disk(as_path(bucket.path("weights")))
  assert (changed / "config.json").read_text() == '{"changed": 1}'
  assert (copy / "config.json").read_text() == "{}"
  with pytest.raises(FileNotFoundError, match="there is no file or folder at gs://.*/elsewhere"):
    copy_to_disk(as_path(bucket.path("elsewhere")))


def test_a_folder_written_on_the_disk_arrives_whole_or_not_at_all(bucket):
  target = as_path(bucket.path("exported"))
  with written_on_disk(target) as folder:
    (folder / "deeper").mkdir(parents=True)
    (folder / "deeper" / "a.txt").write_text("a")
    assert bucket.names() == []
  assert bucket.contents() == {"exported/deeper/a.txt": b"a"}
  with pytest.raises(FileExistsError, match="gs://.*/exported exists; choose another"), written_on_disk(target):
    pass

  def write_half() -> None:
    with written_on_disk(as_path(bucket.path("other"))) as folder:
      folder.mkdir()
      (folder / "a.txt").write_text("a")
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    write_half()
  assert bucket.names("other") == []


def test_checkpoints_with_a_frozen_base_pass_over_a_damaged_one_and_keep_the_newest(bucket):
  checkpoints = as_path(bucket.path("run/checkpoints"))
  mesh, base = make_mesh(jax.devices()[:2], fsdp=2), np.arange(8, dtype=np.float32)
  states = []
  for step in range(3):
    params = {"base": base, "adapters": {"a": np.full(4, step, np.float32)}}
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec("fsdp")))
    states.append(TrainState(params, (), jax.device_put(np.int32(step), NamedSharding(mesh, PartitionSpec()))))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), states[0])
  with contextlib.closing(Checkpointer(checkpoints, keep=2, fingerprint={})) as checkpointer:
    for step in range(3):
      checkpointer.save(step, states[step], {"step": step})
  assert {path.name for path in list_folder(checkpoints)} == {"1", "2"}
  bucket.put("run/checkpoints/2/params/manifest.ocdbt", b"", {})
  with contextlib.closing(Checkpointer(checkpoints, keep=2, fingerprint={})) as checkpointer:
    restored, (host,) = checkpointer.restore(abstract)
    assert host == {"step": 1}
    np.testing.assert_array_equal(restored.params["adapters"]["a"], np.ones(4))
    np.testing.assert_array_equal(restored.params["base"], base)
    assert list(checkpointer.skipped) == [2]
    checkpointer.set_aside_skipped()
    assert "run/damaged/2/commit_success.txt" in bucket.objects
    checkpointer.save(2, states[2], {"step": 2})
    checkpointer.wait()
    np.testing.assert_array_equal(checkpointer.restore(abstract)[0].params["adapters"]["a"], np.full(4, 2))


def test_more_objects_than_fit_a_page_are_listed(bucket):
  for i in range(1001):
    bucket.put(f"many/{i:04}/x", b"", {})
  assert [path.name for path in list_folder(as_path(bucket.path("many")))] == [f"{i:04}" for i in range(1001)]
  assert list_folder(as_path(bucket.path("none"))) == []
