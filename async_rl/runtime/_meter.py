"""What a step costs on the host: times, rates and queues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from async_rl import tasks
from async_rl.recording._metrics import staleness_histogram
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._weight_store import WeightStore
from async_rl.runtime._parts import Parts
from async_rl.types import Group


class StepMeter:
  """Turns running totals into metrics of one step.

  Args:
    parts: of the run.
    buffer: of its groups.
    store: of its weights.
    actor: its sampling.
    scorer: gives the rewards of training samples.
  """

  def __init__(self, parts: Parts, buffer: RolloutBuffer, store: WeightStore, actor: Actor, scorer: tasks.Scorer):
    self._parts, self._buffer, self._store, self._actor, self._scorer = parts, buffer, store, actor, scorer
    self._busy_until = 0.0  # when the last evaluation or checkpoint ended
    self._idle = 0.0
    self.start()

  def start(self) -> None:
    """Counts from here on."""
    self._last = self._totals()

  def begin_step(self) -> None:
    """The learner has a batch: it was idle since the step before was computed, and what else it did was done."""
    self._idle = max(0.0, time.monotonic() - max(self._store.ready_at, self._busy_until))

  def end_step(self) -> None:
    """The learner has evaluated and saved what was due."""
    self._busy_until = time.monotonic()

  def metrics(self, groups: Sequence[Group], version: int, drawn: int) -> dict[str, Any]:
    """Of the time since the last call.

    Args:
      groups: that were trained.
      version: of the weights they were trained on.
      drawn: tokens of theirs that a policy drew.
    """
    now = self._totals()
    change = {name: value - self._last[name] for name, value in now.items()}
    self._last = now
    seconds = max(change["time"], 1e-9)
    counts = self._buffer.counts()
    return {
      "staleness/histogram": staleness_histogram(groups, version, self._parts.experiment.lag_bound),
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
    counters = self._parts.engine.counters
    return {
      "time": time.monotonic(),
      "generated": float(counters.tokens),
      "slot_steps": float(counters.slot_steps),
      "generator_idle": self._actor.idle_seconds,
    }
