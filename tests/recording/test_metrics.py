"""Metrics reach the host one step late and the files complete, also after a resume."""

import importlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from async_rl.recording._metrics import MetricsBuffer
from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._metrics import check_wandb
from async_rl.recording._metrics import read_metrics
from async_rl.recording._metrics import staleness_histogram
from async_rl.recording._run_folder import RunFolder
from async_rl.types import NO_VERSION
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request


@pytest.fixture
def folder(tmp_path):
  with RunFolder.open(tmp_path / "run", "text", {}) as folder:
    yield folder


def events(folder):
  """Tag and step of all TensorBoard values, in order; records are length, checksum, data, checksum."""
  found = []
  for path in sorted(folder.tensorboard.iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = Event.FromString(data[12 : 12 + size])
      found += [(value.tag, event.step) for value in event.summary.value]
      data = data[16 + size :]
  return found


def test_metrics_come_one_step_late_and_without_implicit_transfers():
  buffer = MetricsBuffer()
  step = jax.jit(lambda x: {"loss": x * 2, "counts": jnp.arange(3)})
  x = jax.device_put(np.float32(1.5))
  assert buffer.push(1, step(x), {"time": 0.25}) is None
  with jax.transfer_guard("disallow"):
    previous_step, values = buffer.push(2, {"loss": x})
  assert previous_step == 1
  np.testing.assert_array_equal(values.pop("counts"), [0, 1, 2])
  assert values == {"loss": 3.0, "time": 0.25}
  assert isinstance(values["loss"], float)
  assert buffer.flush() == (2, {"loss": 1.5})
  assert buffer.flush() is None


def test_rows_in_json_and_tensorboard(folder):
  writer = MetricsWriter(folder)
  writer.write(1, {"reward/mean": np.float32(0.5), "ess/sequence": float("nan"), "ratio/max": float("inf")})
  writer.write(2, {"reward/mean": 1, "staleness/histogram": np.asarray([4, 0, 2])})
  assert list(read_metrics(folder.metrics)) == [
    {"step": 1, "reward/mean": 0.5, "ess/sequence": None, "ratio/max": None},
    {"step": 2, "reward/mean": 1.0, "staleness/histogram": [4, 0, 2]},
  ]
  writer.close()
  assert events(folder) == [
    ("reward/mean", 1),
    ("reward/mean", 2),
    ("staleness/histogram", 2),
  ]


def test_resume_drops_what_will_be_written_again(folder):
  writer = MetricsWriter(folder)
  for step in range(1, 6):
    writer.write(step, {"reward/mean": step})
  writer.close()
  with folder.metrics.open("a") as lines:
    lines.write('{"step": 6, "rew')  # cut off by a crash
  assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 3, 4, 5]
  writer = MetricsWriter(folder, resume_step=3)
  writer.write(4, {"reward/mean": 40})
  writer.close()
  rows = [(row["step"], row["reward/mean"]) for row in read_metrics(folder.metrics)]
  assert rows == [(1, 1), (2, 2), (3, 3), (4, 40)]
  assert list(map(json.loads, folder.metrics.read_text().splitlines()))


def delete(path):
  path.unlink()


def replace(path):
  path.with_name("copy").write_text('{"step": 9}\n')
  path.with_name("copy").rename(path)


def cut_off(path):
  os.truncate(path, path.stat().st_size - 5)  # within the last row


def empty(path):
  path.write_text("")


@pytest.mark.parametrize(
  ("damage", "rest", "words"),
  [
    (delete, [1, 2], "its 2 rows are written again"),
    (replace, [1, 2], "its 2 rows are written again"),
    (cut_off, [1], "1 of its 2 rows are lost"),
    (empty, [], "2 of its 2 rows are lost"),
  ],
)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_file_that_vanishes_is_noticed_and_written_again(folder, damage, rest, words, at_the_end):
  said = []
  writer = MetricsWriter(folder, warn=said.append)
  writer.write(1, {"reward/mean": 1})
  writer.write(2, {"reward/mean": 2})
  damage(folder.metrics)
  if not at_the_end:
    writer.write(3, {"reward/mean": 3})
    writer.write(4, {"reward/mean": 4})
  assert writer.flush() == len(rest) + (0 if at_the_end else 2)
  writer.close()
  assert [row["step"] for row in read_metrics(folder.metrics)] == rest + ([] if at_the_end else [3, 4])
  assert said == [f"{folder.metrics} was deleted, replaced or cut off by something else than this run; {words}"]


def test_a_folder_that_is_moved_takes_the_open_file_along_and_may_come_back(folder):
  said, elsewhere = [], folder.path.with_name("elsewhere")
  writer = MetricsWriter(folder, warn=said.append)
  writer.write(1, {"reward/mean": 1})
  folder.path.rename(elsewhere)
  writer.write(2, {"reward/mean": 2})
  assert writer.flush() == 2
  assert not folder.path.exists()
  assert set(said) == {f"{folder.path} was moved or deleted; put it back before the next checkpoint, which needs it"}
  elsewhere.rename(folder.path)
  writer.write(3, {"reward/mean": 3})
  writer.close()
  assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 3]


def test_rows_after_the_checkpoint_are_dropped_also_those_of_its_step(folder):
  writer = MetricsWriter(folder)
  writer.write(1, {"reward/mean": 1})
  rows = writer.rows
  writer.write(1, {"eval/accuracy": 0.5})
  writer.close()
  writer = MetricsWriter(folder, resume_step=1, resume_rows=rows)
  writer.write(1, {"eval/accuracy": 0.5})
  writer.close()
  assert list(read_metrics(folder.metrics)) == [{"step": 1, "reward/mean": 1}, {"step": 1, "eval/accuracy": 0.5}]


@pytest.mark.parametrize("line", [b'{"step": 2, "rew', b"[2]", b'{"reward": 1}', b"\0\0\0", b"\xff"])
def test_a_damaged_line_is_named_and_dropped_on_a_resume(folder, line):
  folder.metrics.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: .* is not a row of metrics"):
    list(read_metrics(folder.metrics))
  writer = MetricsWriter(folder, resume_step=3, resume_rows=3)
  writer.close()
  assert len(writer.damaged) == 1
  assert "metrics.jsonl, line 2: " in writer.damaged[0]
  assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 3]


def test_wandb_that_is_missing_is_named(monkeypatch):
  monkeypatch.setattr(sys, "path", [])
  monkeypatch.delitem(sys.modules, "wandb", raising=False)
  with pytest.raises(ImportError, match="wandb is not installed: `pip install wandb`, or leave out --wandb"):
    check_wandb()


WANDB = """
calls = []

def init(**options):
  calls.append(options)
  import sys
  return sys.modules[__name__]

def finish():
  pass
"""


def test_a_resumed_run_continues_its_run_at_wandb(folder, tmp_path, monkeypatch):
  """A module that records its calls stands in for the service."""
  (tmp_path / "wandb.py").write_text(WANDB)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "wandb", raising=False)
  for _ in range(2):
    MetricsWriter(folder, wandb=True).close()
  first, second = sys.modules.pop("wandb").calls
  assert first["id"] == second["id"]
  assert first["resume"] == second["resume"] == "allow"


def test_staleness_histogram_counts_drawn_tokens():
  def completion(versions):
    versions = np.asarray(versions, np.int32)
    return Completion(0, 0, versions, np.zeros(len(versions), np.float32), versions, versions != NO_VERSION, STOP)

  request = Request(0, np.zeros(1, np.int32), Prompt(0, "", None))
  groups = [
    Group(request, (completion([3, 3, 4]), completion([5, NO_VERSION])), np.zeros(2, np.float32)),
    Group(request, (completion([4]),), np.zeros(1, np.float32)),
  ]
  np.testing.assert_array_equal(staleness_histogram(groups, version=5, max_lag=3), [1, 2, 2, 0])


def test_pytorch_is_not_imported_and_stays_there_for_others(folder, tmp_path, monkeypatch):
  (tmp_path / "torch.py").write_text("raise RuntimeError('PyTorch was imported')")
  monkeypatch.syspath_prepend(tmp_path)
  for name in ("torch", "tensorboardX", "tensorboardX.writer"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  writer = MetricsWriter(folder)
  writer.write(1, {"loss": 1.0})
  writer.close()
  assert ("loss", 1) in events(folder)
  with pytest.raises(RuntimeError, match="PyTorch was imported"):
    importlib.import_module("torch")
