"""Notices that a run stands still, and tells where."""

from __future__ import annotations

import collections
import contextlib
import math
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from collections.abc import Iterator

from async_rl._monitor import Monitor

#: A step that takes this many times the median of those before it is called a standstill ...
_FACTOR = 10.0
#: ... unless it is shorter than this many seconds ...
_LEAST_SECONDS = 60.0
#: ... or evaluates or saves, which have this many seconds.
_PAUSED_SECONDS = 1800.0
#: Steps that are needed for a median: the first ones compile.
_LEAST_STEPS = 3


class StallWatch:
  """Tells once per step when it takes ten times as long as others, with the stack of every thread of this process.

  Every process of a run has one of its own: where one waits for ever, the others wait for it, and their logs together
  show which and why. Nothing is ended. A thread of its own waits until it is closed.

  Args:
    tell: prints a text.
    describe: returns what this process is doing, for the text.
    least_seconds: seconds that any step may take.
  """

  def __init__(self, tell: Callable[[str], None], describe: Callable[[], str], least_seconds: float = _LEAST_SECONDS):
    self._tell = tell
    self._describe = describe
    self._least_seconds = least_seconds
    self._monitor = Monitor("the watch over standstills")
    self._seconds: collections.deque[float] = collections.deque(maxlen=101)
    self._began = math.inf
    self._paused_seconds = 0.0
    self._due = self._limit = math.inf
    self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)
    self._thread.start()

  def end_step(self) -> None:
    """Notes that a step has ended and the next one begins."""
    now = time.monotonic()
    if self._began < math.inf:
      self._seconds.append(now - self._began - self._paused_seconds)
    self._paused_seconds = 0.0
    self._restart(now, self._step_limit())
    self._began = now

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Marks a part of a step, such as an evaluation, whose time is not that of steps."""
    start = time.monotonic()
    self._restart(start, max(_PAUSED_SECONDS, self._step_limit()))
    try:
      yield
    finally:
      now = time.monotonic()
      self._paused_seconds += now - start
      self._restart(now, self._step_limit())

  def close(self) -> None:
    """Ends the watch."""
    self._monitor.close()
    self._thread.join()

  def _step_limit(self) -> float:
    if len(self._seconds) < _LEAST_STEPS:
      return math.inf
    return max(self._least_seconds, _FACTOR * self._median())

  def _restart(self, start: float, limit: float) -> None:
    with self._monitor:
      self._due, self._limit = start + limit, limit
      self._monitor.notify()

  def _watch(self) -> None:
    while text := self._wait_for_standstill():
      # Stacks first: a thread that stands still may hold what `describe` needs.
      self._tell(f"{text}; every thread of this process:\n{format_stacks()}")
      self._tell(f"{text}; {self._describe()}")

  def _wait_for_standstill(self) -> str | None:
    """Returns what to tell, once there is something; `None` if the watch was closed."""
    with self._monitor:
      while not self._monitor.closed:
        left = self._due - time.monotonic()
        if left <= 0:
          self._due = math.inf  # told once
          return f"no step has ended for {self._limit:.0f} s, where steps take {self._median():.1f} s"
        self._wait_for_restart(self._due, None if left == math.inf else left)
    return None

  def _wait_for_restart(self, due: float, timeout: float | None) -> None:
    self._monitor.wait_for(lambda: self._due != due, timeout)

  def _median(self) -> float:
    return statistics.median(self._seconds) if self._seconds else math.nan


def format_stacks() -> str:
  """Returns the stack of every thread of this process but the caller's, most recent call last."""
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  own = threading.get_ident()
  stacks = []
  for ident, frame in sys._current_frames().items():
    if ident != own:
      stacks.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
  return "\n".join(stacks)
