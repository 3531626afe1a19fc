"""Schedules survive the file and a restart; simulated lags follow their distribution."""

import json
import threading

import numpy as np
import pytest

from async_rl.rollout._schedule import LAG_KINDS
from async_rl.rollout._schedule import LagDistribution
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._schedule import read_replayable
from async_rl.rollout._schedule import read_schedule

EVENTS = [("weights", 0), ("submit", 0), ("submit", 1), ("chunk",), ("train", 0, [1, 0]), ("weights", 1)]


def test_events_come_back_in_order(tmp_path):
  recorder = ScheduleRecorder(tmp_path / "schedule.jsonl")
  for event in EVENTS * 100:  # more than are held in memory
    recorder.record(*event)
  recorder.close()
  assert list(read_schedule(tmp_path / "schedule.jsonl")) == EVENTS * 100


def test_resume_cuts_off_what_the_checkpoint_does_not_have(tmp_path):
  path = tmp_path / "schedule.jsonl"
  recorder = ScheduleRecorder(path)
  for event in EVENTS[:4]:
    recorder.record(*event)
  position = recorder.flush()
  assert position == 4
  recorder.record("submit", 77)
  recorder.close()

  recorder = ScheduleRecorder(path, position)
  for event in EVENTS[4:]:
    recorder.record(*event)
  assert recorder.flush() == len(EVENTS)
  recorder.close()
  assert list(read_schedule(path)) == EVENTS

  ScheduleRecorder(path).close()
  assert list(read_schedule(path)) == []


@pytest.mark.parametrize("lines", [['["chunk"]\n', '["chu'], None], ids=["cut off", "missing"])
def test_a_schedule_that_lacks_events_goes_on_but_cannot_be_replayed(tmp_path, lines):
  path = tmp_path / "schedule.jsonl"
  if lines is not None:
    path.write_text("".join(lines))
  kept = 1 if lines else 0
  recorder = ScheduleRecorder(path, position=7)
  assert recorder.damaged == [f"{path} has {kept} of the 7 events before the checkpoint, so the run cannot be replayed"]
  recorder.record("submit", 3)
  assert recorder.flush() == kept + 2
  recorder.close()
  assert list(read_schedule(path)) == [("chunk",)] * kept + [("resume",), ("submit", 3)]


def test_threads_lose_no_event(tmp_path):
  recorder = ScheduleRecorder(tmp_path / "schedule.jsonl")

  def record(start):
    for i in range(1000):
      recorder.record("submit", start + i)

  threads = [threading.Thread(target=record, args=(1000 * i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  recorder.close()
  events = list(read_schedule(tmp_path / "schedule.jsonl"))
  assert sorted(ticket for _, ticket in events) == list(range(4000))


#: Two steps of two groups each, the second one of lag 1, of which group 1 failed and group 4 took its place.
REPLAYABLE = [
  *[("weights", 0), ("submit", 0), ("submit", 1), ("submit", 2), ("submit", 3), ("submit", 4), ("chunk",)],
  *[("train", 0, [2, 0]), ("weights", 1), ("chunk",), ("train", 1, [3, 4])],
]


@pytest.mark.parametrize(
  ("events", "options", "words"),
  [
    pytest.param([], {}, "trains no step; give the schedule.jsonl of a run that took some", id="empty"),
    pytest.param(REPLAYABLE[:7], {}, "trains no step", id="before the first step"),
    pytest.param([("resume",), *REPLAYABLE], {}, "resumed with samples in flight; replay one", id="resumed"),
    pytest.param(REPLAYABLE, {"groups": 3}, "trains 2 groups at step 0, got groups=3 .*; replay it with", id="groups"),
    pytest.param(REPLAYABLE, {"max_lag": 0}, "than a run with max_lag=0 and steps=2 may; replay it with", id="lag"),
    pytest.param(REPLAYABLE, {"steps": 1}, "than a run with max_lag=1 and steps=1 may; replay it with", id="steps"),
    pytest.param(
      [REPLAYABLE[0], ("submit", 9), *REPLAYABLE[1:3], ("train", 0, [0, 1]), ("submit", 2), ("train", 1, [9, 2])],
      {"max_lag": 0},
      "than a run with max_lag=0",
      id="a group left behind",
    ),
  ],
)
def test_what_a_run_of_these_options_cannot_repeat_is_refused(tmp_path, events, options, words):
  path = tmp_path / "schedule.jsonl"
  path.write_text("".join(json.dumps(event) + "\n" for event in events))
  with pytest.raises(ValueError, match=f"schedule.jsonl .*{words}"):
    read_replayable(path, **{"groups": 2, "max_lag": 1, "steps": 2, **options})


def test_what_a_run_can_repeat_is_returned_whole(tmp_path):
  path = tmp_path / "schedule.jsonl"
  path.write_text("".join(json.dumps(event) + "\n" for event in [*REPLAYABLE, ("resume",)]))
  assert read_replayable(path, groups=2, max_lag=1, steps=2) == [*REPLAYABLE, ("resume",)]  # after the last step


def test_broken_line_is_named(tmp_path):
  (tmp_path / "schedule.jsonl").write_text('["chunk"]\nnot json\n')
  with pytest.raises(ValueError, match=r"schedule.jsonl, line 2: 'not json\\n' is not an event"):
    list(read_schedule(tmp_path / "schedule.jsonl"))


@pytest.mark.parametrize("kind", LAG_KINDS)
@pytest.mark.parametrize("max_lag", [0, 1, 5])
def test_every_step_is_first_due_at_its_source_version(kind, max_lag):
  lags = LagDistribution(max_lag, kind, seed=3)
  fed = {}
  for version in range(60):
    assert version in lags.steps_due(version)
    for step in lags.steps_due(version):
      fed.setdefault(step, version)
  assert set(range(60)) <= set(fed)
  for step, version in fed.items():
    assert version == lags.source_version(step)
    assert 0 <= step - version <= max_lag
    assert step - version == min(step, lags.lag(step))


def test_lags_follow_their_distribution():
  n, max_lag = 4000, 7
  assert {LagDistribution(max_lag).lag(step) for step in range(50)} == {max_lag}
  assert [LagDistribution(2, "rounds").lag(step) for step in range(7)] == [0, 1, 2, 0, 1, 2, 0]

  uniform = [LagDistribution(max_lag, "uniform", seed=1).lag(step) for step in range(n)]
  share = np.bincount(uniform, minlength=max_lag + 1) / n
  np.testing.assert_allclose(share, 1 / (max_lag + 1), atol=5 * np.sqrt(1 / 8 * 7 / 8 / n))

  heavy = np.asarray([LagDistribution(max_lag, "heavy", seed=1, tail=0.7).lag(step) for step in range(n)])
  for lag in range(max_lag + 1):
    expected = (1 + lag) ** -0.7
    assert abs((heavy >= lag).mean() - expected) <= 5 * np.sqrt(expected * (1 - expected) / n)
  assert heavy.max() == max_lag


def test_lag_depends_on_seed_and_step_alone():
  lags = LagDistribution(9, "uniform", seed=5)
  forward = [lags.lag(step) for step in range(30)]
  assert [LagDistribution(9, "uniform", seed=5).lag(step) for step in reversed(range(30))] == forward[::-1]
  assert [LagDistribution(9, "uniform", seed=6).lag(step) for step in range(30)] != forward


def test_bad_distributions_are_refused():
  with pytest.raises(ValueError, match=r"\*max_lag\* must be an integer at least 0, got max_lag=-1"):
    LagDistribution(-1)
  with pytest.raises(ValueError, match="got kind='pareto'"):
    LagDistribution(1, "pareto")
  with pytest.raises(ValueError, match=r"\*tail\* must be a number above 0, got tail=0"):
    LagDistribution(1, "heavy", tail=0)
