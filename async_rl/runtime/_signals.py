"""Signals that end a run: they are answered at once and obeyed between two chunks of work, so that it can be saved."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
  """SIGTERM, SIGINT or SIGHUP ended the run; like KeyboardInterrupt, no `except Exception` stops it.

  Args:
    message: one sentence for the user.
    number: the number of the signal.

  Attributes:
    status: the exit status of the process by the shells' convention: 143 after SIGTERM, 130 after SIGINT, 129 after
      SIGHUP.
  """

  def __init__(self, message: str, number: int):
    super().__init__(message)
    self.status = 128 + number


class StopRequested(Exception):
  """Ends the work at hand after a signal, so that the run can be saved."""


class StopSignal:
  """Notices SIGTERM, SIGINT and SIGHUP, the end of its terminal, while a run works.

  A thread answers a signal at once, also while the main thread compiles or waits for a device; the main thread obeys
  at its next `check`, in `deferred` work. Other work, which has nothing to save, ends with `Interrupted` as soon as the
  interpreter is reached. A second SIGINT does what it did before. SIGHUP is left alone where it is ignored, as under
  nohup; after it, what the run writes to its terminal goes nowhere.

  Attributes:
    activity: the work at hand, for the answer to the user, such as "evaluating version 3".
    requested_at: the time at which the first signal arrived, by `time.monotonic`; infinite if none did.
  """

  def __init__(self) -> None:
    self.activity = "starting"
    self.requested_at = math.inf
    self._number = 0
    self._deferred = False

  @property
  def number(self) -> int:
    """The number of the signal that arrived, 0 if none did."""
    return self._number

  def request(self, number: int = signal.SIGTERM) -> None:
    """Requests the stop as if signal `number` had arrived."""
    self.requested_at = min(self.requested_at, time.monotonic())
    self._number = self._number or number

  def check(self) -> None:
    """Raises `StopRequested` if a signal arrived."""
    if self._number:
      raise StopRequested

  def interrupted(self, when: str, *, resumable: bool = True) -> Interrupted:
    """Returns the error that ends the run, with the remedy; `when` completes "stopped by SIGTERM ..."."""
    name = signal.Signals(self._number).name
    remedy = "rerun the same command to resume" if resumable else "a replay cannot be resumed, rerun with --overwrite"
    return Interrupted(f"stopped by {name} {when}; {remedy}", self._number)

  @contextlib.contextmanager
  def deferred(self) -> Iterator[None]:
    """Marks work that obeys a signal by itself, by calls of `check`."""
    self._deferred = True
    try:
      yield
    finally:
      self._deferred = False

  @contextlib.contextmanager
  def caught(self) -> Iterator[None]:
    """Handles signals until the end of the context; does nothing outside of the main thread, which alone may."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    before: dict[int, Any] = {int(number): signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
      del before[signal.SIGHUP]
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def notice(number: int) -> None:
      if number == signal.SIGHUP:
        _silence(terminals)
      self.request(number)

    def obey(number: int, _: Any) -> None:
      notice(number)
      signal.signal(signal.SIGINT, before[signal.SIGINT])
      if not self._deferred:
        raise self.interrupted(f"while {self.activity}")

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=self._answer, args=(receiver, set(before), notice), name="signals", daemon=True)
    thread.start()
    try:
      for number in before:
        signal.signal(number, obey)
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
      signal.set_wakeup_fd(wakeup)
      sender.close()  # ends the thread
      thread.join()
      receiver.close()

  def _answer(self, receiver: socket.socket, obeyed: set[int], notice: Callable[[int], None]) -> None:
    """Tells the user that the first signal was received, from a thread that is never busy."""
    answered = False
    while numbers := receiver.recv(16):
      for number in filter(obeyed.__contains__, numbers):
        notice(number)
        if not answered:
          answered = True
          name = signal.Signals(number).name
          then = "the run is saved after this chunk of work and stops; Ctrl-C stops it without"
          print(f"{name} received while {self.activity}: {then}", file=sys.stderr, flush=True)


def _silence(descriptors: list[int]) -> None:
  """Has what is written to the descriptors go nowhere: writing to a terminal that is gone would be an error."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  for number in descriptors:
    os.dup2(nowhere, number)
  os.close(nowhere)
