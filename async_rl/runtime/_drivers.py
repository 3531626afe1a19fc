"""Three ways to drive a run. They differ in when the actor samples; sampling and learning are the same functions.

`run_async`: the actor samples in a thread of its own, beside the learner. `run_sync`: one thread samples a batch, then
trains it. `run_simulated` and `replay`: one thread, in an order that gives each batch the lag of a distribution or of a
recorded asynchronous run; bit for bit reproducible.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from collections.abc import Sequence

from async_rl import models
from async_rl._paths import as_path
from async_rl.recording._run_folder import schedule_of
from async_rl.rollout._buffer import EndOfData
from async_rl.rollout._schedule import Event
from async_rl.rollout._schedule import LagDistribution
from async_rl.rollout._schedule import read_replayable
from async_rl.runtime._experiment import Experiment
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._roles import assign_roles
from async_rl.runtime._session import Session

_FOREIGN_SCHEDULE = "it is not a schedule of this experiment, replay one recorded with the same options."


def read_replay(experiment: Experiment, hosts: Hosts) -> list[Event]:
  """Returns the events that this process is to repeat; none if the experiment replays no schedule.

  Raises:
    ValueError: if a run of the experiment could not repeat them; one sentence with the remedy.
  """
  options = experiment.options
  if not options.schedule.replays:
    return []
  path = schedule_of(as_path(options.schedule.lag, "lag"), hosts.index)
  groups = assign_roles(experiment, hosts).share(options.training.groups)
  return read_replayable(path, groups, options.schedule.max_lag, options.length.steps)


def drive(session: Session, recorded: Sequence[Event]) -> None:
  """Runs the session in its experiment's mode until all steps are done.

  Args:
    session: the session.
    recorded: what `read_replay` returned for its experiment.

  Raises:
    EndOfData: if the data end first.
    StopRequested: if a signal asked the run to end.
  """
  schedule = session.experiment.options.schedule
  if schedule.mode == "async":
    run_async(session)
  elif schedule.mode == "sync":
    run_sync(session)
  elif schedule.replays:
    replay(session, recorded)
  else:
    run_simulated(session, LagDistribution(schedule.max_lag, schedule.lag, session.experiment.options.training.seed))


def run_async(session: Session) -> None:
  """The actor samples in a thread of its own while this one takes the steps."""
  session.publish_weights()
  thread = threading.Thread(target=session.actor.run, args=(session.store,), name="actor", daemon=True)
  thread.start()
  try:
    session.compile_step()  # while the first batch is sampled
    while not session.done:
      session.step(session.take_batch())
  finally:
    with session.actor.paused():  # a chunk that ended after this could not hand in the groups that it completed
      session.buffer.close()
      session.store.close()
    thread.join()


def run_sync(session: Session) -> None:
  """Each version samples the batch that it is trained on."""
  run_simulated(session, LagDistribution(max_lag=0))


def run_simulated(session: Session, lags: LagDistribution) -> None:
  """Each version samples the batches that `lags` has it feed, of this step or later ones; then the step is taken."""
  session.publish_weights()
  while not session.done:
    session.hosts.agree(functools.partial(_sample_due, session, lags))
    batch = session.take_batch(session.host_state.assigned[session.version])
    del session.host_state.assigned[session.version]  # only now: until it is taken, a checkpoint needs it
    session.step(batch)


def _sample_due(session: Session, lags: LagDistribution) -> None:
  """Samples all that the current version must.

  Raises:
    EndOfData: if the data end before the batch of this step is complete.
  """
  groups_per_step, assigned = session.buffer.groups_per_step, session.host_state.assigned
  session.actor.set_weights(*session.store.latest(at_least=session.version))
  session.submit_unfinished()
  for step in lags.steps_due(session.version):  # not all were assigned where a run was extended
    if step < session.experiment.options.length.steps and step not in assigned:
      assigned[step] = _submit_groups(session, groups_per_step)
  _sample_assigned(session, groups_per_step)
  if len(assigned[session.version]) < groups_per_step:
    raise EndOfData(f"the data ended after {session.version} steps")


def replay(session: Session, events: Sequence[Event]) -> None:
  """Repeats a recorded asynchronous run, event by event."""
  if not session.resumable:
    raise ValueError(f"{session.folder.path} holds part of a replay, which cannot be resumed; pass --overwrite.")
  needed = {event[1] for event in events if event[0] == "weights"}
  session.publish_weights()
  weights = dict([session.store.latest(at_least=session.version)])
  to_come = iter(events)
  while not session.done:
    tickets = session.hosts.agree(functools.partial(_replay_until_train, session, to_come, weights))
    session.step(session.take_batch(tickets))
    if session.version in needed:
      weights.update([session.store.latest(at_least=session.version)])


def _replay_until_train(session: Session, events: Iterator[Event], weights: dict[int, models.Params]) -> list[int]:
  """Repeats the events up to the next step of the learner and returns the tickets that it trains.

  Raises:
    EndOfData: if there is no such step.
  """
  source = session.experiment.options.schedule.lag
  for kind, *details in events:
    session.stop.check()
    match kind:
      case "weights" if details[0] != session.actor.version:  # a run that was resumed takes its weights once more
        if details[0] not in weights:
          raise ValueError(f"{source} takes weights of version {details[0]} too early; {_FOREIGN_SCHEDULE}")
        session.actor.set_weights(details[0], weights.pop(details[0]))
      case "submit":
        if session.submit_group() != details[0]:
          raise ValueError(f"{source} submits group {details[0]} out of turn; {_FOREIGN_SCHEDULE}")
      case "answer":
        session.actor.resume_answered(only=(details[0], details[1]))
      case "chunk":
        session.actor.decode_chunk()
      case "train":
        session.actor.wait_for_rewards()
        if missing := set(details[1]) - {group.request.ticket for group in session.buffer.groups()}:
          raise ValueError(f"{source} trains groups {sorted(missing)} before they are finished; {_FOREIGN_SCHEDULE}")
        return details[1]
  raise EndOfData(f"the schedule ended after {session.version} steps")


def _submit_groups(session: Session, count: int) -> list[int]:
  """Hands the actor this many groups, fewer if the data end; returns their tickets."""
  return [ticket for _ in range(count) if (ticket := session.submit_group()) is not None]


def _sample_assigned(session: Session, groups_per_step: int) -> None:
  """Finishes all groups, and other ones in place of those that failed."""
  session.stop.activity = f"sampling for step {session.version + 1}"
  assigned = session.host_state.assigned
  replaced = True
  while replaced:
    session.actor.finish_groups(session.stop.check)
    complete = {group.request.ticket for group in session.buffer.groups()}
    replaced = False
    for step, tickets in assigned.items():
      good = [ticket for ticket in tickets if ticket in complete]
      replacements = _submit_groups(session, len(tickets) - len(good))
      assigned[step] = good + replacements
      replaced = replaced or bool(replacements)
  if any(len(tickets) < groups_per_step for tickets in assigned.values()):  # the data ended
    left = [ticket for _, tickets in sorted(assigned.items()) for ticket in tickets]
    for step in sorted(assigned):
      assigned[step], left = left[:groups_per_step], left[groups_per_step:]
