"""Host metrics of a step: the breakdown of its time, and what was trained against what was available."""

import types

import numpy as np
import pytest

from async_rl.runtime import _step_meter
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request

pytestmark = pytest.mark.usefixtures("two_devices")


def make_group(ticket, lengths, rewards, failed=()):
  completions = tuple(
    Completion(
      ticket,
      k,
      np.zeros(length + 1, np.int32),
      np.zeros(length + 1, np.float32),
      np.zeros(length + 1, np.int32),
      np.arange(length + 1) < length,  # the last token is a tool's
      STOP,
    )
    for k, length in enumerate(lengths)
  )
  request = Request(ticket, np.zeros(1, np.int32), Prompt(ticket, "", None))
  return Group(request, completions, np.asarray(rewards, np.float32), failed)


def test_what_was_trained_is_compared_with_what_was_available():
  batch = [make_group(0, [2, 4], [1.0, 0.0]), make_group(1, [3, 11], [1.0, 9.0], failed=(1,))]
  waiting = [make_group(2, [20, 20], [0.0, 0.0])]
  assert _step_meter.selection_metrics(batch, waiting) == {
    "selection/length_trained": pytest.approx(3.0),
    "selection/length_sampled": pytest.approx((2 + 4 + 3 + 11 + 20 + 20) / 6),
    "selection/reward_trained": pytest.approx(2 / 3),
    "selection/reward_sampled": pytest.approx(2 / 5),
  }
  assert set(_step_meter.selection_metrics([], []).values()) == {0.0}


class Clock:
  """A clock that only moves when told to."""

  def __init__(self):
    self.now = 100.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(_step_meter, "time", clock)
  return clock


def make_meter():
  conversations = types.SimpleNamespace(metrics=lambda groups: {})
  sampler = types.SimpleNamespace(counters=types.SimpleNamespace(tokens=0, slot_steps=0))
  store = types.SimpleNamespace(ready_at=-np.inf, push_seconds=0.5, push_bytes=8)
  actor = types.SimpleNamespace(idle_seconds=0.0, busy_seconds=0.0, conversations=conversations)
  counts = dict(pending=1, complete=0, failed=0)
  buffer = types.SimpleNamespace(max_lag=4, count_groups=lambda: counts, groups=lambda: [])
  scorer = types.SimpleNamespace(failures={})
  return _step_meter.StepMeter(sampler, buffer, store, actor, scorer), store, actor


def test_the_parts_of_a_steps_time(clock):
  meter, store, actor = make_meter()
  group = make_group(0, [2, 4], [1.0, 0.0])
  meter.begin_step()
  first = meter.metrics([group], 0, 6)
  assert first["time/learning"] == 0.0  # there was no step before
  with meter.timing("evaluation"):
    clock.now += 3.0
  with meter.timing("checkpoint"):
    clock.now += 1.0
  meter.end_step()
  store.ready_at = 102.0  # the step was computed while the evaluation ran
  clock.now += 5.0  # until the next batch is there
  actor.busy_seconds += 4.0
  meter.begin_step()
  clock.now += 1.0  # the launch of a step belongs to the next interval
  found = meter.metrics([group], 1, 6)
  expected = dict(step=9.0, generation=4.0, waiting=5.0, learning=2.0, weight_push=0.5, evaluation=3.0, checkpoint=1.0)
  assert {name: found[f"time/{name}"] for name in expected} == expected
  assert found["idle/learner"] == pytest.approx(5 / 9)
  meter.begin_step()
  again = meter.metrics([group], 2, 6)
  assert again["time/step"] == 1.0
  assert again["time/evaluation"] == again["time/checkpoint"] == 0.0
  assert set(found) == set(_step_meter.METRICS)
