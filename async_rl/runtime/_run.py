"""Runs an experiment from its first step, or from its newest checkpoint, to its end."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax

from async_rl import tasks
from async_rl._paths import list_folder
from async_rl.recording._checkpoint import CheckpointError
from async_rl.recording._metrics import check_wandb
from async_rl.recording._metrics import has_steps
from async_rl.recording._run_folder import RunFolder
from async_rl.recording._run_report import write_report
from async_rl.rollout._buffer import EndOfData
from async_rl.rollout._schedule import Event
from async_rl.runtime._drivers import drive
from async_rl.runtime._drivers import read_replay
from async_rl.runtime._experiment import Experiment
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._join import check_same
from async_rl.runtime._options import PROCESS_OPTIONS
from async_rl.runtime._options import flatten
from async_rl.runtime._session import Session
from async_rl.runtime._signals import StopRequested


class Summary(NamedTuple):
  """How a run ended.

  Attributes:
    folder: the folder that holds everything the run wrote.
    version: the number of optimizer steps done.
    accuracy: held-out accuracy at the end, `None` without evaluation.
    accuracy_before: held-out accuracy before the first step.
    ended_early: whether the data ended before the steps did.
    lag_bound: the largest lag of a trained token, in optimizer steps.
  """

  folder: RunFolder
  version: int
  accuracy: float | None
  accuracy_before: float | None
  ended_early: bool
  lag_bound: int = 0


def train(experiment: Experiment, hosts: Hosts | None = None) -> Summary:
  """Runs an experiment to its end, or resumes it where its folder's newest checkpoint stands.

  Args:
    experiment: the experiment.
    hosts: the processes of the run, from `join_hosts`; `None` for this one alone.

  Raises:
    HostError: if the processes were not started alike.
    RunFolderError, CheckpointError, ImportError: with one sentence for the user, before anything is computed.
    Interrupted: if SIGTERM or SIGINT arrived, after a checkpoint.
    Exception: whatever a thread failed with.
  """
  hosts = hosts or Hosts()
  if hosts.count != jax.process_count():
    raise ValueError(f"JAX has {jax.process_count()} processes; give train the hosts of join_hosts.")
  options, devices, output = experiment.options, experiment.options.devices, experiment.options.output
  if output.wandb:
    check_wandb()
  check_same(hosts, {**_recorded_options(experiment), **experiment.fingerprint()})
  recorded = hosts.agree(functools.partial(read_replay, experiment, hosts))
  folder = _open_folder(experiment, hosts)
  opened = False

  def close_folder() -> None:
    if not opened and not folder.resumed and not any(e.name[0].isdigit() for e in list_folder(folder.checkpoints)):
      folder.remove()  # nothing was saved, so let the corrected command reuse the folder
    folder.close()

  with contextlib.ExitStack() as stack:
    stack.callback(close_folder)  # the last one, since others write into the folder while they are closed
    hosts.stop.activity = "starting"
    stack.enter_context(hosts.stop.caught())
    check_checkpoints(folder, hosts)
    pool = tasks.RewardPool(experiment.task, devices.reward_workers, devices.reward_timeout)
    session = Session(experiment, folder, stack.enter_context(pool), hosts)
    session.open(stack)
    opened = True
    if hosts.first:
      folder.discard_replaced()
    with hosts.stop.deferred():
      ended_early = _run_to_the_end(session, recorded)
    if hosts.first and output.picture:
      write_report(folder)
  accuracy = session.host_state.accuracy
  before, after = (accuracy[min(accuracy)], accuracy[max(accuracy)]) if accuracy else (None, None)
  return Summary(folder, session.version, after, before, ended_early, options.schedule.lag_bound)


def _open_folder(experiment: Experiment, hosts: Hosts) -> RunFolder:
  """Opens the run's folder in the first process, then in the others."""
  output = experiment.options.output

  def open_folder() -> RunFolder:
    text = json.dumps(_recorded_options(experiment), indent=2) + "\n"
    return RunFolder.open(output.run_dir, text, experiment.fingerprint(), overwrite=output.overwrite)

  if hosts.first:
    return hosts.agree(open_folder)
  hosts.agree(lambda: None)
  return RunFolder.join(output.run_dir, hosts.index)


def _recorded_options(experiment: Experiment) -> dict[str, Any]:
  """Returns the values of config.txt."""
  values = {"config": experiment.name, **flatten(experiment.options)}
  return {name: value for name, value in values.items() if name not in PROCESS_OPTIONS}


def check_checkpoints(folder: RunFolder, hosts: Hosts) -> None:
  """Refuses a run that took steps and has no checkpoint, not even an unfinished one.

  The first process alone looks, before it deletes what is unfinished: others might look after that.
  """
  if hosts.first and not list_folder(folder.checkpoints) and has_steps(folder.metrics):
    raise CheckpointError(
      f"{folder.path} holds a run whose checkpoints are missing: restore {folder.checkpoints}, or pass --overwrite "
      "to delete the run and start again."
    )


def _run_to_the_end(session: Session, recorded: Sequence[Event]) -> bool:
  """Evaluates, takes the steps, evaluates and saves; returns whether the data ended before the steps did."""
  ended_early = False
  try:
    if not session.done and session.evaluation_due:
      session.evaluate()
    session.start_clock()
    try:
      drive(session, recorded)
    except EndOfData:
      ended_early = not session.done
    session.evaluate()
  except StopRequested:
    session.save_and_interrupt()
  session.save()
  return ended_early
