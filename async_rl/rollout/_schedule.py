"""The schedule of an asynchronous run, and the lags of a simulated one.

A schedule is a list of events, recorded where they take effect::

    ("weights", v)             the sampler took weights of version v
    ("submit", ticket)         the sampler was given a group
    ("answer", ticket, sample) the task answered a sample, which went on or ended
    ("chunk",)                 the sampler decoded a chunk of tokens
    ("train", v, [tickets])    the learner trained these groups at version v
    ("resume",)                a checkpoint was resumed; unfinished work was computed again

Replaying them one by one gives the same tokens and the same updates, on one thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from async_rl._buckets import Mirror
from async_rl._paths import as_path
from async_rl._paths import open_text
from async_rl._validation import check_choice
from async_rl._validation import check_number
from async_rl.rollout._buffer import most_submitted

Event = tuple[Any, ...]

#: Distributions of simulated lag.
LAG_KINDS = ("fixed", "uniform", "heavy", "rounds")
#: The types of an event's details, by its kind.
_DETAILS: Mapping[str, tuple[type, ...]] = {
  "weights": (int,),
  "submit": (int,),
  "answer": (int, int),
  "chunk": (),
  "train": (int, list),
  "resume": (),
}
#: Events that wait in memory before they are written.
_BUFFERED = 256


class ScheduleRecorder:
  """Appends events to a file of JSON lines; thread-safe.

  Args:
    path: the file, on a disk or in a bucket; created if missing.
    position: the number of events to keep of an earlier run: the `position` at the resumed checkpoint. Later events,
      whose effects the checkpoint does not have, are cut off.
    check: a function that raises if this process must not write to the file's bucket any more.

  Attributes:
    damaged: one sentence if the file lacked some of the events to keep. The run goes on, but cannot be replayed.
  """

  def __init__(self, path: str | os.PathLike[str], position: int = 0, check: Callable[[], None] | None = None):
    self._lock = threading.Lock()
    self._pending: list[str] = []
    self._mirror = Mirror(as_path(path), check)
    local = self._mirror.local
    lines = []
    if position and local.exists():
      with local.open("rb") as earlier:
        lines = [line for line in itertools.islice(earlier, position) if line.endswith(b"\n")]
    self._position = len(lines)
    self.damaged: list[str] = []
    self._file = local.open("ab")
    self._file.truncate(sum(map(len, lines)))
    if len(lines) < position:
      self.damaged.append(
        f"{path} has {len(lines)} of the {position} events before the checkpoint, so the run cannot be replayed"
      )
      self.record("resume")

  def record(self, kind: str, *details: Any) -> None:
    """Adds an event."""
    with self._lock:
      self._pending.append(json.dumps([kind, *details]))
      self._position += 1
      if len(self._pending) >= _BUFFERED:
        self._write()

  def flush(self) -> int:
    """Writes out all events, to a bucket too, and returns their number: the `position` to resume from."""
    with self._lock:
      self._write()
      self._file.flush()
      self._mirror.upload()
      return self._position

  def close(self) -> None:
    """Writes out all events and closes the file."""
    try:
      self.flush()
    finally:
      self._file.close()
      self._mirror.discard()

  def _write(self) -> None:
    self._file.write("".join(f"{line}\n" for line in self._pending).encode())
    self._pending.clear()


def read_schedule(path: str | os.PathLike[str]) -> Iterator[Event]:
  """Yields the events of a recorded schedule.

  Raises:
    ValueError: at a line that is not an event; the message gives its number.
  """
  with open_text(as_path(path)) as lines:
    for number, line in enumerate(lines, start=1):
      event = _parse_event(line)
      if event is None:
        raise ValueError(
          f"{path}, line {number}: {line[:80]!r} is not an event of a schedule; give the schedule.jsonl of a run."
        )
      yield event


def read_replayable(path: str | os.PathLike[str], groups: int, max_lag: int, steps: int) -> list[Event]:
  """Returns the events of a recorded schedule, if a run of these options could repeat them.

  What only samples can tell, such as whether a group is finished in time, is left to the replay.

  Args:
    path: the file.
    groups: groups per optimizer step in this process.
    max_lag: the largest lag of a trained token, in optimizer steps.
    steps: optimizer steps of the run; later events are not looked at.

  Raises:
    ValueError: if it could not, or a line is not an event; one sentence with the remedy.
  """
  events = list(read_schedule(path))
  batches = [event[2] for event in events if event[0] == "train"][:steps]
  if not batches:
    raise ValueError(f"{path} trains no step; give the schedule.jsonl of a run that took some.")
  for step, tickets in enumerate(batches):
    if len(set(tickets)) != groups:
      raise ValueError(
        f"{path} trains {len(tickets)} groups at step {step}, got groups={groups} in this process; replay it with as "
        "many groups and processes as it was recorded with."
      )
  _check_begun(path, events, groups, max_lag, steps)
  return events


def _check_begun(path: str | os.PathLike[str], events: list[Event], groups: int, max_lag: int, steps: int) -> None:
  """Refuses events of a run that began groups when one of these options may not; see `read_replayable`."""
  trained = {ticket for event in events if event[0] == "train" for ticket in event[2]}
  step = version = submitted = 0
  begun: dict[int, int] = {}  # ticket -> version of the weights that began it
  for kind, *details in events:
    lag = 0
    match kind:
      case "resume":
        raise ValueError(f"{path} is of a run that was resumed with samples in flight; replay one that was not.")
      case "weights":
        version = details[0]
      case "submit":
        begun[details[0]] = version
        submitted += details[0] in trained  # the others failed and did not count
      case "train":
        lag = max((step - begun.get(ticket, step) for ticket in details[1]), default=0)
        step += 1
    if lag > max_lag or submitted > min(most_submitted(groups, max_lag, version), steps * groups):
      raise ValueError(
        f"{path} begins groups earlier than a run with max_lag={max_lag} and steps={steps} may; replay it with the "
        "max_lag and the steps that it was recorded with."
      )
    if step == steps:
      return


def _parse_event(line: str) -> Event | None:
  """Returns the event of a line, or None if it is not one."""
  try:
    kind, *details = json.loads(line)
    holds = tuple(map(type, details)) == _DETAILS[kind]
  except (ValueError, TypeError, KeyError):
    return None
  tickets = details[1] if kind == "train" and holds else []
  return (kind, *details) if holds and all(type(ticket) is int for ticket in tickets) else None


@dataclasses.dataclass(frozen=True)
class LagDistribution:
  """The lag of each step of a simulated run: a pure function of seed and step, so it needs no state to resume.

  Attributes:
    max_lag: the largest lag, >= 0.
    kind: "fixed": always max_lag. "uniform": 0 to max_lag, equally likely. "heavy": P(lag >= n) = (1 + n)^-tail,
      cut off at max_lag: mostly fresh, sometimes very old. "rounds": 0, 1, ..., max_lag and again, because
      max_lag + 1 batches are sampled at a time (the off-policyness N = max_lag + 1 of Asynchronous RLHF).
    seed: the seed of the random kinds.
    tail: the exponent of "heavy"; smaller is heavier.
  """

  max_lag: int
  kind: str = "fixed"
  seed: int = 0
  tail: float = 1.0

  def __post_init__(self):
    check_number("max_lag", self.max_lag, whole=True, at_least=0)
    check_choice("kind", self.kind, LAG_KINDS)
    check_number("tail", self.tail, above=0, finite=False)

  def lag(self, step: int) -> int:
    """Returns the intended lag of `step` (it is less at the very start, where nothing so old exists)."""
    if self.kind == "fixed":
      return self.max_lag
    if self.kind == "rounds":
      return step % (self.max_lag + 1)
    uniform = np.random.Generator(np.random.Philox(key=self.seed, counter=step)).random()
    if self.kind == "uniform":
      return int(uniform * (self.max_lag + 1))
    return int(min(self.max_lag, math.floor((1 - uniform) ** (-1 / self.tail) - 1)))

  def source_version(self, step: int) -> int:
    """Returns the version of the weights that sample the batch of `step`."""
    return max(0, step - self.lag(step))

  def steps_due(self, version: int) -> list[int]:
    """Returns the steps, from `version` on and in order, whose batches are sampled by `version` or were before it."""
    return [step for step in range(version, version + self.max_lag + 1) if self.source_version(step) <= version]
