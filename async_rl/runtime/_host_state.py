"""What a checkpoint keeps of each process, beside the training state that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._metrics import NoMetricsWriter
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._prompts import PromptStream
from async_rl.rollout._schedule import ScheduleRecorder


class HostState:
  """The groups of one process on their way to the learner, and what it has recorded so far.

  Args:
    prompts: the training prompts.
    fingerprint: the fingerprint of their data set.
    buffer: the groups on their way from the actor to the learner.
    actor: the sampling side.
    ledger: the ledger of every token drawn in this process.
    recorder: the recorder of the schedule.
    writer: the writer of metrics.

  Attributes:
    assigned: tickets of the batches still to be trained, by step, where one thread samples and learns.
    accuracy: held-out accuracy by version.
    unfinished: tickets of groups that were being sampled when a simulated run was saved, to be submitted again.
  """

  def __init__(
    self,
    prompts: PromptStream,
    fingerprint: str,
    buffer: RolloutBuffer,
    actor: Actor,
    ledger: Ledger,
    recorder: ScheduleRecorder,
    writer: MetricsWriter | NoMetricsWriter,
  ):
    self.assigned: dict[int, list[int]] = {}
    self.accuracy: dict[int, float] = {}
    self.unfinished: list[int] = []
    self._prompts = prompts
    self._fingerprint = fingerprint
    self._buffer = buffer
    self._actor = actor
    self._ledger = ledger
    self._recorder = recorder
    self._writer = writer

  def collect(self) -> dict[str, Any]:
    """Returns all of it as a tree for a checkpoint; the actor must be paused.

    Raises:
      AssertionError: if the ledger misses tokens.
      Exception: what a thread closed the buffer with.
    """
    self._buffer.raise_error()
    self._ledger.check_balance(self._actor.held_tokens() + self._buffered_tokens())
    return {
      "prompts": self._fingerprint,
      "buffer": self._buffer.state(),
      "actor": self._actor.state(),
      "ledger": self._ledger.state(),
      "schedule": self._recorder.flush(),
      "metrics": self._writer.flush(),
      "assigned": {str(step): tickets for step, tickets in self.assigned.items()},
      "accuracy": {str(version): value for version, value in self.accuracy.items()},
    }

  def restore(self, saved: dict[str, Any], *, continue_samples: bool) -> None:
    """Restores what this process saved.

    Args:
      saved: the tree that `collect` returned.
      continue_samples: whether to continue unfinished samples, which may then differ in the last bits from undisturbed
        ones; otherwise their groups become `unfinished`, to be sampled again.
    """
    tickets = saved["actor"]["tickets"].tolist()
    self._buffer.restore(saved["buffer"], self._prompts.prompts, tickets)
    if continue_samples:
      self._actor.restore(saved["actor"])
    else:
      self.unfinished = tickets
    self._ledger.restore(saved["ledger"], self._buffered_tokens() + self._actor.held_tokens())
    self.assigned = {int(step): tickets for step, tickets in saved["assigned"].items()}
    self._restore_accuracy(saved)
    if tickets:
      self._recorder.record("resume")

  def redeal(self, saved: Sequence[dict[str, Any]], *, take_ledgers: bool) -> int:
    """Continues what another number of processes began: the groups that they had not trained are sampled again.

    Args:
      saved: what each of them saved.
      take_ledgers: whether to continue the ledgers of all; exactly one of the new processes must.

    Returns:
      The number of complete groups that waited to be trained.
    """
    forgotten = self._buffer.redeal([host["buffer"] for host in saved])
    if take_ledgers:
      self._ledger.merge([host["ledger"] for host in saved])
    self._restore_accuracy(saved[0])
    self._recorder.record("resume")
    return forgotten

  def _restore_accuracy(self, saved: dict[str, Any]) -> None:
    self.accuracy = {int(version): value for version, value in saved["accuracy"].items()}

  def _buffered_tokens(self) -> int:
    return sum(map(drawn_tokens, self._buffer.groups()))
