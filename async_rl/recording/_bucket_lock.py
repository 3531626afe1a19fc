"""The lock of a run folder in a bucket.

A bucket knows no lock that ends with its process. Here the lock is an object that its holder writes again every few
seconds, each time on the condition that nobody else has written it since. A process that finds the object waits for a
sign of the holder; without one, the holder is taken for dead, and the object is overwritten, on the same condition.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

from async_rl._paths import Path

#: Seconds between two writes of a lock by its holder.
_RENEW_SECONDS = 10.0
#: Seconds without a write after which the holder of a lock is taken for dead.
_LEASE_SECONDS = 45.0


class InUseError(RuntimeError):
  """Another process holds the lock; the message names it."""


class BucketLock:
  """A lock that this process holds until `close`, unless it cannot renew it in time.

  Args:
    path: the object of the lock, in a bucket.
    now: the store's own time, in seconds since 1970.

  Raises:
    InUseError: if another process holds it.
  """

  def __init__(self, path: Path, now: float):
    from google.cloud import storage

    bucket, _, self._name = str(path).removeprefix("gs://").partition("/")
    self._bucket = storage.Client().bucket(bucket)
    self._text = f"process {os.getpid()} on {socket.gethostname()}\n{os.urandom(8).hex()}\n"
    self._generation = 0  # that of the object as this process knows it; 0 stands for no object
    self._lost_to = ""
    self._ended = threading.Event()
    if not self._write():
      self._take_over(path, now)
    self._thread = threading.Thread(target=self._renew, name="bucket-lock", daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Raises InUseError if another process has taken the lock over."""
    if self._lost_to:
      raise InUseError(self._lost_to)

  def close(self) -> None:
    """Releases the lock. Idempotent."""
    from google.api_core import exceptions

    if self._ended.is_set():
      return
    self._ended.set()
    self._thread.join()
    if not self._lost_to:
      with contextlib.suppress(exceptions.GoogleAPIError, OSError):  # it was taken over just now, or ends by itself
        self._bucket.blob(self._name).delete(if_generation_match=self._generation)

  def _take_over(self, path: Path, now: float) -> None:
    """Takes the lock of a process that renews it no more."""
    text, written = self._read()
    if text not in ("", self._text) and (left := written + _LEASE_SECONDS - now) > 0:
      user = _holder(text)
      print(
        f"{path.parent} was in use by {user} just now; waiting up to {left:.0f} s for a sign of it", file=sys.stderr
      )
      self._wait_for_sign(time.monotonic() + left)
    if not self._write():
      raise InUseError(_holder(self._read()[0]))

  def _wait_for_sign(self, deadline: float) -> None:
    """Returns once the lock is released or the time is up; raises InUseError if it is written again."""
    seen = self._generation
    while self._generation == seen and (left := deadline - time.monotonic()) > 0:
      time.sleep(min(_RENEW_SECONDS / 4, left))
      text, _ = self._read()
      if self._generation not in (0, seen):
        raise InUseError(_holder(text))

  def _renew(self) -> None:
    while not self._ended.wait(_RENEW_SECONDS):
      try:
        if not self._write() and (text := self._read()[0]) != self._text:  # else its answer got lost
          self._lost_to = _holder(text)
          return
      except Exception:
        continue  # tried again; whether others took the lock over meanwhile, the next write finds out

  def _write(self) -> bool:
    """Writes the lock if its generation is still the one known here; returns whether it was."""
    from google.api_core import exceptions

    blob = self._bucket.blob(self._name)
    try:
      blob.upload_from_string(self._text, if_generation_match=self._generation)
    except exceptions.PreconditionFailed:
      return False
    self._generation = blob.generation
    return True

  def _read(self) -> tuple[str, float]:
    """Returns the text of the lock and when it was written, ("", 0) if it was released, and notes its generation."""
    from google.api_core import exceptions

    while blob := self._bucket.get_blob(self._name):
      try:
        text = blob.download_as_bytes().decode()  # of this generation
      except exceptions.NotFound:
        continue  # written again meanwhile
      self._generation = blob.generation
      return text, blob.updated.timestamp()
    self._generation = 0
    return "", 0.0


def _holder(text: str) -> str:
  """Returns the process that a lock names."""
  return text.partition("\n")[0] or "another process"
