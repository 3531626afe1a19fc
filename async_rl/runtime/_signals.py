"""Signals that end a run: it is saved first."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any


def catch_signals(stack: contextlib.ExitStack, wanted: threading.Event) -> None:
  """Makes SIGTERM and a first SIGINT set `wanted`, until `stack` closes; a second SIGINT does what it did before.

  Does nothing outside of the main thread, which alone may handle signals.
  """
  if threading.current_thread() is not threading.main_thread():
    return
  before: dict[int, Any] = {int(n): signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

  def stop(*_: Any) -> None:
    wanted.set()
    signal.signal(signal.SIGINT, before[signal.SIGINT])

  for number in before:
    signal.signal(number, stop)
    stack.callback(signal.signal, number, before[number])
