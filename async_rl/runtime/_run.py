"""The loop: three ways to run the same parts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import threading
from typing import Any
from typing import NamedTuple

import jax

from async_rl import learning
from async_rl import tasks
from async_rl.recording._metrics import MetricsBuffer
from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._progress import Progress
from async_rl.recording._report import write_report
from async_rl.recording._run_folder import RunFolder
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import EndOfData
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._completion_arrays import failed_tokens
from async_rl.rollout._conversations import Conversations
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._schedule import LAG_KINDS
from async_rl.rollout._schedule import LagDistribution
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._schedule import read_schedule
from async_rl.runtime._evaluation import evaluate
from async_rl.runtime._experiment import Experiment
from async_rl.runtime._kept import set_reference
from async_rl.runtime._meter import StepMeter
from async_rl.runtime._parts import Parts
from async_rl.runtime._signals import catch_signals
from async_rl.types import Group
from async_rl.types import TrainState

#: Seconds between two looks for a signal while the learner waits.
_PATIENCE = 1.0


class Interrupted(Exception):
  """SIGTERM or SIGINT arrived; the run was saved."""


class Summary(NamedTuple):
  """How a run ended.

  Attributes:
    folder: where everything lies.
    version: optimizer steps done.
    accuracy: held-out accuracy at the end, `None` without evaluation.
    accuracy_before: the same before the first step.
    ended_early: the data ended before the steps did.
  """

  folder: RunFolder
  version: int
  accuracy: float | None
  accuracy_before: float | None
  ended_early: bool


def train(experiment: Experiment) -> Summary:
  """Runs an experiment to its end, or resumes it where its folder's newest checkpoint stands.

  Raises:
    RunFolderError, CheckpointError: with one sentence for the user, before anything is computed.
    Interrupted: after a checkpoint, if SIGTERM or SIGINT arrived.
    Exception: whatever a thread failed with.
  """
  text = json.dumps({"config": experiment.name, **dataclasses.asdict(experiment)}, indent=2) + "\n"
  folder = RunFolder.open(experiment.run_dir, text, experiment.fingerprint(), overwrite=experiment.overwrite)
  with contextlib.ExitStack() as stack:
    try:
      pool = tasks.RewardPool(experiment.task(), experiment.reward_workers, experiment.reward_timeout)
      run = _Run(experiment, folder, stack.enter_context(pool))
    except BaseException:
      if not folder.resumed:
        shutil.rmtree(folder.path, ignore_errors=True)  # nothing was computed; other options shall find it free
      raise
    return run.train()


class _Run:
  """One run in progress. Everything but the actor thread's calls happens in the caller's thread."""

  def __init__(self, experiment: Experiment, folder: RunFolder, gold: tasks.RewardPool):
    self.experiment, self.folder, self.gold = experiment, folder, gold
    self.scorer: tasks.Scorer | None = None  # of training samples in place of `gold`
    self.parts = Parts(experiment)
    self.checkpoints = self.parts.make_checkpointer(folder.checkpoints)
    self.ledger = Ledger()
    self.buffer = RolloutBuffer(
      experiment.groups, experiment.lag_bound, steps=experiment.steps, limit=self.parts.prompts.num_tickets
    )
    self.store = self.parts.make_store()
    self.assigned: dict[int, list[int]] = {}  # simulated: tickets of batches still to be trained, by step
    self.accuracy: dict[int, float] = {}  # held-out accuracy by version
    self.wanted = threading.Event()  # a signal asked for the end
    self.state: TrainState
    self.version = 0

  # Life.

  def train(self) -> Summary:
    with contextlib.ExitStack() as stack:
      self._open(stack)
      self.parts.engine.warmup(resumes=self.parts.encoder.has_tool)
      catch_signals(stack, self.wanted)
      if not self.version:
        self._evaluate()
      ended_early = self._drive()
    write_report(self.folder)
    versions = sorted(self.accuracy)
    last, first = (self.accuracy[versions[-1]], self.accuracy[versions[0]]) if versions else (None, None)
    return Summary(self.folder, self.version, last, first, ended_early)

  def _open(self, stack: contextlib.ExitStack) -> None:
    """Restores or starts the run; what it opens is closed by `stack`, whatever happens."""
    e = self.experiment
    stack.callback(self.store.close)
    stack.callback(self.checkpoints.close)
    host = self._restore()
    self.recorder = ScheduleRecorder(self.folder.schedule, host["schedule"] if host else 0)
    stack.callback(self.recorder.close)
    self.writer = MetricsWriter(self.folder, resume_step=self.version, wandb=e.wandb, config=dataclasses.asdict(e))
    stack.callback(self.writer.close)
    self.progress = Progress(e.steps, self.version)
    stack.callback(self.progress.close)
    self.pending = MetricsBuffer()
    self.scorer = e.scorer(self.parts)
    if self.scorer is not None:
      stack.callback(self.scorer.close)
    conversations = Conversations(self.parts.engine, self.parts.encoder, self.gold, e.samples, self.scorer)
    self.actor = Actor(self.parts.engine, conversations, self.parts.prompts, self.buffer, self.ledger, self.recorder)
    self.meter = StepMeter(self.parts, self.buffer, self.store, self.actor, self.scorer or self.gold)
    stack.callback(self.buffer.close)
    if host:
      self._restore_host(host)
    else:
      self._save()

  def _drive(self) -> bool:
    ways = {"async": self._side_by_side, "sync": self._in_turn, "simulated": self._in_turn}
    way = ways[self.experiment.mode]
    if self.experiment.mode == "simulated" and self.experiment.lag not in LAG_KINDS:
      way = self._replay
    ended_early = False
    self.meter.start()
    try:
      way()
    except EndOfData:
      ended_early = self.version < self.experiment.steps
    self._flush_metrics()
    self._evaluate()
    self._save()
    return ended_early

  # Three ways to run.

  def _side_by_side(self) -> None:
    """The actor samples in a thread of its own while the learner steps here."""
    self._publish()
    thread = threading.Thread(target=self.actor.run, args=(self.store,), name="actor", daemon=True)
    thread.start()
    try:
      while self.version < self.experiment.steps:
        self._learn(self._take())
    finally:
      self.buffer.close()
      self.store.close()
      thread.join()

  def _in_turn(self) -> None:
    """One thread: at each version, sample what this version feeds, then take the step."""
    e = self.experiment
    lags = LagDistribution(e.lag_bound, e.lag if e.mode == "simulated" else "fixed", e.seed)
    self._publish()
    while self.version < e.steps:
      self.actor.set_weights(*self.store.latest(at_least=self.version))
      # A step past the end of a run that was extended has no batch from the version that should have fed it.
      for step in sorted({self.version, *lags.steps_fed_by(self.version)}):
        if step < e.steps and step not in self.assigned:
          self.assigned[step] = self._submit_many(e.groups)
      self._sample_assigned()
      if len(self.assigned[self.version]) < e.groups:
        raise EndOfData(f"the data ended after {self.version} steps")
      groups = self._take(self.assigned[self.version])
      del self.assigned[self.version]  # not before: a signal makes `_take` save
      self._learn(groups)

  def _sample_assigned(self) -> None:
    """Finishes all groups, and other ones in place of those that failed."""
    failed = True
    while failed:
      self.actor.finish_groups()
      complete = {group.request.ticket for group in self.buffer.groups()}
      failed = False
      for step, tickets in self.assigned.items():
        good = [ticket for ticket in tickets if ticket in complete]
        if len(good) < len(tickets):
          failed = True
          self.assigned[step] = good + self._submit_many(len(tickets) - len(good))

  def _submit_many(self, count: int) -> list[int]:
    """Hands the sampler this many groups, fewer if the data end."""
    return [ticket for _ in range(count) if (ticket := self._submit()) is not None]

  def _submit(self) -> int | None:
    """Hands the sampler the next group, if there is one."""
    ticket = self.buffer.try_submit(self.actor.version)
    if ticket is not None:
      self.actor.submit(ticket)
    return ticket

  def _replay(self) -> None:
    """Repeats a recorded asynchronous run, event by event."""
    e = self.experiment
    if 0 < self.version < e.steps:
      raise ValueError(f"{self.folder.path} holds part of a replay, which cannot be resumed; pass --overwrite.")
    events = list(read_schedule(e.lag))
    needed = {event[1] for event in events if event[0] == "weights"}
    self._publish()
    kept = dict([self.store.latest(at_least=self.version)])
    for kind, *details in events:
      if self.version == e.steps:
        return
      match kind:
        case "weights" if details[0] != self.actor.version:  # a run that was resumed takes its weights once more
          self.actor.set_weights(details[0], kept.pop(details[0]))
        case "resume":
          raise ValueError(f"{e.lag} is of a run that was resumed with samples in flight; it cannot be replayed.")
        case "submit":
          if self._submit() != details[0]:
            raise ValueError(
              f"{e.lag} submits group {details[0]} out of turn; it is not a schedule of this experiment."
            )
        case "answer":
          self.actor.resume_answered(only=(details[0], details[1]))
        case "chunk":
          self.actor.decode_chunk()
        case "train":
          self.actor.wait_for_rewards()
          self._learn(self._take(details[1]))
          if self.version in needed:
            kept.update([self.store.latest(at_least=self.version)])
    if self.version < e.steps:
      raise EndOfData(f"the schedule ended after {self.version} steps")

  # Parts of a step.

  def _take(self, tickets: list[int] | None = None) -> list[Group]:
    while True:
      if self.wanted.is_set():
        self._flush_metrics()
        self._save()
        self.checkpoints.wait()
        raise Interrupted(f"stopped by a signal after step {self.version}; the same command resumes it")
      try:
        groups = self.buffer.take(self.version, timeout=_PATIENCE, tickets=tickets)
      except TimeoutError:
        if tickets is not None:  # the sampler is in this thread and has finished
          raise RuntimeError(f"Step {self.version} trains groups {tickets}, but not all of them succeeded.") from None
        continue
      self.recorder.record("train", self.version, [g.request.ticket for g in groups])
      return groups

  def _learn(self, groups: list[Group]) -> None:
    learner, e = self.parts.learner, self.experiment
    self.meter.begin_step()
    batch = learner.put(learning.pack(groups, learner.shape))
    with self._turn():
      self.state, metrics = learner.step(self.state, batch)
      self.version += 1
      if self.version < e.steps:
        self._publish()
    self._log(metrics, groups)
    if e.eval_every and self.version % e.eval_every == 0 and self.version < e.steps:
      self._evaluate()
    if e.checkpoint_every and self.version % e.checkpoint_every == 0 and self.version < e.steps:
      self._save()
    self.meter.end_step()

  def _publish(self) -> None:
    self.store.publish(self.version, self.parts.learner.sampler_params(self.state))

  def _log(self, metrics: dict[str, jax.Array], groups: list[Group]) -> None:
    """Queues this step's metrics and writes the previous step's, which are surely computed."""
    drawn = sum(map(drawn_tokens, groups))
    host = self.meter.metrics(groups, self.version - 1, drawn)
    counts = {"ledger/drawn": drawn, "ledger/failed": sum(map(failed_tokens, groups))}
    self._write(self.pending.push(self.version, {**metrics, **counts}, host))

  def _flush_metrics(self) -> None:
    self._write(self.pending.flush())

  def _write(self, finished: tuple[int, dict[str, float]] | None) -> None:
    if finished is None:
      return
    step, values = finished
    drawn, failed = (int(values.pop(f"ledger/{name}")) for name in ("drawn", "failed"))
    trained = int(values["tokens/trained"])
    masked = {"failed": failed, "rejected": drawn - trained - failed}
    self.ledger.trained(trained, {reason: count for reason, count in masked.items() if count})
    self._warn_of_failures()
    self.writer.write(step, values)
    self.progress.update(step, values)

  def _warn_of_failures(self) -> None:
    """Tells the first reason of each kind of failure of rewards and tools, once."""
    for scorer in (self.gold, self.scorer or self.gold):
      for reason in scorer.first_reasons:
        self.progress.warn(f"failed {reason}; such samples are not trained, see reward/failures and tools/failures")

  def _evaluate(self) -> None:
    """Held-out accuracy of the current version; the sampler goes on meanwhile."""
    e = self.experiment
    if not self.parts.held_out or self.version in self.accuracy:
      return
    self._flush_metrics()
    engine = self.parts.evaluator
    with self._turn():
      engine.set_weights(self.state.params, self.version)
      # Greedy samples say nothing about the distance to the reference.
      policy = self.state.params if e.reference and e.evaluation_config().temperature == e.temperature else None
      found = evaluate(self.parts, engine, self.parts.held_out, self.gold, proxy=self.scorer, policy=policy)
    self._warn_of_failures()
    self.accuracy[self.version] = found["accuracy"]
    self.writer.write(self.version, {f"eval/{name}": value for name, value in found.items()})
    spread = f" ± {found['interval']:.3f}" if "interval" in found else ""
    self.progress.note(f"step {self.version}: held-out accuracy {found['accuracy']:.3f}{spread}")

  def _turn(self) -> contextlib.AbstractContextManager[None]:
    """On shared devices only one thread may launch programs at a time: their order must be the same on each device."""
    shared = self.parts.meshes.colocated and self.parts.meshes.learner.size > 1
    return self.actor.paused() if shared else contextlib.nullcontext()

  # Checkpoints.

  def _restore(self) -> dict[str, Any] | None:
    """Sets state and version from the newest checkpoint, or afresh."""
    if self.checkpoints.latest_step is not None:
      self.state, host = self.checkpoints.restore(self.parts.learner.abstract())
      self.version = int(self.state.version)
      set_reference(self.parts, self.folder.reference, None)
      return host
    key = jax.random.key(self.experiment.seed)
    self.state = self.parts.learner.init(key, self.experiment.start(self.parts))
    shutil.rmtree(self.folder.reference, ignore_errors=True)  # of a run that ended before its first checkpoint
    set_reference(self.parts, self.folder.reference, self.state.params)
    return None

  def _restore_host(self, host: dict[str, Any]) -> None:
    self.buffer.restore(host["buffer"], self.parts.prompts.prompts, host["actor"]["tickets"].tolist())
    saved = sum(map(drawn_tokens, self.buffer.groups()))
    self.actor.restore(host["actor"])
    self.ledger.restore(host["ledger"], saved + self.actor.held_tokens())
    self.assigned = {int(step): tickets for step, tickets in host["assigned"].items()}
    self.accuracy = {int(version): value for version, value in host["accuracy"].items()}
    if len(host["actor"]["tickets"]):
      self.recorder.record("resume")
    self.progress.note(f"resumed at step {self.version}")

  def _save(self) -> None:
    """Starts a checkpoint of the current version, the sampler paused between two chunks."""
    self._flush_metrics()
    with self.actor.paused():
      self.buffer.raise_error()
      held = self.actor.held_tokens() + sum(map(drawn_tokens, self.buffer.groups()))
      self.ledger.balance(held)
      host = {
        "buffer": self.buffer.state(),
        "actor": self.actor.state(),
        "ledger": self.ledger.state(),
        "schedule": self.recorder.flush(),
        "assigned": {str(step): tickets for step, tickets in self.assigned.items()},
        "accuracy": {str(version): value for version, value in self.accuracy.items()},
      }
    self.checkpoints.save(self.version, self.state, host)
