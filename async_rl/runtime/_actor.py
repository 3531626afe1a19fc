"""The generation side: from tickets to finished, rewarded groups in the rollout buffer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from async_rl import sampling
from async_rl import tasks
from async_rl.runtime._buffer import Closed
from async_rl.runtime._buffer import RolloutBuffer
from async_rl.runtime._ledger import Ledger
from async_rl.runtime._parts import Parts
from async_rl.runtime._records import completions_from_arrays
from async_rl.runtime._records import completions_to_arrays
from async_rl.runtime._records import drawn_tokens
from async_rl.runtime._schedule import ScheduleRecorder
from async_rl.runtime._weights import WeightStore
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Request

#: Longest wait, in seconds, before an idle actor looks again whether the run goes on.
_PATIENCE = 1.0
#: A run whose rewards fail for this many steps' worth of groups in a row is given up.
_FAILED_STEPS = 4


@dataclasses.dataclass
class _OpenGroup:
  """A group that is not complete: samples that have finished, and their rewards to come."""

  request: Request
  completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
  rewards: dict[int, concurrent.futures.Future] = dataclasses.field(default_factory=dict)


class Actor:
  """Drives one sampler. In the asynchronous mode `run` is the body of a thread; the other modes call the parts.

  Args:
    parts: of the run; the actor owns `parts.engine`.
    buffer: takes finished groups.
    rewards: scores completions.
    ledger: is told of every token drawn.
    recorder: of the schedule.
  """

  def __init__(
    self,
    parts: Parts,
    buffer: RolloutBuffer,
    rewards: tasks.RewardPool,
    ledger: Ledger,
    recorder: ScheduleRecorder,
  ):
    self._parts, self._engine, self._buffer = parts, parts.engine, buffer
    self._rewards, self._ledger, self._recorder = rewards, ledger, recorder
    self._open: dict[int, _OpenGroup] = {}
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
          while self._engine.has_room() and (ticket := self._buffer.try_submit(self.version)) is not None:
            self.submit(ticket)
          busy = self.advance()
        if not busy:
          start = time.monotonic()
          self._rest(store)
          self.rested += time.monotonic() - start
    except Closed:
      pass
    except BaseException as error:
      self._buffer.close(error)

  def _rest(self, store: WeightStore) -> None:
    """Waits for something to do: a reward if any is due, else permission for the next group, else newer weights."""
    due = [future for group in self._open.values() for future in group.rewards.values() if not future.done()]
    if due:
      concurrent.futures.wait(due, timeout=_PATIENCE, return_when=concurrent.futures.FIRST_COMPLETED)
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
    request = self._parts.request(ticket)
    self._open[ticket] = _OpenGroup(request)
    self._engine.submit(request)
    self._recorder.record("submit", ticket)

  def advance(self) -> bool:
    """Decodes one chunk and hands in what is complete; False if the sampler had nothing to do."""
    busy = not self._engine.idle
    if busy:
      before = self._engine.counters.tokens
      completions = self._engine.step()
      self._ledger.generated(self._engine.counters.tokens - before)
      self._recorder.record("chunk")
      for completion in completions:
        self._judge(completion)
    self._hand_in()
    return busy

  def drain(self) -> None:
    """Finishes all groups that were submitted."""
    while self._open:
      if not self.advance():
        self.settle()

  def settle(self) -> None:
    """Waits for the rewards of all finished samples, and hands in what they complete."""
    concurrent.futures.wait([f for group in self._open.values() for f in group.rewards.values()])
    self._hand_in()

  def _judge(self, completion: Completion) -> None:
    group = self._open[completion.ticket]
    group.completions[completion.sample] = completion
    text = self._parts.decode(completion.tokens)
    group.rewards[completion.sample] = self._rewards.submit(group.request.prompt, text, completion.finish)

  def _hand_in(self) -> None:
    size = self._parts.experiment.samples
    ready = [t for t, g in self._open.items() if len(g.rewards) == size and all(f.done() for f in g.rewards.values())]
    for ticket in ready:
      group = self._open.pop(ticket)
      results = [group.rewards[k].result() for k in range(size)]
      failures = sum(result.failed for result in results)
      finished = Group(
        request=group.request,
        completions=tuple(group.completions[k] for k in range(size)),
        rewards=np.array([result.value for result in results], np.float32),
        failures=failures,
      )
      if failures < size:
        self._failed_in_a_row = 0
        self._buffer.put(finished)
      else:
        self._give_up(finished, results[-1].reason)

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
    """Tokens in unfinished samples and unfinished groups."""
    finished = [c for group in self._open.values() for c in group.completions.values()]
    return int(self._engine.snapshot().lengths.sum()) + sum(int(np.count_nonzero(c.mask)) for c in finished)

  def state(self) -> dict[str, Any]:
    """Unfinished samples, and the finished ones of unfinished groups. Call it `paused`."""
    finished = [c for _, group in sorted(self._open.items()) for _, c in sorted(group.completions.items())]
    return {
      "tickets": np.array(sorted(self._open), np.int64),
      "finished": completions_to_arrays(finished),
      "unfinished": self._engine.snapshot()._asdict(),
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Takes up the work of a checkpoint; finished samples are scored again."""
    self._open = {int(ticket): _OpenGroup(self._parts.request(int(ticket))) for ticket in state["tickets"]}
    self._engine.restore(sampling.Snapshot(**state["unfinished"]))
    for completion in completions_from_arrays(state["finished"]):
      self._judge(completion)
