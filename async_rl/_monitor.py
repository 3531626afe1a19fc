"""A condition that ends: what several threads wait on, until one of them closes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Closed(RuntimeError):
  """A thread used an object that was closed, without an error, because its work is over."""


class Monitor:
  """Guards the state of an object that threads share; `with monitor:` holds its lock, which is reentrant.

  A thread that fails calls `close(error)`, which wakes all waiters; from then on `check_open` raises that error in
  every thread.

  Args:
    name: the name of the guarded object with its article, for the message of `Closed`.
  """

  def __init__(self, name: str):
    self._name = name
    self._changed = threading.Condition()
    self._closed = False
    self._error: BaseException | None = None

  def __enter__(self) -> None:
    self._changed.acquire()

  def __exit__(self, *exc_info) -> None:
    self._changed.release()

  @property
  def closed(self) -> bool:
    """Whether `close` was called."""
    return self._closed

  def close(self, error: BaseException | None = None) -> None:
    """Closes the object and wakes all waiters. Idempotent; of several errors the first is kept."""
    with self._changed:
      self._closed = True
      self._error = self._error or error
      self._changed.notify_all()

  def raise_error(self) -> None:
    """Raises the error that the object was closed with, if there was one."""
    if self._error is not None:
      raise self._error

  def check_open(self) -> None:
    """Raises the error that the object was closed with, or `Closed` if it was closed without one."""
    self.raise_error()
    if self._closed:
      raise Closed(f"{self._name} is closed")

  def notify(self) -> None:
    """Tells all waiters that the state changed; the caller holds the lock."""
    self._changed.notify_all()

  def wait_for(self, ready: Callable[[], Result], timeout: float | None = None) -> Result | None:
    """Waits until `ready()` is truthy; the caller holds the lock, which is released while it waits.

    Args:
      ready: the condition, called with the lock held; what it raises is raised here.
      timeout: the longest wait in seconds, `None` for no limit.

    Returns:
      The truthy result of `ready`; `None` after `timeout` seconds, or once the object is closed.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while not self._closed:
      if result := ready():
        return result
      left = None if end is None else end - time.monotonic()
      if left is not None and left <= 0:
        return None
      self._changed.wait(left)
    return None
