"""The monitor: waiters wake up on a change, at a time limit, and when it is closed."""

import threading

import pytest

from async_rl._monitor import Closed
from async_rl._monitor import Monitor


def start(target):
  thread = threading.Thread(target=target, daemon=True)
  thread.start()
  return thread


def test_a_waiter_gets_the_truthy_result_after_a_change():
  monitor, items, found = Monitor("the box"), [], []

  def wait():
    with monitor:
      found.append(monitor.wait_for(lambda: items and items[0]))

  thread = start(wait)
  with monitor:
    items.append("a")
    monitor.notify()
  thread.join(10)
  assert found == ["a"]


def test_a_wait_ends_at_its_time_limit():
  monitor = Monitor("the box")
  with monitor:
    assert monitor.wait_for(lambda: False, timeout=0.01) is None
    monitor.check_open()


def test_a_ready_that_raises_ends_the_wait():
  monitor = Monitor("the box")
  with pytest.raises(KeyError, match="in ready"), monitor:
    monitor.wait_for(lambda: {}["in ready"])


def test_closing_wakes_all_waiters_and_keeps_the_first_error():
  monitor, caught = Monitor("the box"), []

  def wait():
    try:
      with monitor:
        monitor.wait_for(lambda: False)
        monitor.check_open()
    except Exception as error:
      caught.append(error)

  threads = [start(wait) for _ in range(2)]
  first = FloatingPointError("the cause")
  monitor.close(first)
  monitor.close(KeyError("a later error"))
  for thread in threads:
    thread.join(10)
  assert caught == [first, first]
  assert monitor.closed


def test_a_closed_monitor_is_never_ready():
  monitor = Monitor("the box")
  monitor.close()
  with monitor:
    assert monitor.wait_for(lambda: True) is None
  monitor.raise_error()
  with pytest.raises(Closed, match="the box is closed"):
    monitor.check_open()
