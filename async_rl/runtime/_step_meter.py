"""Host metrics of a step: times, rates and queues."""

from __future__ import annotations

import contextlib
import math
import time
import types
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl import sampling
from async_rl import tasks
from async_rl.recording._metrics import staleness_histogram
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._weight_store import WeightStore
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._roles import Roles
from async_rl.types import Group

#: The host metrics of a step: what each one is. Times are seconds of the interval from the learner's start on the
#: previous batch to its start on this one. In `async` mode generation goes on beside the other parts, so they overlap;
#: in the other modes waiting is for the generation.
METRICS: Mapping[str, str] = types.MappingProxyType(
  {
    "time/step": "The length of the interval.",
    "time/generation": "The time for which the sampler decoded.",
    "time/waiting": "The time for which the learner had nothing to do.",
    "time/learning": "The time from the start of the previous step until its weights were computed.",
    "time/weight_push": "The time of the last push of weights, from ready on the learner to ready on the sampler.",
    "time/evaluation": "The time of evaluations.",
    "time/checkpoint": "The time for which the learner waited for checkpoints to start.",
    "idle/learner": "`time/waiting` as a share of the interval.",
    "idle/generator": "The share of the interval for which the sampler had nothing to do; only in `async` mode.",
    "bytes/weight_push": "The size of the last push of weights.",
    "throughput/generated": "Tokens drawn per second of the interval.",
    "throughput/trained": "Tokens of the batch that a policy drew, per second of the interval.",
    "sampler/occupancy": "The share of the sampler's slots that drew a token, over the decode steps.",
    "queue/pending": "Groups that are being sampled or scored.",
    "queue/complete": "Groups that wait to be trained.",
    "staleness/histogram": "Tokens of the batch by lag.",
    "reward/failures": "Rewards and tool calls that failed so far.",
    "groups/failed": "Groups that failed so far.",
    "selection/length_trained": "The mean number of drawn tokens of the samples trained at this step.",
    "selection/length_sampled": "The same of all samples that were available: those of the batch, trained or failed, "
    "and those that wait.",
    "selection/reward_trained": "The mean reward of the samples trained at this step; the lower, the harder.",
    "selection/reward_sampled": "The same of all samples that were available and whose reward did not fail.",
  }
)


#: The metrics that are added up over the processes of a run. Of the others, unless they are in `AVERAGED`, the first
#: process's are written.
SUMMED = (
  "throughput/generated",
  "queue/pending",
  "queue/complete",
  "reward/failures",
  "groups/failed",
  "tools/failures",
)
#: The metrics of which the mean over the processes that sample is written.
AVERAGED = (
  "time/generation",
  "time/weight_push",
  "bytes/weight_push",
  "idle/generator",
  "sampler/occupancy",
  "selection/length_sampled",
  "selection/reward_sampled",
)


class StepMeter:
  """Turns running totals into the metrics of one step, which `METRICS` defines.

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
    self._began = math.inf  # when the learner got its last batch
    self._idle = 0.0
    self._learning = 0.0
    self._spent: dict[str, float] = {}
    self.start()

  def start(self) -> None:
    """Starts measuring."""
    self._last = self._now = self._totals()

  def begin_step(self) -> None:
    """Notes that the learner has a batch: it was idle since it had computed the last step and finished other work."""
    now, ready_at = time.monotonic(), self._store.ready_at
    self._idle = max(0.0, now - max(ready_at, self._busy_until))
    self._learning = max(0.0, min(ready_at, now) - self._began)
    self._began = now
    self._now = self._totals()

  @contextlib.contextmanager
  def timing(self, part: str) -> Iterator[None]:
    """Adds the time inside of the context to `time/{part}` of the next step."""
    start = time.monotonic()
    try:
      yield
    finally:
      self._spent[part] = self._spent.get(part, 0.0) + time.monotonic() - start

  def end_step(self) -> None:
    """Notes that the learner has evaluated and saved if that was due."""
    self._busy_until = time.monotonic()

  def metrics(self, groups: Sequence[Group], version: int, drawn: int) -> dict[str, Any]:
    """Returns the metrics of the interval that ended when the learner got its batch.

    Args:
      groups: the groups that were trained.
      version: the version of the weights they were trained on.
      drawn: the number of their tokens that a policy drew.
    """
    change = {name: value - self._last[name] for name, value in self._now.items()}
    self._last = self._now
    seconds = max(change["time"], 1e-9)
    counts = self._buffer.count_groups()
    spent, self._spent = self._spent, {}
    return {
      "staleness/histogram": staleness_histogram(groups, version, self._buffer.max_lag),
      "time/step": seconds,
      "time/generation": change["generator_busy"],
      "time/waiting": self._idle,
      "time/learning": self._learning,
      "time/weight_push": self._store.push_seconds,
      "time/evaluation": spent.get("evaluation", 0.0),
      "time/checkpoint": spent.get("checkpoint", 0.0),
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
      **selection_metrics(groups, self._buffer.groups()),
      **self._actor.conversations.metrics(groups),
    }

  def _totals(self) -> dict[str, float]:
    counters = self._sampler.counters
    return {
      "time": time.monotonic(),
      "generated": float(counters.tokens),
      "slot_steps": float(counters.slot_steps),
      "generator_idle": self._actor.idle_seconds,
      "generator_busy": self._actor.busy_seconds,
    }


def combine(hosts: Hosts, roles: Roles, metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the metrics of a step of all processes together; see `SUMMED` and `AVERAGED`."""
  combined = dict(metrics)
  if hosts.count > 1:
    names = [name for name in (*SUMMED, *AVERAGED) if name in metrics]
    own = np.array([float(metrics[name]) for name in names])
    rows = np.array([np.frombuffer(row) for row in hosts.gather(own.tobytes())])
    sums, means = rows.sum(axis=0).tolist(), rows[list(roles.samplers)].mean(axis=0).tolist()
    combined |= {n: total if n in SUMMED else mean for n, total, mean in zip(names, sums, means, strict=True)}
  return combined


def selection_metrics(batch: Sequence[Group], waiting: Sequence[Group]) -> dict[str, float]:
  """Compares the length and the reward of what was trained with those of what was available.

  Args:
    batch: the groups that were trained.
    waiting: the complete groups that were not.
  """
  trained = [_samples(group, failed=False) for group in batch]
  others = [_samples(group, failed=False) for group in waiting]
  lost = [_samples(group, failed=True) for group in (*batch, *waiting)]
  return {
    "selection/length_trained": _mean(lengths for lengths, _ in trained),
    "selection/length_sampled": _mean(lengths for lengths, _ in (*trained, *others, *lost)),
    "selection/reward_trained": _mean(rewards for _, rewards in trained),
    "selection/reward_sampled": _mean(rewards for _, rewards in (*trained, *others)),
  }


def _samples(group: Group, failed: bool) -> tuple[np.ndarray, np.ndarray]:
  """Drawn tokens and rewards of the samples whose reward failed, or of those whose did not."""
  rows = [k for k in range(len(group.completions)) if (k in group.failed) == failed]
  lengths = np.array([np.sum(group.completions[k].mask) for k in rows], np.float64)
  return lengths, np.asarray(group.rewards, np.float64)[rows]


def _mean(parts: Iterable[np.ndarray]) -> float:
  """Mean of all entries; 0 without any."""
  values = np.concatenate([np.zeros(0), *parts])
  return float(values.mean()) if values.size else 0.0
