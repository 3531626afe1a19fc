"""Runs a job on machines: created, followed, deleted and created again after a preemption, in one loop for all."""

from __future__ import annotations

import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import TypeVar

from experiments.launch._commands import Command
from experiments.launch._commands import CommandError
from experiments.launch._commands import run
from experiments.launch._commands import run_unless_missing
from experiments.launch._commands import say
from experiments.launch._follow import Follower
from experiments.launch._job import RESTART_STATUSES
from experiments.launch._job import show
from experiments.launch._machines import Condition
from experiments.launch._machines import Host
from experiments.launch._machines import Machines
from experiments.launch._machines import find_state
from experiments.launch._script import pack_code
from experiments.launch._script import render_script

#: The exit status of a launch whose run was lost more often than allowed: that of SIGTERM.
_LOST_STATUS = 143
#: Tries of a command that may fail for a while, as networks do.
_TRIES = 30
#: Tries of SSH, whose keys need a while to arrive at a host, and seconds of each.
_SSH_TRIES = 6
_SSH_SECONDS = 180.0
_OTHER_NAME = "delete it, or give another --name"
T = TypeVar("T")


class LaunchError(RuntimeError):
  """The run cannot be launched; the message is one sentence for the user."""


class Drive:
  """A run on machines.

  Args:
    machines: the machines and the run.
    folder: the local folder of copies of what the hosts leave; it gets a folder for each attempt.
  """

  def __init__(self, machines: Machines, folder: pathlib.Path):
    self._machines, self._folder, self._attempt = machines, folder, 0
    self._job, self._place = machines.job, machines.place
    self._staging = self._place.staging_of(self._job)

  def __call__(self) -> int:
    """Runs the job to its end and returns its exit status; what still runs from an earlier launch is followed."""
    self._attempt = self._count_attempts()
    restarts, status = 0, self._join()
    while status is None or (status in RESTART_STATUSES and restarts < self._job.max_restarts):
      if status is not None:
        restarts += 1
        self._delete()
        say(f"Restart {restarts} of at most {self._job.max_restarts}: the run resumes from its checkpoint.")
      self._attempt += 1
      self._create()
      status = self._follow(self._wait_until_ready())
    return self._end(status)

  def _end(self, status: int) -> int:
    """Says how the run ended, and deletes its machines; returns its exit status."""
    if status in RESTART_STATUSES:
      say(f"The run was lost after {self._job.max_restarts} restarts; the same command resumes it.")
    elif status:
      say(f"The run failed with status {status}, which a restart would not help.")
    else:
      say("The run is done.")
    say(f"Logs: {self._folder} and {self._staging}")
    if self._place.keep_machines and status not in RESTART_STATUSES:
      say(f"The machines of {self._job.name} are kept; delete them, or start the same command again.")
    else:
      self._delete()
    return status

  def _join(self) -> int | None:
    """Follows the run of an earlier launch; where that has ended, starts another one on its machines.

    Returns:
      The exit status, or `None` if there are no machines.

    Raises:
      LaunchError: if there are machines of this name that no launch of this run has created.
    """
    state = find_state(self._machines, run)
    if state.condition is Condition.MISSING:
      return None
    if not self._attempt:
      raise LaunchError(f"{self._job.name} exists, but not by a launch of this run; {_OTHER_NAME}")
    if state.condition in (Condition.LOST, Condition.FAILED):
      say(f"The machines of an earlier launch are {state.words}.")
      self._delete()
      return None
    hosts = self._wait_until_ready()
    follower = self._make_follower(hosts)
    self._copy()
    follower.look()
    if not follower.ended:
      say(f"The run of an earlier launch goes on: following it (attempt {self._attempt}).")
      return self._follow(hosts, follower)
    say("The run of an earlier launch has ended: starting it again on its machines.")
    self._attempt += 1
    script = self._upload().read_text()
    for host in hosts:
      self._start_again(host, script)
    return self._follow(hosts)

  @property
  def _local(self) -> pathlib.Path:
    """Returns the local folder of the attempt."""
    return self._folder / attempt_name(self._attempt)

  def _count_attempts(self) -> int:
    """Returns the number of the last attempt, 0 if there was none."""
    try:
      listed = run(("gcloud", "storage", "ls", *self._place.account, f"{self._staging}/"))
    except CommandError as error:
      if "matched no objects" in str(error) or error.kind == "missing":
        return 0
      raise
    names = [line.rstrip("/").rpartition("/")[2] for line in listed.split()]
    return max((int(name) for name in names if name.isdigit()), default=0)

  def _upload(self) -> pathlib.Path:
    """Puts the code of the attempt into the bucket; returns the file of its start-up script."""
    self._local.mkdir(parents=True, exist_ok=True)
    code, script = self._local / "code.tar.gz", self._local / "start.sh"
    pack_code(code)
    self._patiently(lambda: run(upload_command(self._machines, code, self._attempt)))
    script.write_text(script_of(self._machines, self._attempt))
    return script

  def _create(self) -> None:
    """Creates the machines, as soon as there are some.

    Raises:
      LaunchError: if the quota does not suffice, or waiting took too long.
      CommandError: if another command of the cloud fails.
    """
    script = self._upload()
    deadline = time.monotonic() + 3600 * self._place.wait_hours
    first = self._attempt == 1
    say(f"Creating {self._job.name}: {self._job}.")
    while error := self._try_to_create(str(script)):
      if error.kind == "exists" and first:
        raise LaunchError(f"{error} ({_OTHER_NAME})") from error
      self._delete()  # the parts that were created, now or by an earlier launch
      if error.kind == "quota":
        raise LaunchError(f"{error} (ask for more quota, or take another zone or --spot)") from error
      if error.kind == "other" and first:  # later, it may be the network
        raise error
      if time.monotonic() > deadline:
        raise LaunchError(f"no machines within {self._place.wait_hours:g} hours: {error}") from error
      say(f"Not created, trying again: {error}")
      time.sleep(3 * self._place.poll_seconds)

  def _try_to_create(self, script: str) -> CommandError | None:
    """Creates the machines; returns the failure of one of the commands."""
    try:
      for command in self._machines.create(script):
        run(command)
    except CommandError as error:
      return error
    return None

  def _wait_until_ready(self) -> list[Host]:
    """Waits for the machines and returns their hosts; an empty list if they were lost meanwhile.

    Raises:
      LaunchError: if there will be none, or waiting took too long.
    """
    said, deadline = "", time.monotonic() + 3600 * self._place.wait_hours
    while True:
      state = self._patiently(lambda: find_state(self._machines, run))
      if state.words != said:
        say(f"The machines are {state.words}.")
        said = state.words
      if state.condition is Condition.READY:
        return self._patiently(lambda: self._machines.list_hosts(run))
      if state.condition is Condition.FAILED:
        self._delete()
        raise LaunchError(f"there will be no machines: {state.words}")
      if state.condition is not Condition.WAITING:
        return []
      if time.monotonic() > deadline:
        self._delete()
        raise LaunchError(f"the machines were not ready within {self._place.wait_hours:g} hours")
      time.sleep(self._place.poll_seconds)

  def _follow(self, hosts: list[Host], follower: Follower | None = None) -> int:
    """Prints the logs of the attempt until it ends; returns its exit status, or one of restarts if it was lost."""
    if not hosts:
      return _LOST_STATUS
    follower = follower or self._make_follower(hosts)
    looks = math.ceil(60 * self._place.silent_minutes / self._place.poll_seconds)
    while True:
      state = self._patiently(lambda: find_state(self._machines, run))
      self._patiently(self._copy)
      follower.look()
      if follower.status == 0:
        return 0
      if state.condition not in (Condition.READY, Condition.WAITING):
        say(f"The machines are {state.words}.")
        return _LOST_STATUS
      if follower.status is not None:
        return follower.status
      if silent := follower.find_silent(looks):
        say(silent)
        return _LOST_STATUS
      time.sleep(self._place.poll_seconds)

  def _make_follower(self, hosts: list[Host]) -> Follower:
    """Returns a reader of the attempt's folder, without copies of an earlier run of the same name."""
    self._local.mkdir(parents=True, exist_ok=True)
    for file in (*self._local.glob("*.log"), *self._local.glob("*.state")):
      file.unlink()
    return Follower(self._local, len(hosts))

  def _copy(self) -> None:
    """Copies what the hosts left to the local folder of the attempt."""
    run(copy_command(self._machines, self._folder, self._attempt))

  def _patiently(self, ask: Callable[[], T], tries: int = _TRIES) -> T:
    """Returns what `ask` returns, which may fail for a while."""
    for left in reversed(range(tries)):
      try:
        return ask()
      except CommandError as error:
        if not left:
          raise
        say(f"{error} ({left} tries left)")
        time.sleep(self._place.poll_seconds)
    raise AssertionError

  def _start_again(self, host: Host, script: str) -> None:
    """Starts a script on a host by SSH."""
    command = self._machines.shell(host, START_AGAIN)
    self._patiently(lambda: run(command, text=script, timeout=_SSH_SECONDS), _SSH_TRIES)

  def _delete(self) -> None:
    """Deletes the machines; what is missing is no error."""
    for command in self._machines.delete():
      self._patiently(functools.partial(run_unless_missing, command))


#: What a host runs, by SSH, to start the script that it reads from its standard input.
START_AGAIN = "cat > start.sh && sudo bash start.sh"


def attempt_name(attempt: int) -> str:
  """Returns the name of the folders of an attempt."""
  return f"{attempt:04}"


def script_of(machines: Machines, attempt: int) -> str:
  """Returns the start-up script of an attempt."""
  place = machines.place
  staging = f"{place.staging_of(machines.job)}/{attempt_name(attempt)}"
  return render_script(
    machines.job, staging, extras=place.extras, prepare=place.prepare, join_by_bucket=machines.join_by_bucket
  )


def upload_command(machines: Machines, file: pathlib.Path, attempt: int) -> Command:
  """Returns the command that puts the code of an attempt into the bucket."""
  target = f"{machines.place.staging_of(machines.job)}/{attempt_name(attempt)}/code.tar.gz"
  return ("gcloud", "storage", "cp", *machines.place.account, str(file), target)


def copy_command(machines: Machines, folder: pathlib.Path, attempt: int) -> Command:
  """Returns the command that copies what the hosts of an attempt left."""
  name = attempt_name(attempt)
  source = f"{machines.place.staging_of(machines.job)}/{name}"
  options = ("--recursive", "--exclude=code.tar.gz")
  return ("gcloud", "storage", "rsync", *machines.place.account, *options, source, str(folder / name))


def describe_launch(machines: Machines, folder: pathlib.Path, plan: Command | None) -> str:
  """Returns what a launch would run, and the whole start-up script of its hosts."""
  place, attempt = machines.place, 1
  local = folder / attempt_name(attempt)
  polls = f"every {place.poll_seconds:g} s"
  first_host = Host(machines.job.name, None if machines.join_by_bucket else 0)
  restarts = f"{machines.job.max_restarts} restarts at most"
  steps: list[tuple[str, list[Command]]] = [
    ("Plan; what does not fit is refused", [plan] if plan else []),
    ("Upload the code", [upload_command(machines, local / "code.tar.gz", attempt)]),
    (f"Create, again while there is no capacity, for {place.wait_hours:g} h", machines.create(str(local / "start.sh"))),
    (f"Wait until they are ready, and see whether they are still there, {polls}", [machines.describe()]),
    (f"Follow the logs and the states of all hosts, {polls}", [copy_command(machines, folder, attempt)]),
    (f"Delete, at the end; or after a preemption, and go on from the upload, {restarts}", machines.delete()),
    ("Start again on machines that were kept, on every host", [machines.shell(first_host, START_AGAIN)]),
  ]
  lines = [f"# {machines.job}"]
  for title, commands in steps:
    if commands:
      lines += ["", f"# {title}.", *map(show, commands)]
  return "\n".join([*lines, "", f"# {local / 'start.sh'}, which every host runs:", script_of(machines, attempt)])
