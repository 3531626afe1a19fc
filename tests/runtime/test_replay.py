"""Replays of a recorded schedule: what cannot be repeated is refused before anything is made or lost."""

import re
import shutil

import pytest
from runtime_helpers import assert_identical
from runtime_helpers import run
from tiny import tiny

from async_rl import recording
from async_rl import runtime
from async_rl.runtime import _session

pytestmark = pytest.mark.usefixtures("two_devices")
SIZES = dict(steps=3, max_lag=2, decode_chunk=2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """The folder of an asynchronous run."""
  folder = tmp_path_factory.mktemp("runs") / "recorded"
  runtime.train(tiny(run_dir=str(folder), mode="async", **SIZES))
  return folder


def contents(folder):
  """All files and what they hold."""
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
  ("content", "options", "words"),
  [
    pytest.param(
      '{"not": "events"}\n', {}, "given.jsonl, line 1: .* is not an event of a schedule; give", id="no event"
    ),
    pytest.param("", {}, "given.jsonl trains no step; give the schedule.jsonl of a run", id="empty"),
    pytest.param(None, {"groups": 2}, "given.jsonl trains 4 groups at step 0, got groups=2 .*; replay", id="groups"),
    pytest.param(None, {"steps": 1}, "given.jsonl begins groups earlier than a run .* steps=1 may; replay", id="steps"),
  ],
)
def test_a_schedule_that_cannot_be_repeated_is_refused_before_anything_is_lost(
  tmp_path, recorded, content, options, words
):
  old, given = tmp_path / "old", tmp_path / "given.jsonl"
  shutil.copytree(recorded, old)
  given.write_text((recorded / "schedule.jsonl").read_text() if content is None else content)
  before = contents(old)
  for run_dir, overwrite in ((old, True), (tmp_path / "new", False)):
    start = lambda run: pytest.fail("the run began")
    experiment = tiny(run_dir=str(run_dir), lag=str(given), overwrite=overwrite, start=start, **{**SIZES, **options})
    with pytest.raises(ValueError, match=words):
      runtime.train(experiment)
  assert contents(old) == before
  assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_does_not_replay_its_own_schedule_which_it_would_delete(recorded, overwrite):
  before = contents(recorded)
  lag = str(recorded / "schedule.jsonl")
  with pytest.raises(ValueError, match=rf"\*lag\* must be of another folder than run_dir, got lag='{re.escape(lag)}'"):
    tiny(run_dir=str(recorded), lag=lag, overwrite=overwrite, **SIZES)
  assert contents(recorded) == before


def stop_before_step(patch, version):
  """Has a signal arrive when the batch of the step from this version is taken."""
  take = _session.Session.take_batch

  def signalled(session, tickets=None):
    if session.version == version:
      session.stop.request()
    return take(session, tickets)

  patch.setattr(_session.Session, "take_batch", signalled)


def test_a_replay_that_is_stopped_says_how_to_start_it_again(tmp_path, recorded, monkeypatch):
  make = lambda **options: tiny(run_dir=str(tmp_path / "run"), lag=str(recorded / "schedule.jsonl"), **SIZES, **options)
  with monkeypatch.context() as patch:
    stop_before_step(patch, 1)
    with pytest.raises(runtime.Interrupted, match="after step 1, .*; a replay cannot be resumed, rerun with --overwr"):
      runtime.train(make())
  with pytest.raises(ValueError, match="holds part of a replay, which cannot be resumed; pass --overwrite"):
    runtime.train(make())
  assert runtime.train(make(overwrite=True)).version == 3


def test_a_replay_that_is_stopped_before_its_first_step_goes_on(tmp_path, recorded, monkeypatch):
  make = lambda name: tiny(run_dir=str(tmp_path / name), lag=str(recorded / "schedule.jsonl"), **SIZES)
  with monkeypatch.context() as patch:
    stop_before_step(patch, 0)
    with pytest.raises(runtime.Interrupted, match="after step 0, .*; rerun the same command to resume$"):
      runtime.train(make("stopped"))
  (_, resumed, _), (_, whole, _) = run(make("stopped")), run(make("whole"))
  assert_identical(resumed, whole)


def test_a_replay_that_is_stopped_after_its_last_step_goes_on(tmp_path, recorded, monkeypatch):
  lag = str(recorded / "schedule.jsonl")
  experiment = tiny(run_dir=str(tmp_path / "run"), lag=lag, eval_prompts=4, **SIZES)
  evaluate = _session.Session.evaluate

  def signalled(session):
    if session.done:
      session.stop.request()
    evaluate(session)

  with monkeypatch.context() as patch:
    patch.setattr(_session.Session, "evaluate", signalled)
    with pytest.raises(runtime.Interrupted, match="after step 3, .*; rerun the same command to resume$"):
      runtime.train(experiment)
  summary = runtime.train(experiment)
  evaluated = [r["step"] for r in recording.read_metrics(summary.folder.metrics) if "eval/accuracy" in r]
  assert evaluated == [0, 3]
