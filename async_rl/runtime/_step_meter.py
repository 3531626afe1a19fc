"""Host metrics of a step: times, rates and queues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from async_rl import sampling
from async_rl import tasks
from async_rl.recording._metrics import staleness_histogram
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._weight_store import WeightStore
from async_rl.types import Group


class StepMeter:
  """Turns running totals into the metrics of one step.

  Args:
    sampler: the sampler of training samples.
    buffer: the buffer of their groups.
    store: the store of the weights.
    actor: the driver of the sampler.
    scorer: the scorer of training samples.
  """

  def __init__(
    self,
    sampler: sampling.Sampler,
    buffer: RolloutBuffer,
    store: WeightStore,
    actor: Actor,
    scorer: tasks.Scorer,
  ):
    self._sampler = sampler
    self._buffer = buffer
    self._store = store
    self._actor = actor
    self._scorer = scorer
    self._busy_until = 0.0  # when the last evaluation or checkpoint ended
    self._idle = 0.0
    self.start()

  def start(self) -> None:
    """Starts measuring."""
    self._last = self._totals()

  def begin_step(self) -> None:
    """Notes that the learner has a batch: it was idle since it had computed the last step and finished other work."""
    self._idle = max(0.0, time.monotonic() - max(self._store.ready_at, self._busy_until))

  def end_step(self) -> None:
    """Notes that the learner has evaluated and saved if that was due."""
    self._busy_until = time.monotonic()

  def metrics(self, groups: Sequence[Group], version: int, drawn: int) -> dict[str, Any]:
    """Returns the metrics accumulated since the last call.

    Args:
      groups: the groups that were trained.
      version: the version of the weights they were trained on.
      drawn: the number of their tokens that a policy drew.
    """
    now = self._totals()
    change = {name: value - self._last[name] for name, value in now.items()}
    self._last = now
    seconds = max(change["time"], 1e-9)
    counts = self._buffer.counts()
    return {
      "staleness/histogram": staleness_histogram(groups, version, self._buffer.max_lag),
      "time/step": seconds,
      "time/weight_push": self._store.push_seconds,
      "bytes/weight_push": self._store.push_bytes,
      "idle/learner": min(1.0, self._idle / seconds),
      "idle/generator": min(1.0, change["generator_idle"] / seconds),
      "throughput/generated": change["generated"] / seconds,
      "throughput/trained": drawn / seconds,
      "sampler/occupancy": change["generated"] / max(change["slot_steps"], 1.0),
      "queue/pending": counts["pending"],
      "queue/complete": counts["complete"],
      "reward/failures": sum(self._scorer.failures.values()),
      "groups/failed": counts["failed"],
      **self._actor.conversations.metrics(groups),
    }

  def _totals(self) -> dict[str, float]:
    counters = self._sampler.counters
    return {
      "time": time.monotonic(),
      "generated": float(counters.tokens),
      "slot_steps": float(counters.slot_steps),
      "generator_idle": self._actor.idle_seconds,
    }
