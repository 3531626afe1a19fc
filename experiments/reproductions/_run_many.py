"""Makes many runs on one machine: in several processes that share its devices, in order of priority, within a time."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

if TYPE_CHECKING:
  from async_rl.runtime import Experiment

#: Share of a GPU's memory that all processes together may take.
_MEMORY = 0.9
#: Seconds that a process has to save its run at the end of the time, before it is killed.
_GRACE = 15.0


class Outcome(NamedTuple):
  """What became of a job.

  Attributes:
    job: the job.
    result: what `work` returned, `None` if it failed.
    error: the traceback if it failed, else "".
    seconds: how long it took.
  """

  job: Any
  result: Any
  error: str
  seconds: float


def run_many(
  work: Callable[[Any], Any],
  jobs: Sequence[Any],
  workers: int = 1,
  seconds: float = math.inf,
  cores: Sequence[int] | None = None,
) -> Iterator[Outcome]:
  """Yields the outcome of every job when it ends.

  A process takes the next job when it has ended one, so that programs that are compiled alike are compiled once a
  process. On a GPU the processes share its memory in equal parts, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise;
  the caller must not use the GPU meanwhile. No job starts when less time is left than the shortest took; those
  that still run at the end get SIGTERM, after which a run of the trainer saves itself and can be resumed. A process
  that dies costs the job that it had, and is replaced.

  Args:
    work: the function that does a job; like the jobs and results, it is pickled: define it in a module.
    jobs: the jobs, the most urgent first. Those of a deque leave it when they begin, and the caller may change those
      that are left between two outcomes, as where jobs follow from results.
    workers: the number of processes.
    seconds: the time until the processes are ended.
    cores: a CPU core for each process to keep to, so that it has no second thread that computes; `None` lets the system
      place them.

  Raises:
    ValueError: if there are fewer cores than processes.
  """
  if cores is not None and len(cores) < workers:
    raise ValueError(
      f"*cores* must have one for each of {workers} workers, got cores={list(cores)}; name one repeatedly."
    )
  end, shortest = time.monotonic() + seconds, 0.0
  waiting = jobs if isinstance(jobs, deque) else deque(jobs)
  running: list[_Worker] = []
  try:
    count = workers if waiting is jobs else min(workers, len(waiting))
    running = [_Worker(work, workers, None if cores is None else cores[i]) for i in range(count)]
    while True:
      for worker in running:
        if worker.job is None and waiting and end - time.monotonic() > shortest:
          worker.begin(waiting.popleft())
      busy = {worker.pipe: worker for worker in running if worker.job is not None}
      left = end - time.monotonic()
      if not busy or left <= 0:
        return
      for pipe in connection.wait(list(busy), None if math.isinf(left) else left):
        worker = busy[pipe]  # type: ignore[index]
        outcome = worker.finish()
        if outcome is None:
          running[running.index(worker)] = _Worker(work, workers, worker.core)
          outcome = Outcome(worker.job, None, f"its process died with status {worker.status}", worker.seconds)
        elif not outcome.error:
          shortest = min(shortest or math.inf, outcome.seconds)
        yield outcome
  finally:
    _end(running)


def train(experiment: Experiment) -> None:
  """Makes a run of the trainer as a job: its programs are kept, and the end of the time ends it without a traceback.

  Args:
    experiment: the run.

  Raises:
    runtime.Diverged: if it diverges.
  """
  from async_rl import runtime  # not above: other jobs do without JAX

  try:
    with runtime.join_hosts(experiment.options.devices) as hosts:
      runtime.train(experiment, hosts)
  except runtime.Interrupted as stop:
    print(stop, flush=True)
    sys.exit(stop.status)


class _Worker:
  """A process and the job that it has."""

  def __init__(self, work: Callable[[Any], Any], workers: int, core: int | None):
    context = multiprocessing.get_context("spawn")  # JAX has threads, which a fork does not survive
    self.pipe, other = context.Pipe()
    self.job: Any = None
    self.core = core
    self.process = context.Process(target=_serve, args=(other, work, _MEMORY / workers, core))
    self.process.start()
    other.close()

  def begin(self, job: Any) -> None:
    """Hands over a job."""
    self.job, self._began = job, time.monotonic()
    self.pipe.send(job)

  def finish(self) -> Outcome | None:
    """Takes the outcome of the job; `None` if the process has died."""
    try:
      outcome = self.pipe.recv()
    except EOFError:
      self.process.join()
      return None
    self.job = None
    return outcome

  @property
  def seconds(self) -> float:
    """Returns the seconds since the job began."""
    return time.monotonic() - self._began

  @property
  def status(self) -> int | None:
    """Returns the exit status of the process."""
    return self.process.exitcode


def _serve(pipe: connection.Connection, work: Callable[[Any], Any], memory: float, core: int | None) -> None:
  """Does one job after another, until there is none left."""
  if core is not None:  # JAX has a thread for each core that the process may use when it first computes
    os.sched_setaffinity(0, {core})
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{memory:.3f}")  # JAX reads it when it first needs the GPU
  while (job := pipe.recv()) is not None:
    began, result, error = time.monotonic(), None, ""
    try:
      result = work(job)
    except Exception:
      error = traceback.format_exc()
    pipe.send(Outcome(job, result, error, time.monotonic() - began))


def _end(workers: Sequence[_Worker]) -> None:
  """Ends idle processes at once, busy ones by SIGTERM, and kills those that do not obey in time."""
  for worker in workers:
    if worker.job is not None:
      worker.process.terminate()
    elif worker.process.is_alive():
      worker.pipe.send(None)
  deadline = time.monotonic() + _GRACE
  for worker in workers:
    worker.process.join(max(0.0, deadline - time.monotonic()))
    if worker.process.is_alive():
      worker.process.kill()
      worker.process.join()
    worker.pipe.close()
