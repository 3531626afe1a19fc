"""The rollout buffer: what may be sampled, what is trained next, and never at a lag above the bound.

With G groups per step, learner version v, and a group stamped at submission with the version u <= v of the weights
the sampler held:

(a) a group is submitted only while `submitted < (max_lag + u + 1) * G`, where `submitted` counts all groups ever
    submitted less the failed ones;
(b) a group's deadline is step u + max_lag. The batch of step v is taken only when those left behind, in order of
    deadline, can still be trained in time: the i-th of them at step v + 1 + i // G.

(b) holds after every step by waiting, (a) keeps new groups from breaking it, and with both no token is ever trained
at a lag above max_lag, while every submitted group is trained: nothing is discarded, however slow. At max_lag = 0
this is synchronous training.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl._monitor import Monitor
from async_rl.rollout._completion_arrays import groups_from_arrays
from async_rl.rollout._completion_arrays import groups_to_arrays
from async_rl.types import Group
from async_rl.types import Prompt


class EndOfData(Exception):
  """No further batch can be formed: the steps are done or the prompts are used up."""


def most_submitted(groups: int, max_lag: int, version: int) -> int:
  """Returns how many groups may be submitted until a sampler has newer weights than this version: (a)."""
  return (max_lag + version + 1) * groups


class RolloutBuffer:
  """Thread-safe buffer between samplers and the learner of one process.

  A sampler calls `try_submit` (or `wait_submit` when it has nothing else to do), completes the group of that
  ticket, and calls `add_group` or `fail_group`. The learner calls `take_batch(v)` for v = 0, 1, 2, ..., after it
  published its weights of version v. A thread that fails calls `close(error)`, which wakes all waiters.

  Args:
    groups_per_step: G, groups trained by one optimizer step; 0 in a process that samples none.
    max_lag: the largest allowed lag of a trained token, in optimizer steps, >= 0.
    steps: optimizer steps of the run, or None for no end.
    limit: the end of the tickets, hence of the prompts, or None for no end. A group that could only be part of an
      incomplete last batch is never started.
    first: the first ticket.
    stride: the distance of the tickets: process i of N deals i, i + N, i + 2N, ...
  """

  def __init__(
    self,
    groups_per_step: int,
    max_lag: int,
    *,
    steps: int | None = None,
    limit: int | None = None,
    first: int = 0,
    stride: int = 1,
  ):
    if groups_per_step < 0:
      raise ValueError(f"*groups_per_step* must be at least 0, got groups_per_step={groups_per_step}.")
    if max_lag < 0:
      raise ValueError(f"*max_lag* must be at least 0, got max_lag={max_lag}.")
    groups = groups_per_step * stride
    if limit is not None and limit < groups:
      raise ValueError(
        f"the prompts of all epochs give {limit} groups, which cannot fill one step of groups={groups}; "
        "raise epochs or lower groups."
      )
    self.groups_per_step = groups_per_step
    self.max_lag = max_lag
    self._steps = steps
    self._limit = limit
    self._monitor = Monitor("the rollout buffer")
    self._first = first
    self._stride = stride
    self._next_ticket = first
    self._returned: list[int] = []  # heap of tickets below the next one that were dealt in vain, to be dealt again
    self._submitted = 0
    self._taken = 0  # batches taken; the next one is for this learner version
    self._learner = 0  # the newest version that the learner is known to have published
    self._stamps: dict[int, int] = {}  # untrained ticket -> version it was submitted at
    self._complete: dict[int, Group] = {}
    self._resubmit: list[int] = []  # heap of restored tickets that no sampler works on
    self._failures: collections.Counter[str] = collections.Counter()

  def try_submit(self, sampler_version: int) -> int | None:
    """Returns the ticket of a group to sample now, or None when the lag bound or the end of the data forbids one.

    Args:
      sampler_version: version of the weights that the caller's sampler holds.

    Raises:
      Closed: if the buffer was closed; or the error that it was closed with.
    """
    with self._monitor:
      self._monitor.check_open()
      return self._submit(sampler_version)

  def wait_submit(self, sampler_version: int, timeout: float | None = None) -> int | None:
    """Waits until a group may be sampled; for a sampler that has nothing else to do.

    Returns:
      A ticket; or None if the learner has newer weights than `sampler_version` (fetch them and ask again), or after
      `timeout` seconds.

    Raises:
      Closed: if the buffer was closed; or the error that it was closed with.
    """

    ticket: int | None = None

    def ready() -> bool:
      nonlocal ticket
      ticket = self._submit(sampler_version)
      return ticket is not None or self._learner > sampler_version

    with self._monitor:
      self._monitor.wait_for(ready, timeout)
      self._monitor.check_open()
      return ticket

  def add_group(self, group: Group) -> None:
    """Hands in a finished group.

    Raises:
      ValueError: if its ticket is not out, or a token is older than the weights it was submitted with.
      Closed: if the buffer was closed; or the error that it was closed with.
    """
    ticket = group.request.ticket
    oldest = min((int(c.versions[c.mask].min()) for c in group.completions if c.mask.any()), default=None)
    with self._monitor:
      self._monitor.check_open()
      self._check_out(ticket)
      if oldest is not None and oldest < self._stamps[ticket]:
        raise ValueError(
          f"group {ticket} has a token of version {oldest}, but was submitted with weights of {self._stamps[ticket]}"
        )
      self._complete[ticket] = group
      self._monitor.notify()

  def fail_group(self, ticket: int, reason: str) -> None:
    """Gives up a group; another one is submitted in its place, and the failure is counted under `reason`."""
    with self._monitor:
      self._monitor.check_open()
      self._check_out(ticket)
      del self._stamps[ticket]
      self._submitted -= 1
      self._failures[reason] += 1
      self._monitor.notify()

  def take_batch(
    self, version: int, timeout: float | None = None, tickets: Collection[int] | None = None
  ) -> list[Group]:
    """Waits for the batch of step `version` and returns its groups, ordered by ticket.

    Args:
      version: learner version, the number of batches taken before.
      timeout: seconds to wait, None for ever.
      tickets: take exactly these groups (to replay a recorded run) instead of the most urgent complete ones.

    Raises:
      EndOfData: if no further batch can be formed.
      TimeoutError: after `timeout` seconds.
      Closed: if the buffer was closed; or the error that it was closed with.
      ValueError: if it is not this version's turn, or training `tickets` now would break the lag bound.
    """
    with self._monitor:
      chosen = self._wait_for_choice(version, timeout, tickets)
      self._taken += 1
      for ticket in chosen:
        del self._stamps[ticket]
      return [self._complete.pop(ticket) for ticket in sorted(chosen)]

  def wait_for_batch(self, version: int, timeout: float | None = None, tickets: Collection[int] | None = None) -> None:
    """Waits until `take_batch` with the same arguments would return at once; takes nothing, raises the same errors."""
    with self._monitor:
      self._wait_for_choice(version, timeout, tickets)

  def close(self, error: BaseException | None = None) -> None:
    """Ends the run and wakes all waiters; `error` is raised in every thread that uses the buffer after it."""
    self._monitor.close(error)

  @property
  def closed(self) -> bool:
    """Returns whether `close` was called."""
    return self._monitor.closed

  def raise_error(self) -> None:
    """Raises the error that the buffer was closed with, if there was one."""
    self._monitor.raise_error()

  def count_groups(self) -> dict[str, int]:
    """Returns the number of groups by state: `submitted` (not the failed), `pending`, `complete`, `trained`, …"""
    with self._monitor:
      return {
        "submitted": self._submitted,
        "pending": len(self._stamps) - len(self._complete),
        "complete": len(self._complete),
        "trained": self._submitted - len(self._stamps),
        "failed": self._failures.total(),
      }

  def count_failures(self) -> dict[str, int]:
    """Returns the number of failed groups by reason."""
    with self._monitor:
      return dict(self._failures)

  def groups(self) -> list[Group]:
    """Returns the complete groups that wait to be trained, ordered by ticket."""
    with self._monitor:
      return [self._complete[ticket] for ticket in sorted(self._complete)]

  def state(self) -> dict[str, Any]:
    """Returns counters, tickets and complete groups as a tree of numpy arrays and numbers, for a checkpoint."""
    with self._monitor:
      complete = sorted(self._complete)
      pending = sorted(self._stamps.keys() - self._complete.keys())
      return {
        "groups_per_step": self.groups_per_step,
        "max_lag": self.max_lag,
        "next_ticket": self._next_ticket,
        "submitted": self._submitted,
        "taken": self._taken,
        "returned": np.asarray(sorted(self._returned), np.int64),
        "failures": dict(self._failures),
        "pending": _table_from_stamps(pending, self._stamps),
        "complete": _table_from_stamps(complete, self._stamps),
        "groups": groups_to_arrays(self._complete[ticket] for ticket in complete),
      }

  def restore(self, state: dict[str, Any], prompts: Sequence[Prompt], in_flight: Iterable[int] = ()) -> None:
    """Continues from `state`, before anything was submitted here.

    Groups that were pending are given out again by `try_submit` under their old tickets and deadlines.

    Args:
      state: what `state` returned.
      prompts: the task's prompts, by id.
      in_flight: pending tickets that the restored sampler is still working on, and so are not given out again.

    Raises:
      ValueError: if the state is of a buffer with another step size or lag bound.
    """
    _check_same("groups_per_step", state["groups_per_step"], self.groups_per_step)
    _check_same("max_lag", state["max_lag"], self.max_lag)
    pending, complete = _stamps_from_table(state["pending"]), _stamps_from_table(state["complete"])
    with self._monitor:
      self._next_ticket = state["next_ticket"]
      self._submitted = state["submitted"]
      self._taken = self._learner = state["taken"]
      self._returned = state["returned"].tolist()
      self._failures = collections.Counter(state["failures"])
      self._stamps = pending | complete
      self._complete = {g.request.ticket: g for g in groups_from_arrays(state["groups"], prompts)}
      self._resubmit = sorted(pending.keys() - set(in_flight))
      self._monitor.notify()

  def redeal(self, states: Sequence[dict[str, Any]]) -> int:
    """Continues from the buffers of another number of processes, before anything was submitted here.

    The groups that they had not trained are forgotten, complete ones too, and their tickets are dealt again, as all
    that follow, by the rule of this number of processes.

    Args:
      states: what `state` returned in each process, in their order.

    Returns:
      The number of complete groups that were forgotten, in all processes together.

    Raises:
      ValueError: if the states are of another step size or lag bound.
    """
    states = [s for s in states if s["groups_per_step"]]
    if self.groups_per_step:
      _check_same("groups", sum(s["groups_per_step"] for s in states), self.groups_per_step * self._stride)
    _check_same("max_lag", states[0]["max_lag"], self.max_lag)
    end = max(s["next_ticket"] for s in states)
    tickets = {ticket for s in states for ticket in range(s["next_ticket"], end, len(states))}
    for table in (s[name]["ticket"] for s in states for name in ("pending", "complete")):
      tickets.update(table.tolist())
    tickets.update(ticket for s in states for ticket in s["returned"].tolist())
    limit = math.inf if self._limit is None else self._limit
    with self._monitor:
      self._next_ticket = end + (self._first - end) % self._stride
      self._returned = sorted(t for t in tickets if t < limit and t % self._stride == self._first)
      self._taken = self._learner = states[0]["taken"]
      self._submitted = self._taken * self.groups_per_step
      if self.groups_per_step and not self._first:
        self._failures = sum((collections.Counter(s["failures"]) for s in states), collections.Counter())
      self._monitor.notify()
    return sum(len(s["complete"]["ticket"]) for s in states)

  # All below: with the lock held.

  def _wait_for_choice(self, version: int, timeout: float | None, tickets: Collection[int] | None) -> list[int]:
    """Returns the tickets of the batch of step `version` as soon as it can be taken; see `take_batch`."""

    def ready() -> list[int] | None:
      if self._taken == self._steps or len(self._stamps) + self._remaining() < self.groups_per_step:
        raise EndOfData(f"the data ended after {self._taken} steps, with {len(self._stamps)} groups left")
      return self._choose() if tickets is None else self._choose_these(tickets)

    if version != self._taken:
      raise ValueError(f"take_batch({version}) out of turn: the next batch is that of version {self._taken}")
    self._learner = version
    self._monitor.notify()
    if not self.groups_per_step:
      self._monitor.check_open()
      return []
    chosen = self._monitor.wait_for(ready, timeout)
    self._monitor.check_open()
    if chosen is None:
      raise TimeoutError(f"no batch for step {version} within {timeout} s: {self._describe()}")
    return chosen

  def _submit(self, sampler_version: int) -> int | None:
    if not 0 <= sampler_version <= self._taken:
      raise ValueError(f"sampler_version={sampler_version}, but the learner has only made versions 0 to {self._taken}")
    if self._resubmit:
      return heapq.heappop(self._resubmit)
    total = self._submitted + self._remaining()
    if self.groups_per_step and total < math.inf:
      total -= total % self.groups_per_step
    if self._submitted >= min(most_submitted(self.groups_per_step, self.max_lag, sampler_version), total):
      return None
    if self._returned:
      ticket = heapq.heappop(self._returned)
    else:
      ticket = self._next_ticket
      self._next_ticket += self._stride
    self._submitted += 1
    self._stamps[ticket] = sampler_version
    return ticket

  def _remaining(self) -> float:
    """Returns the number of groups that could still be submitted if all unfinished ones succeeded."""
    tickets = math.inf
    if self._limit is not None:
      tickets = len(self._returned) + len(range(self._next_ticket, self._limit, self._stride))
    groups = math.inf if self._steps is None else self._steps * self.groups_per_step - self._submitted
    return max(0, min(tickets, groups))

  def _choose(self) -> list[int] | None:
    """Returns the most urgent complete groups if they can be trained now; if these cannot, no other choice can."""
    if len(self._complete) < self.groups_per_step:
      return None
    urgent = heapq.nsmallest(self.groups_per_step, self._complete, key=lambda ticket: (self._stamps[ticket], ticket))
    return urgent if self._in_time_without(urgent) else None

  def _choose_these(self, tickets: Collection[int]) -> list[int] | None:
    if len(set(tickets)) != self.groups_per_step:
      raise ValueError(f"a batch has {self.groups_per_step} groups, got {sorted(tickets)}")
    if not self._complete.keys() >= set(tickets):
      return None
    if not self._in_time_without(tickets):
      raise ValueError(f"training groups {sorted(tickets)} at step {self._taken} breaks max_lag={self.max_lag}")
    return list(tickets)

  def _in_time_without(self, chosen: Collection[int]) -> bool:
    left = sorted(self._stamps[ticket] for ticket in self._stamps.keys() - set(chosen))
    return all(self._taken + 1 + i // self.groups_per_step <= u + self.max_lag for i, u in enumerate(left))

  def _check_out(self, ticket: int) -> None:
    if ticket not in self._stamps or ticket in self._complete or ticket in self._resubmit:
      raise ValueError(f"no group with ticket {ticket} is being sampled")

  def _describe(self) -> str:
    pending = sorted(self._stamps.keys() - self._complete.keys())
    return f"{len(self._complete)} groups complete, {len(pending)} pending (the oldest: {pending[:4]})"


def _check_same(name: str, saved: int, current: int) -> None:
  if saved != current:
    raise ValueError(
      f"the checkpoint was made with {name}={saved}, this run has {name}={current}: resume with the old value"
    )


def _table_from_stamps(tickets: Sequence[int], stamps: dict[int, int]) -> dict[str, np.ndarray]:
  return {
    "ticket": np.asarray(tickets, np.int64),
    "version": np.asarray([stamps[ticket] for ticket in tickets], np.int32),
  }


def _stamps_from_table(table: dict[str, np.ndarray]) -> dict[int, int]:
  return dict(zip(table["ticket"].tolist(), table["version"].tolist(), strict=True))
