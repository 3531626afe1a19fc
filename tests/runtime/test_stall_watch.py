"""A run that stands still says where."""

import dataclasses
import itertools
import threading

import pytest
from tiny import DigitSums
from tiny import sums
from tiny import tiny

from async_rl import runtime
from async_rl.runtime import _session
from async_rl.runtime import _stall_watch

pytestmark = pytest.mark.usefixtures("two_devices")


class Told:
  """Collects what is told; `wait` returns all of it once there are as many texts."""

  def __init__(self):
    self._texts = []
    self._changed = threading.Condition()

  def __call__(self, text):
    with self._changed:
      self._texts.append(text)
      self._changed.notify()

  def wait(self, count):
    with self._changed:
      assert self._changed.wait_for(lambda: len(self._texts) >= count, timeout=60)
      return list(self._texts)


@pytest.fixture
def clock(monkeypatch):
  """The clock of the watch, at a standstill until it is set."""
  now = [0.0]
  monkeypatch.setattr(_stall_watch.time, "monotonic", lambda: now[0])
  return now


@pytest.fixture
def told():
  return Told()


@pytest.fixture
def watch(clock, told):
  watch = _stall_watch.StallWatch(told, lambda: "waiting for a batch", least_seconds=1.0)
  yield watch
  watch.close()


def take_steps(watch, clock, *seconds):
  watch.end_step()
  for length in seconds:
    clock[0] += length
    watch.end_step()


def test_ten_times_the_median_is_told_once_with_the_stacks_of_all_threads(watch, clock, told):
  take_steps(watch, clock, 7.0, 0.5, 0.4, 0.5)
  assert watch._step_limit() == 5.0
  leave = threading.Event()

  def stand_still():
    leave.wait(60)

  thread = threading.Thread(target=stand_still, name="a thread that stands still")
  thread.start()
  clock[0] += 5.0
  with watch._monitor:
    watch._monitor.notify()
  stacks, state = told.wait(2)
  leave.set()
  thread.join()
  assert "no step has ended for 5 s, where steps take 0.5 s" in stacks
  assert "thread a thread that stands still:" in stacks
  assert "stand_still" in stacks
  assert "thread MainThread:" in stacks
  assert state.endswith("; waiting for a batch")
  assert watch._due == float("inf")  # until the next step
  watch.end_step()
  assert watch._due < float("inf")


def test_a_text_that_nobody_reads_does_not_stop_the_steps(clock):
  writing, leave = threading.Event(), threading.Event()

  def tell(_):
    writing.set()
    assert leave.wait(60)

  watch = _stall_watch.StallWatch(tell, str, least_seconds=1.0)
  take_steps(watch, clock, 0.5, 0.5, 0.5)
  clock[0] += 5.0
  with watch._monitor:
    watch._monitor.notify()
  assert writing.wait(60)
  step = threading.Thread(target=watch.end_step)
  step.start()
  step.join(30)
  blocked = step.is_alive()
  leave.set()
  step.join()
  watch.close()
  assert not blocked


def test_short_steps_evaluations_and_the_first_steps_are_no_standstill(watch, clock, told):
  take_steps(watch, clock, 500.0, 0.01)
  assert watch._due == float("inf")  # nothing to compare with
  take_steps(watch, clock, 0.01, 0.01)
  assert watch._due == clock[0] + 1.0
  with watch.paused():
    assert watch._due == clock[0] + 1800
    clock[0] += 700
  assert watch._due == clock[0] + 1.0
  watch.end_step()
  assert watch._seconds[-1] == pytest.approx(0)  # the pause is not part of the step


def test_a_run_that_waits_for_a_reward_says_so(tmp_path, monkeypatch, capsys):
  leave, told, given = threading.Event(), Told(), itertools.count(1)

  class HangingSums(DigitSums):
    def reward(self, prompt, text, finish):
      if next(given) == 33:  # of the fifth step
        assert leave.wait(60)
      return super().reward(prompt, text, finish)

  def watch(tell, describe):
    def tell_and_leave(text):
      tell(text)
      told(text)
      if text.endswith("wait to be trained"):
        leave.set()

    return _stall_watch.StallWatch(tell_and_leave, describe, least_seconds=0.5)

  monkeypatch.setattr(_session, "StallWatch", watch)
  experiment = tiny(run_dir=str(tmp_path / "run"), mode="sync")
  runtime.train(dataclasses.replace(experiment, task=sums(experiment.options, HangingSums)))
  stacks, state = told.wait(2)[:2]
  assert "leave.wait" in stacks
  assert "sampling for step 5; the sampler has the weights of step 4" in state
  assert state in capsys.readouterr().err
