"""The watch of each process of a run over the others: what they leave for one another to read, and signs of life."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any

import jax

from async_rl.runtime._signals import Interrupted
from async_rl.runtime._signals import StopSignal

#: Seconds between two signs of life of a process, and between two looks at those of the others.
BEAT_SECONDS = 2.0
#: Seconds without a sign of life after which a process counts as lost.
LOST_SECONDS = 25.0
#: Seconds that the main thread has to end by itself after another process failed.
_GRACE_SECONDS = 8.0
#: The exit status after the loss of a process: that of an abort, by which JAX itself ends a process that has lost its
#: coordinator. Launchers restart it.
LOST_STATUS = 134
#: What the user does then.
REMEDY = "rerun the same command in all processes to resume"


class HostError(RuntimeError):
  """Another process of the run failed or was lost; the message is one sentence for the user.

  Args:
    message: the sentence.
    status: the exit status for this process.

  Attributes:
    status: the exit status for this process.
  """

  def __init__(self, message: str, status: int = 1):
    super().__init__(message)
    self.status = status


class Watch:
  """Notices from a thread when another process fails, is lost or was asked to end.

  Processes leave short texts at the coordinator, process 0; no program runs on a device for them, so that this works
  while the main thread waits for a program that will never end. If another process has failed, the main thread finds
  out by an error or by `find_cause`; if it does not, the thread ends this process.

  Args:
    stop: the signals of this process: they are passed on to the others, and theirs to it.
  """

  def __init__(self, stop: StopSignal):
    from jax._src import distributed  # JAX has no public name for the store of its coordinator

    self._client: Any = distributed.global_state.client
    self._index, self._count = distributed.global_state.process_id, distributed.global_state.num_processes
    self._stop = stop
    self._cause: HostError | None = None
    self._lost: set[int] = set()
    self._found = threading.Event()
    self._closed = threading.Event()
    self._post("name", socket.gethostname())
    self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
    self._thread.start()

  def announce(self, error: BaseException) -> None:
    """Tells the other processes that this one fails with `error`, unless another one has failed before."""
    if self._cause is None and not isinstance(error, HostError):
      sentence = str(error).strip() or type(error).__name__
      status = error.status if isinstance(error, Interrupted) else 1
      self._post("failure", json.dumps({"sentence": sentence.splitlines()[0], "status": status}))

  def find_cause(self, error: BaseException) -> HostError | None:
    """Returns the failure of another process that explains `error`; waits for it if `error` is of a lost connection."""
    if isinstance(error, HostError):
      return error
    if not isinstance(error, Exception):
      return None
    if _is_of_connection(error):
      self._found.wait(LOST_SECONDS + 3 * BEAT_SECONDS)
    return self._cause

  def wait_for_failure(self) -> HostError:
    """Returns the failure that another process announced."""
    self._found.wait(3 * BEAT_SECONDS)
    return self._cause or HostError("Another process of the run failed; see its log.")

  def close(self, failed: bool) -> None:
    """Ends the thread; after a failure, process 0 waits until the others have heard of it, as they ask it."""
    self._closed.set()
    self._thread.join()
    if failed:
      self._leave()

  def _post(self, topic: str, text: str) -> None:
    """Leaves a text of this process on a topic, in place of its earlier one."""
    self._client.key_value_set(f"async_rl/{topic}/{self._index}", text, allow_overwrite=True)

  def _read(self, topic: str) -> dict[int, str]:
    """Returns the texts on a topic by process, without this one's."""
    found = self._client.key_value_dir_get(f"async_rl/{topic}/")
    texts = {int(name.rsplit("/", 1)[1]): text for name, text in found}
    return {index: text for index, text in sorted(texts.items()) if index != self._index}

  def _run(self) -> None:
    seen: dict[int, tuple[str, float]] = {}
    beat = 0
    while self._cause is None:
      if self._closed.wait(BEAT_SECONDS):
        return
      beat += 1
      try:
        self._cause = self._look(beat, seen)
      except Exception as error:
        reason = str(error).splitlines()[0]
        self._cause = HostError(f"{self._name(0)}, the coordinator, was lost ({reason}); {REMEDY}", LOST_STATUS)
    self._found.set()
    if not self._closed.wait(_GRACE_SECONDS):  # the main thread waits for the process that failed
      print(f"error: {self._cause}", file=sys.stderr, flush=True)
      self._leave()
      os._exit(self._cause.status)

  def _look(self, beat: int, seen: dict[int, tuple[str, float]]) -> HostError | None:
    """Gives a sign of life and looks for those of the others; returns what is wrong with one of them."""
    now = time.monotonic()
    self._post("beat", str(beat))
    if self._stop.number:
      self._post("stop", str(self._stop.number))
    for number in self._read("stop").values():
      self._stop.request(int(number))
    for index, text in self._read("failure").items():
      failure = json.loads(text)
      return HostError(f"{self._name(index)} failed: {failure['sentence']}", failure["status"])
    beats = self._read("beat")
    for index in set(range(self._count)) - {self._index}:
      text = beats.get(index, "")
      if index not in seen or seen[index][0] != text:
        seen[index] = (text, now)
      elif now - seen[index][1] > LOST_SECONDS:
        self._lost.add(index)
        seconds = now - seen[index][1]
        return HostError(f"{self._name(index)} was lost, silent for {seconds:.0f} s; {REMEDY}", LOST_STATUS)
    return None

  def _name(self, index: int) -> str:
    """Returns the name of a process for users."""
    try:
      return f"process {index} on {self._read('name')[index]}"
    except Exception:  # the coordinator is lost
      return f"process {index}"

  def _leave(self) -> None:
    """Tells the coordinator that this process ends; as the coordinator, waits for the others for a while."""
    end = time.monotonic() + _GRACE_SECONDS + 2 * BEAT_SECONDS
    try:
      self._post("left", "")
      others = set(range(1, self._count)) - self._lost
      while self._index == 0 and others - self._read("left").keys() and time.monotonic() < end:
        time.sleep(0.2)
    except Exception:  # the coordinator is lost
      return


def _is_of_connection(error: BaseException | None) -> bool:
  """Returns whether an error, or what caused it, may be of a program or barrier that another process left."""
  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
      return True
    error = error.__cause__ or error.__context__
  return False
