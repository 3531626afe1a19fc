"""The generation side: from tickets to finished, rewarded groups in the rollout buffer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from async_rl import sampling
from async_rl import tasks
from async_rl._monitor import Closed
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._weight_store import WeightStore
from async_rl.runtime._conversations import Conversations
from async_rl.runtime._parts import Parts
from async_rl.types import NO_VERSION
from async_rl.types import Group

#: Longest wait, in seconds, before an idle actor looks again whether the run goes on.
_PATIENCE = 1.0
#: The same while an answer or a reward is due, which may be long in coming.
_GLANCE = 0.1
#: A run whose rewards fail for this many steps' worth of groups in a row is given up.
_FAILED_STEPS = 4


class Actor:
  """Drives one sampler. In the asynchronous mode `run` is the body of a thread; the other modes call the parts.

  Args:
    parts: of the run; the actor owns `parts.engine`.
    buffer: takes finished groups.
    rewards: asks the task for rewards and for the answers of its tool.
    ledger: is told of every token drawn.
    recorder: of the schedule.
    scorer: gives the rewards in the place of the task.
  """

  def __init__(
    self,
    parts: Parts,
    buffer: RolloutBuffer,
    rewards: tasks.RewardPool,
    ledger: Ledger,
    recorder: ScheduleRecorder,
    scorer: tasks.Scorer | None = None,
  ):
    self._parts, self._engine, self._buffer = parts, parts.engine, buffer
    self._ledger, self._recorder = ledger, recorder
    self.conversations = Conversations(parts, parts.engine, rewards, parts.experiment.samples, scorer)
    self._failed_in_a_row = 0
    self._lock, self._gate = threading.Lock(), threading.Lock()
    #: Version of the weights that the actor gave the sampler, -1 before the first; others may have used it before.
    self.version = -1
    #: Seconds for which the sampler had nothing to do, in `run`.
    self.rested = 0.0

  def run(self, store: WeightStore) -> None:
    """Samples until the buffer is closed; an error closes the buffer with it, and so ends the run."""
    try:
      while True:
        with self.paused():
          self.set_weights(*store.latest())
          self.take_up()
          while self._engine.has_room() and (ticket := self._buffer.try_submit(self.version)) is not None:
            self.submit(ticket)
          busy = self.advance()
        if not busy:
          start = time.monotonic()
          self._rest(store)
          self.rested += time.monotonic() - start
    except Closed as closed:
      if not self._buffer.closed:  # another part of the run was closed too early
        self._buffer.close(closed)
    except BaseException as error:
      self._buffer.close(error)

  def _rest(self, store: WeightStore) -> None:
    """Waits for something to do: an answer or a reward if any is due, else permission for a group, else new weights."""
    if due := self.conversations.due():
      concurrent.futures.wait(due, timeout=_GLANCE, return_when=concurrent.futures.FIRST_COMPLETED)
    elif (ticket := self._buffer.wait_submit(self.version, timeout=_PATIENCE)) is not None:
      with self.paused():
        self.submit(ticket)
    else:
      store.latest(at_least=self.version + 1, timeout=_PATIENCE)

  def set_weights(self, version: int, params: Any) -> None:
    """Swaps the sampler's weights if these are others than it has."""
    if version != self.version:
      self._engine.set_weights(params, version)
      self.version = version
      self._recorder.record("weights", version)

  def submit(self, ticket: int) -> None:
    """Hands the group with this ticket to the sampler."""
    self.conversations.submit(self._parts.request(ticket))
    self._recorder.record("submit", ticket)

  def take_up(self, which: tuple[int, int] | None = None, wait: bool = False) -> None:
    """Goes on with samples that the task has answered; see `Conversations.take_up`."""
    for ticket, sample in self.conversations.take_up(which, wait):
      self._recorder.record("answer", ticket, sample)

  def advance(self) -> bool:
    """Decodes one chunk and hands in what is complete; False if the sampler had nothing to do."""
    busy = not self._engine.idle
    if busy:
      before = self._engine.counters.tokens
      completions = self._engine.step()
      self._ledger.generated(self._engine.counters.tokens - before)
      self._recorder.record("chunk")
      for completion in completions:
        self.conversations.judge(completion)
    self._hand_in()
    return busy

  def drain(self) -> None:
    """Finishes all groups that were submitted."""
    while self.conversations:
      self.take_up(wait=True)  # not when it happens to come, so that a run can be repeated
      if not self.advance():
        self.settle()

  def settle(self) -> None:
    """Waits for the rewards of all samples that have ended, and hands in what they complete."""
    self.conversations.settle()
    self._hand_in()

  def _hand_in(self) -> None:
    for group in self.conversations.finished():
      failures = sum(result.failed for result in group.results)
      finished = Group(
        request=group.request,
        completions=group.completions,
        rewards=np.array([result.value for result in group.results], np.float32),
        failures=failures,
      )
      if failures < len(group.results):
        self._failed_in_a_row = 0
        self._buffer.put(finished)
      else:
        self._give_up(finished, group.results[-1].reason)

  def _give_up(self, group: Group, reason: str) -> None:
    """Replaces a group whose rewards are all stand-ins: nothing can be learned from it."""
    self._failed_in_a_row += 1
    limit = _FAILED_STEPS * self._parts.experiment.groups
    if self._failed_in_a_row >= limit:
      raise RuntimeError(f"The rewards of {limit} groups in a row failed, the last ones: {reason}.")
    self._buffer.fail(group.request.ticket, "reward")
    self._ledger.failed(drawn_tokens(group), "reward")

  # Checkpoints.

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Holds the actor between two chunks; it takes its own turns with this too.

    Locks are not fair: an actor that is never idle might take its own again many times before anybody else can.
    Whoever waits for it holds the gate, which everybody passes first.
    """
    with self._gate:
      self._lock.acquire()
    try:
      yield
    finally:
      self._lock.release()

  def held_tokens(self) -> int:
    """Drawn tokens in unfinished samples and unfinished groups."""
    unfinished = int(np.count_nonzero(self._engine.snapshot().versions != NO_VERSION))
    return unfinished + sum(int(np.count_nonzero(c.mask)) for c in self.conversations.held())

  def state(self) -> dict[str, Any]:
    """Unfinished samples, and the finished ones of unfinished groups. Call it `paused`."""
    return {**self.conversations.state(), "unfinished": self._engine.snapshot()._asdict()}

  def restore(self, state: dict[str, Any]) -> None:
    """Takes up the work of a checkpoint; finished samples are scored again."""
    self._engine.restore(sampling.Snapshot(**state["unfinished"]))
    self.conversations.restore(state)
