"""The log of a run's steps: their metrics, the end of their tokens in the ledger, and what the user must be told."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl import tasks
from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._metrics import MetricsBuffer
from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._metrics import NoMetricsWriter
from async_rl.recording._progress import Progress
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._completion_arrays import failed_tokens
from async_rl.rollout._ledger import Ledger
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._roles import Roles
from async_rl.runtime._roles import from_first
from async_rl.types import Group

#: The run ends when this many steps in a row were skipped.
_MAX_SKIPPED_STEPS = 5


class Diverged(RuntimeError):
  """Gradients stay non-finite; the message is for the user."""


class StepLog:
  """Writes the metrics of a step when the next one is at hand, since they are surely computed then.

  Args:
    hosts: the processes of the run; the ledger of each closes the tokens that it sampled.
    roles: their roles; those that do not learn are told the learner's metrics.
    writer: the writer of metrics.
    progress: the display of progress.
    ledger: the ledger of every token drawn in this process.
    scorers: the scorers whose failures the user must be told of.
    checkpoints: the checkpoints of the run.
  """

  def __init__(
    self,
    hosts: Hosts,
    roles: Roles,
    writer: MetricsWriter | NoMetricsWriter,
    progress: Progress,
    ledger: Ledger,
    scorers: Sequence[tasks.Scorer],
    checkpoints: Checkpointer,
  ):
    self._hosts = hosts
    self._roles = roles
    self._writer = writer
    self._progress = progress
    self._ledger = ledger
    self._scorers = scorers
    self._checkpoints = checkpoints
    self._unwritten = MetricsBuffer()
    self._skipped_in_a_row = 0

  def push(self, step: int, groups: Sequence[Group], *metrics: Mapping[str, Any]) -> None:
    """Queues the metrics of `step`, which trained `groups`, and writes those of the step before."""
    processes = range(self._hosts.count)
    by_process = [[g for g in groups if self._roles.sampler_of(g.request.ticket) == i] for i in processes]
    counts = {
      "ledger/drawn": np.array([sum(map(drawn_tokens, share)) for share in by_process]),
      "ledger/failed": np.array([sum(map(failed_tokens, share)) for share in by_process]),
    }
    self._write(self._unwritten.push(step, *metrics, counts))

  def flush(self) -> None:
    """Writes what is queued."""
    self._write(self._unwritten.flush())

  def warn_of_failures(self) -> None:
    """Shows the first reason of each kind of failure of rewards and tools, once."""
    for scorer in self._scorers:
      for reason in scorer.first_reasons:
        self._progress.warn(f"failed {reason}; such samples are not trained, see reward/failures and tools/failures")

  def _write(self, finished: tuple[int, dict[str, Any]] | None) -> None:
    if finished is None:
      return
    step, values = finished
    if self._roles.apart:
      numbers = {name: value for name, value in values.items() if isinstance(value, float)}
      values |= from_first(self._hosts, numbers)
    drawn = values.pop("ledger/drawn")
    failed = values.pop("ledger/failed")
    self._close_tokens(drawn, failed, int(values["tokens/trained"]))
    self.warn_of_failures()
    self._writer.write(step, values)
    self._progress.update(step, values)
    self._check_skipped(step, values)

  def _close_tokens(self, drawn: np.ndarray, failed: np.ndarray, trained: int) -> None:
    """Closes this process's tokens of a batch.

    Args:
      drawn: the tokens of the batch that each process drew.
      failed: those of them whose reward failed.
      trained: the tokens that counted in the loss. Their number is known for the batch alone: the others, which the
        loss rejected, are dealt to the processes in proportion to their tokens.
    """
    index, candidates = self._hosts.index, drawn - failed
    rejected = _share(int(candidates.sum()) - trained, candidates, index)
    masked = {"failed": int(failed[index]), "rejected": rejected}
    own = int(candidates[index]) - rejected
    self._ledger.close_trained(own, {reason: count for reason, count in masked.items() if count})

  def _check_skipped(self, step: int, values: dict[str, float]) -> None:
    """Tells of a step that was skipped; raises `Diverged` after a number of them in a row."""
    if not values["update/skipped"]:
      self._skipped_in_a_row = 0
      return
    cause = f"its loss is {values['loss']:.3g} and its gradient's norm {values['grad/norm']:.3g}"
    self._progress.note(f"step {step} was skipped: {cause}; see the metric update/skipped")
    self._skipped_in_a_row += 1
    if self._skipped_in_a_row == _MAX_SKIPPED_STEPS:
      raise Diverged(
        f"Step {step} is the {_MAX_SKIPPED_STEPS}th in a row that was skipped, since {cause}. The last checkpoint, of "
        f"step {self._checkpoints.latest_step} in {self._checkpoints.folder}, is good. Lower the learning rate or "
        "check the rewards."
      )


def _share(total: int, parts: np.ndarray, index: int) -> int:
  """Returns the share of part `index` in `total`, in proportion to the parts; the shares add up to the total."""
  ends = np.concatenate([[0], np.cumsum(parts)])
  bounds = total * ends // max(int(ends[-1]), 1)
  return int(bounds[index + 1] - bounds[index])
