"""The generation side: turns tickets into finished, scored groups in the rollout buffer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np

from async_rl import sampling
from async_rl._monitor import Closed
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._conversations import Conversations
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._prompts import PromptStream
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._weight_store import WeightStore
from async_rl.types import NO_VERSION
from async_rl.types import Group

#: Polling interval, in seconds, of an idle actor that waits for permission to submit or for new weights.
_POLL_SECONDS = 1.0
#: Polling interval, in seconds, while tool answers or rewards are pending.
_PENDING_POLL_SECONDS = 0.1
#: The run fails when the rewards of this many steps' worth of groups fail in a row.
_MAX_FAILED_STEPS = 4


class Actor:
  """Drives one sampler. In the asynchronous mode `run` is the body of a thread; the other modes call the other methods.

  Attributes:
    version: the version of the weights that the actor gave the sampler; -1 before the first, whatever weights others
      gave it.
    idle_seconds: the time for which the sampler had nothing to do, in `run`.
    busy_seconds: the time for which the sampler decoded.

  Args:
    sampler: the sampler, which the actor owns.
    conversations: the tracker of the sampler's samples.
    prompts: the stream of training prompts.
    buffer: the buffer that deals tickets and takes finished groups.
    ledger: the ledger of every token drawn.
    recorder: the recorder of the schedule.
  """

  def __init__(
    self,
    sampler: sampling.Sampler,
    conversations: Conversations,
    prompts: PromptStream,
    buffer: RolloutBuffer,
    ledger: Ledger,
    recorder: ScheduleRecorder,
  ):
    self._sampler = sampler
    self.conversations = conversations
    self._prompts = prompts
    self._buffer = buffer
    self._ledger = ledger
    self._recorder = recorder
    self._failed_in_a_row = 0
    self._entered = -1  # the version of which the ledger has the checksum
    self._gate = threading.Lock()
    self._lock = threading.Lock()
    self.version = -1
    self.idle_seconds = 0.0
    self.busy_seconds = 0.0

  def run(self, store: WeightStore) -> None:
    """Samples until the buffer is closed; an error closes the buffer with it, and so ends the run."""
    try:
      while True:
        with self.paused():
          self.set_weights(*store.latest())
          self.resume_answered()
          while self._sampler.has_room() and (ticket := self._buffer.try_submit(self.version)) is not None:
            self.submit(ticket)
          busy = self.decode_chunk()
        if not busy:
          start = time.monotonic()
          self._wait_for_work(store)
          self.idle_seconds += time.monotonic() - start
    except Closed as closed:
      if not self._buffer.closed:  # another part of the run was closed too early
        self._buffer.close(closed)
    except BaseException as error:
      self._buffer.close(error)

  def _wait_for_work(self, store: WeightStore) -> None:
    """Waits for an answer or a reward if any is pending, else for permission to submit, else for new weights."""
    if pending := self.conversations.pending():
      wait = concurrent.futures.wait
      wait(pending, timeout=_PENDING_POLL_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED)
    elif (ticket := self._buffer.wait_submit(self.version, timeout=_POLL_SECONDS)) is not None:
      with self.paused():
        self.submit(ticket)
    else:
      store.latest(at_least=self.version + 1, timeout=_POLL_SECONDS)

  def set_weights(self, version: int, params: Any) -> None:
    """Gives the sampler these weights, unless it has them."""
    if version != self.version:
      self._sampler.set_weights(params, version)
      self.version = version
      self._recorder.record("weights", version)

  def submit(self, ticket: int) -> None:
    """Submits the group with this ticket to the sampler."""
    self.conversations.submit(self._prompts.request(ticket))
    self._recorder.record("submit", ticket)

  def resume_answered(self, only: tuple[int, int] | None = None, wait: bool = False) -> None:
    """Resumes samples that the task has answered; see `Conversations.resume_answered`."""
    for ticket, sample in self.conversations.resume_answered(only, wait):
      self._recorder.record("answer", ticket, sample)

  def decode_chunk(self) -> bool:
    """Decodes one chunk and puts complete groups into the buffer; returns False if the sampler had nothing to do."""
    busy = not self._sampler.idle
    if busy:
      before = self._sampler.counters.tokens
      start = time.monotonic()
      completions = self._sampler.step()
      self.busy_seconds += time.monotonic() - start
      self._ledger.add_generated(self._sampler.counters.tokens - before)
      if self._entered != self.version:  # its checksum was computed before the chunk
        self._ledger.add_weights(self.version, self._sampler.checksum)
        self._entered = self.version
      self._recorder.record("chunk")
      for completion in completions:
        self.conversations.process_completion(completion)
    self._put_complete_groups()
    return busy

  def finish_groups(self, between_chunks: Callable[[], None] | None = None) -> None:
    """Finishes all groups that were submitted; calls `between_chunks` before each chunk, whose error ends the work."""
    while self.conversations:
      if between_chunks is not None:
        between_chunks()
      self.resume_answered(wait=True)  # wait, rather than poll, so that runs are reproducible
      if not self.decode_chunk():
        self.wait_for_rewards()

  def wait_for_rewards(self) -> None:
    """Waits for the rewards of all samples that have ended, and puts the groups they complete into the buffer."""
    self.conversations.wait_for_rewards()
    self._put_complete_groups()

  def _put_complete_groups(self) -> None:
    for group in self.conversations.pop_complete():
      failed = tuple(k for k, result in enumerate(group.results) if result.failed)
      finished = Group(
        request=group.request,
        completions=group.completions,
        rewards=np.array([result.value for result in group.results], np.float32),
        failed=failed,
      )
      if len(failed) < len(group.results):
        self._failed_in_a_row = 0
        self._buffer.add_group(finished)
      else:
        self._replace_failed_group(finished, group.results[-1].reason)

  def _replace_failed_group(self, group: Group, reason: str) -> None:
    """Replaces a group whose rewards are all stand-ins, since nothing can be learned from it."""
    self._failed_in_a_row += 1
    limit = _MAX_FAILED_STEPS * self._buffer.groups_per_step
    if self._failed_in_a_row >= limit:
      raise RuntimeError(f"The rewards of {limit} groups in a row failed, the last ones: {reason}.")
    self._buffer.fail_group(group.request.ticket, "reward")
    self._ledger.close_failed(drawn_tokens(group), "reward")

  # Checkpoints.

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Holds the actor between two chunks.

    The actor itself samples within `paused` too. Locks are not fair: an actor that is never idle could take the lock
    again many times before another thread gets it. Every thread therefore acquires the gate before the lock, so a
    waiting thread is next in line.
    """
    with self._gate:
      self._lock.acquire()
    try:
      yield
    finally:
      self._lock.release()

  def held_tokens(self) -> int:
    """Returns the number of drawn tokens in unfinished samples and unfinished groups."""
    unfinished = int(np.count_nonzero(self._sampler.snapshot().versions != NO_VERSION))
    return unfinished + sum(int(np.count_nonzero(c.mask)) for c in self.conversations.held())

  def state(self) -> dict[str, Any]:
    """Returns the unfinished samples, and the finished ones of unfinished groups. Call it `paused`."""
    return {**self.conversations.state(), "unfinished": self._sampler.snapshot()._asdict()}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues the work of a checkpoint; finished samples are scored again."""
    self._sampler.restore(sampling.Snapshot(**state["unfinished"]))
    self.conversations.restore(state, self._prompts)
