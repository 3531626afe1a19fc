"""A run in progress: it is opened or restored, steps, evaluates, logs and saves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from typing import Any
from typing import NoReturn

import jax

from async_rl import learning
from async_rl import tasks
from async_rl._paths import delete
from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._checkpoint import CheckpointError
from async_rl.recording._checkpoint import NoCheckpointer
from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._metrics import NoMetricsWriter
from async_rl.recording._progress import Progress
from async_rl.recording._run_folder import RunFolder
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._conversations import Conversations
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._prompts import PromptStream
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._weight_link import WeightLink
from async_rl.rollout._weight_store import WeightStore
from async_rl.runtime._experiment import Experiment
from async_rl.runtime._gather import gather_groups
from async_rl.runtime._held_out import HeldOutEvaluator
from async_rl.runtime._host_state import HostState
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._options import flatten
from async_rl.runtime._reference import set_starting_reference
from async_rl.runtime._roles import assign_roles
from async_rl.runtime._roles import done_by_learners
from async_rl.runtime._roles import remote_array
from async_rl.runtime._roles import states_of_samplers
from async_rl.runtime._stages import StageInputs
from async_rl.runtime._stall_watch import StallWatch
from async_rl.runtime._step_log import StepLog
from async_rl.runtime._step_meter import StepMeter
from async_rl.runtime._step_meter import combine
from async_rl.types import Group
from async_rl.types import TrainState

#: Seconds between two checks for a signal while the learner waits for a batch.
_POLL_SECONDS = 1.0


class Session:
  """The state of one run and all that its drivers do with it, in the caller's thread.

  Args:
    experiment: the experiment to run.
    folder: the run's folder.
    rewards: the pool that judges evaluations, and training samples unless the experiment has a scorer.
    hosts: the processes of the run, of which this is one.

  Attributes:
    hosts: the processes of the run.
    version: the number of optimizer steps done.
    buffer: the groups on their way from the actor to the learner.
    store: the weights on their way from the learner to the actor.
    actor: the sampling side.
    state: the training state.
    host_state: what checkpoints keep of this process alone.
    stop: the signals that ask the run to end.
  """

  actor: Actor
  state: TrainState
  host_state: HostState

  def __init__(self, experiment: Experiment, folder: RunFolder, rewards: tasks.RewardPool, hosts: Hosts):
    self.experiment = experiment
    self.folder = folder
    self.version = 0
    self.hosts = hosts
    self.stop = hosts.stop
    self._rewards = rewards
    self._scorer: tasks.Scorer | None = None  # scores training samples in place of the task
    options, training = experiment.options, experiment.options.training
    self._roles = roles = assign_roles(experiment, hosts)
    self._learners = hosts.among(roles.learners) if roles.learns else hosts
    self._stage_inputs = inputs = experiment.make_stage_inputs(rewards, hosts)
    self._meshes = inputs.meshes
    self._encoder = inputs.encoder
    self._learner = inputs.learner
    self._sampler = inputs.sampler
    self._prompt_check = inputs.prompt_check
    self._prompts = PromptStream(
      inputs.encoder, inputs.prompts, training.seed, training.epochs, self._prompt_check.skipped
    )
    self._checkpoints: Checkpointer = NoCheckpointer(folder.checkpoints)
    if roles.learns:
      self._checkpoints = experiment.make_checkpointer(folder.checkpoints, processes=roles.learners)
    if hosts.first and self._checkpoints.latest_step is None:
      delete(folder.metrics)  # of steps to be taken again; a next start would take them for those of lost checkpoints
    self._ledger = Ledger()
    self.buffer = RolloutBuffer(
      roles.share(training.groups),
      options.schedule.lag_bound,
      steps=options.length.steps,
      limit=self._prompts.num_tickets,
      first=roles.place,
      stride=len(roles.samplers),
    )
    link = WeightLink(hosts.index, roles.learners, roles.samplers, hosts.gather) if roles.apart else None
    self.store = WeightStore(experiment.policy, self._sampler.weight_shardings, self._meshes.learner, link)

  # Open, restore.

  def open(self, stack: contextlib.ExitStack) -> None:
    """Restores or starts the run and compiles the sampler; `stack` closes what is opened, whatever happens."""
    experiment = self.experiment
    stack.callback(self.store.close)
    stack.callback(self._checkpoints.close)
    saved = self._restore_or_start()
    own = saved[self.hosts.index] if self._roles.made(saved) else None
    self._recorder = ScheduleRecorder(self.folder.schedule, own["schedule"] if own else 0, self.folder.check_lock)
    stack.callback(self._recorder.close)
    self._open_log(stack, saved[0]["metrics"] if saved else 0)
    if experiment.scorer is not None:
      self._scorer = experiment.scorer(self._stage_inputs)
      stack.callback(self._scorer.close)
    samples = experiment.options.training.samples
    conversations = Conversations(self._sampler, self._encoder, self._rewards, samples, self._scorer)
    self.actor = Actor(self._sampler, conversations, self._prompts, self.buffer, self._ledger, self._recorder)
    self._stall_watch = StallWatch(self._progress.warn, self._describe)
    stack.callback(self._stall_watch.close)
    self._meter = StepMeter(self._sampler, self.buffer, self.store, self.actor, self._scorer or self._rewards)
    stack.callback(self.buffer.close)
    scorers = (self._rewards, self._scorer or self._rewards)
    self._log = StepLog(self.hosts, self._roles, self._writer, self._progress, self._ledger, scorers, self._checkpoints)
    self.host_state = HostState(
      self._prompts, self._prompt_check.fingerprint, self.buffer, self.actor, self._ledger, self._recorder, self._writer
    )
    inputs = dataclasses.replace(self._stage_inputs, hosts=self._learners)
    self._held_out = HeldOutEvaluator(experiment, inputs, self._scorer)
    if saved:
      self._restore_host_state(saved)
    host = None if saved else self._collect_host_state()  # before, since the sampler takes one call at a time
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      compiling = pool.submit(self._compile_sampler)
      if host is not None:
        self._start_checkpoint(host)  # waits for copies from the devices meanwhile
      compiling.result()

  def _compile_sampler(self) -> None:
    if self._roles.samples:
      self.stop.activity = "compiling the sampler"
      self._sampler.warmup(resumes=self._encoder.has_tool)

  def _open_log(self, stack: contextlib.ExitStack, rows: int) -> None:
    """Opens metrics, of which the checkpoint has this many rows, and progress; tells what is damaged or left out."""
    options = self.experiment.options
    self._progress = Progress(options.length.steps, self.version, process=self.hosts.index)
    stack.callback(self._progress.close)
    if self.hosts.first:
      self._writer: MetricsWriter | NoMetricsWriter = MetricsWriter(
        self.folder,
        resume_step=self.version,
        resume_rows=rows,
        wandb=options.output.wandb,
        config=flatten(options),
        warn=self._progress.warn,
      )
    else:
      self._writer = NoMetricsWriter()
    stack.callback(self._writer.close)
    for damage in (*self._checkpoints.skipped.values(), *self._recorder.damaged, *self._writer.damaged):
      self._progress.note(f"damaged: {damage}")
    if self.hosts.first:
      self._checkpoints.set_aside_skipped()
    self.hosts.barrier()
    if not self.hosts.first:
      self._checkpoints.reload()
    if options.schedule.mode == "async":
      self._progress.note(self._meshes.describe())
    if note := self._prompt_check.describe():
      self._progress.note(note)

  def _restore_or_start(self) -> list[dict[str, Any]]:
    """Sets state and version; returns the hosts' parts of the newest checkpoint, none if there is no checkpoint."""
    if not self._roles.learns:
      self.state = jax.tree.map(remote_array, self._learner.abstract())
    self.version, saved = done_by_learners(self.hosts, self._roles, self._restore_or_init)
    return saved

  def _restore_or_init(self) -> tuple[int, list[dict[str, Any]]]:
    """Sets the state; returns its version and the hosts' parts of the checkpoint."""
    if self._checkpoints.latest_step is not None:
      self.state, saved = self._checkpoints.restore(self._learner.abstract())
      if saved[0]["prompts"] != self._prompt_check.fingerprint:
        raise CheckpointError(
          f"The training prompts are not those that {self.folder.path} was started with; restore the data set to "
          "resume, or start another run with the new one."
        )
      version, named = int(self.state.version), self._checkpoints.restored_step
      if version != named:
        found = self._checkpoints.folder / str(named)
        raise CheckpointError(f"{found} holds step {version}: give the folder that name.")
      if self.experiment.keeps_reference:
        set_starting_reference(self._learner, self.folder.reference, None)
      return version, saved
    start = self.experiment.first_stage
    params = start(self._inputs_of_learners()) if start is not None else None
    self.state = self._learner.init(jax.random.key(self.experiment.options.training.seed), params)
    if self.hosts.first:  # left by a run that ended before its first checkpoint
      delete(self.folder.reference)
    self._learners.barrier()
    if self.experiment.keeps_reference:
      set_starting_reference(self._learner, self.folder.reference, self.state.params)
    return 0, []

  def _inputs_of_learners(self) -> StageInputs:
    """Returns the objects for a stage; where other processes sample, it samples on the learner's devices."""
    if not self._roles.apart:
      return self._stage_inputs
    sampler = self.experiment.make_stage_sampler(self._meshes.learner)
    return dataclasses.replace(self._stage_inputs, sampler=sampler, hosts=self._learners)

  def _restore_host_state(self, saved: list[dict[str, Any]]) -> None:
    """Restores what this process saved, or its share of what other processes did."""
    if self._roles.made(saved):
      simulated = self.experiment.options.schedule.mode == "simulated"
      self.host_state.restore(saved[self.hosts.index], continue_samples=not simulated)
      self._progress.note(f"resumed at step {self.version}")
      return
    forgotten = self.host_state.redeal(saved, take_ledgers=self.hosts.first)
    self._progress.note(
      f"resumed at step {self.version} by {self.hosts.count} processes, saved by {len(saved)}: unfinished groups, and "
      f"{forgotten} complete ones that waited to be trained, are sampled again"
    )

  # Step.

  @property
  def done(self) -> bool:
    """Whether all steps are done."""
    return self.version >= self.experiment.options.length.steps

  @property
  def resumable(self) -> bool:
    """Whether a later start could go on from here: not from the middle of a replay."""
    return self.version == 0 or self.done or not self.experiment.options.schedule.replays

  def start_clock(self) -> None:
    """Starts measuring times and rates, once everything is ready."""
    self._meter.start()
    self._stall_watch.end_step()

  def publish_weights(self) -> None:
    """Sends the weights of the current version on their way to the actor."""
    self.store.publish(self.version, self._learner.sampler_params(self.state))

  def compile_step(self) -> None:
    """Compiles the learner's step, if this process will take one."""
    if self._roles.learns and not self.done:
      self.stop.activity = "compiling the learner's step"
      self._learner.compile_step()

  def submit_group(self) -> int | None:
    """Hands the actor the next group and returns its ticket; `None` if the lag bound or the data allow none."""
    ticket = self.buffer.try_submit(self.actor.version)
    if ticket is not None:
      self.actor.submit(ticket)
    return ticket

  def submit_unfinished(self) -> None:
    """Hands the actor again the groups that it had not finished when the run was saved."""
    for ticket in self.host_state.unfinished:
      self.actor.submit(ticket)
    self.host_state.unfinished = []

  def take_batch(self, tickets: list[int] | None = None) -> list[Group]:
    """Returns the groups of the next step, of all processes; waits for the actor's thread.

    Args:
      tickets: the groups of this process to take; `None` takes the most urgent ones.

    Raises:
      EndOfData: if no further batch can be formed.
      StopRequested: if a signal asked the run to end.
      HostError: if the samplers of two processes held different weights of one version.
    """
    self.stop.activity = f"waiting for the batch of step {self.version + 1}"
    self.hosts.agree(functools.partial(self._wait_for_batch, tickets))
    own = self.buffer.take_batch(self.version, timeout=0, tickets=tickets)
    self._recorder.record("train", self.version, [g.request.ticket for g in own])
    checksums = self._ledger.weights(since=self.version - self.buffer.max_lag - 1)
    return gather_groups(self.hosts, own, checksums, self._prompts.prompts)

  def _wait_for_batch(self, tickets: list[int] | None) -> None:
    while True:
      self.stop.check()
      try:
        return self.buffer.wait_for_batch(self.version, timeout=_POLL_SECONDS, tickets=tickets)
      except TimeoutError:
        if tickets is not None:  # the actor runs in this thread and has finished
          raise RuntimeError(f"Step {self.version} trains groups {tickets}, but not all of them succeeded.") from None

  def step(self, groups: list[Group]) -> None:
    """Takes one optimizer step, publishes its weights, and evaluates and saves if that is due."""
    learner, output = self._learner, self.experiment.options.output
    self._meter.begin_step()
    self.stop.activity = f"training step {self.version + 1}"
    metrics: dict[str, Any] = {}
    batch = learner.put(learning.pack(groups, learner.shape)) if self._roles.learns else None
    with self._device_turn():
      if batch is not None:
        self.state, metrics = learner.step(self.state, batch)
      self.version += 1
      if not self.done:
        self.publish_weights()
    drawn = sum(map(drawn_tokens, groups))
    values = self._meter.metrics(groups, self.version - 1, drawn)
    self._log.push(self.version, groups, metrics, combine(self.hosts, self._roles, values))
    with self._stall_watch.paused():
      if not self.done and self.evaluation_due:
        with self._meter.timing("evaluation"):
          self.evaluate()
      if not self.done and output.checkpoint_every and self.version % output.checkpoint_every == 0:
        with self._meter.timing("checkpoint"):
          self.save()
    self._meter.end_step()
    self._stall_watch.end_step()

  def _describe(self) -> str:
    """Returns what this process is doing and what it waits for, for a run that stands still."""
    counts = self.buffer.count_groups()
    return (
      f"{self.stop.activity}; the sampler has the weights of step {self.actor.version}, {counts['pending']} groups are "
      f"being sampled or scored, {counts['complete']} wait to be trained"
    )

  def _device_turn(self) -> contextlib.AbstractContextManager[None]:
    """On shared devices only one thread may launch programs at a time: their order must be the same on each device."""
    shared = self._meshes.colocated and self._meshes.learner.size > 1
    return self.actor.paused() if shared else contextlib.nullcontext()

  # Evaluate.

  @property
  def evaluation_due(self) -> bool:
    """Whether the current version, between the first and the last, is one of those to evaluate."""
    interval = self.experiment.options.output.eval_every
    return self.version == 0 or (bool(interval) and self.version % interval == 0)

  def evaluate(self) -> None:
    """Measures the held-out accuracy of the current version, once; the actor's thread goes on meanwhile.

    Raises:
      StopRequested: if a signal asked the run to end.
    """
    accuracy = self.host_state.accuracy
    if not self._held_out.has_prompts or self.version in accuracy:
      return
    self.stop.activity = f"evaluating step {self.version}"
    self._log.flush()
    with self._device_turn():
      measure = functools.partial(self._held_out.measure, self.state.params, self.version)
      metrics = done_by_learners(self.hosts, self._roles, measure)
    self._log.warn_of_failures()
    accuracy[self.version] = metrics["accuracy"]
    self._writer.write(self.version, {f"eval/{name}": value for name, value in metrics.items()})
    spread = f" ± {metrics['interval']:.3f}" if "interval" in metrics else ""
    self._progress.note(f"step {self.version}: held-out accuracy {metrics['accuracy']:.3f}{spread}")

  # Save.

  def save_and_interrupt(self) -> NoReturn:
    """Saves the run after a signal, waits until that is on disk, and raises `Interrupted`."""
    self.stop.activity = f"saving step {self.version}"
    self.save()
    self._checkpoints.wait()
    self.hosts.barrier()
    seconds = time.monotonic() - self.stop.requested_at
    when = f"after step {self.version}, saved {seconds:.1f} s after the signal"
    raise self.stop.interrupted(when, resumable=self.resumable)

  def save(self) -> None:
    """Starts a checkpoint of the current version, the actor paused between two chunks."""
    self._start_checkpoint(self._collect_host_state())

  def _collect_host_state(self) -> dict[str, Any]:
    self._log.flush()
    with self.actor.paused():
      return self.host_state.collect()

  def _start_checkpoint(self, host: dict[str, Any]) -> None:
    self._checkpoints.save(self.version, self.state, host, states_of_samplers(self.hosts, self._roles, host))
