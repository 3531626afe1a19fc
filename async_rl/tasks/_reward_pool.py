"""Rewards and the answers of tools, in worker processes that can be killed."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np

from async_rl._monitor import Monitor
from async_rl.tasks._task import Task
from async_rl.tasks._task import ToolTask
from async_rl.types import Prompt

#: The seconds in which a worker must start, import the task's module and warm up.
START_LIMIT_S = 300.0
#: The largest reward: rewards are trained as float32, in which a larger one would be infinite.
MAX_REWARD = float(np.finfo(np.float32).max)
#: The longest time limit of a reward, 11 days: the operating system waits no longer than 24.
MAX_TIMEOUT_S = 1e6
#: Maximum length of a tool answer, in characters.
MAX_ANSWER_CHARS = 1 << 16


class RewardResult(NamedTuple):
  """The outcome of one judgment.

  Attributes:
    value: the reward, finite in float32; a stand-in where `failed`.
    failed: whether the reward function failed. A wrong answer is no failure.
    reason: the cause of the failure, "" if there is none; its first word is `timeout`, `died`, `raised`, `non-finite`
      or `closed`.
  """

  value: float
  failed: bool = False
  reason: str = ""


class ToolResult(NamedTuple):
  """The outcome of one tool call.

  Attributes:
    text: the task's turn; None if the model's was the last one, or where `failed`.
    failed: whether `respond` failed. An error that the tool reports in its text is no failure.
    reason: the cause of the failure as in `RewardResult`; its first word may also be `too-long`.
  """

  text: str | None
  failed: bool = False
  reason: str = ""


class Scorer(Protocol):
  """A source of rewards for a run: a `RewardPool`, or a reward model."""

  @property
  def failures(self) -> dict[str, int]:
    """Returns how many judgments failed so far, by the first word of the reason."""

  @property
  def first_reasons(self) -> tuple[str, ...]:
    """Returns the reason of the first failure of each kind, in the order in which they occurred."""

  def submit(self, prompt: Prompt, text: str, finish: str) -> Future[RewardResult]:
    """Queues one completion."""

  def close(self) -> None:
    """Ends the work; completions that wait are canceled."""


def judge(task: Task, prompt: Prompt, text: str, finish: str) -> RewardResult:
  """Calls `task.reward` in this process; whatever it raises or returns, the result is a finite float32 number."""
  try:
    value = float(task.reward(prompt, text, finish))
  except (Exception, SystemExit) as error:
    return RewardResult(0.0, True, _raised(error))
  if not abs(value) <= MAX_REWARD:
    return RewardResult(0.0, True, f"non-finite reward {value}")
  return RewardResult(value)


def answer(task: ToolTask, prompt: Prompt, turns: Sequence[str]) -> ToolResult:
  """Calls `task.respond` in this process; whatever it raises or returns, the result is a text of bounded length."""
  try:
    text = task.respond(prompt, turns)
    if isinstance(text, str):
      text.encode()  # lone surrogates cannot be tokenized
  except (Exception, SystemExit) as error:
    return ToolResult(None, True, _raised(error))
  if not isinstance(text, str | None):
    return ToolResult(None, True, f"raised TypeError: respond returned {type(text).__name__}, not a text")
  if text is not None and len(text) > MAX_ANSWER_CHARS:
    return ToolResult(None, True, f"too-long answer of {len(text)} characters, more than {MAX_ANSWER_CHARS}")
  return ToolResult(text)


def _raised(error: BaseException) -> str:
  """Returns a line about an error, also about one whose text cannot be had."""
  try:
    text = " ".join(str(error).split())
  except Exception as second:
    text = f"(its text raises {type(second).__name__})"
  return f"raised {type(error).__name__}: {text}"[:500]


#: Calls a worker can serve: the function, and the result to report if the call fails. Those listed first are served
#: first: generation waits for the answers of tools.
CALLS: dict[str, tuple[Any, Any]] = {
  "respond": (answer, ToolResult(None, failed=True)),
  "reward": (judge, RewardResult(0.0, failed=True)),
}
#: One call: its name, and the arguments after the task.
_Job = tuple[str, tuple[Any, ...]]
_CLOSED = "closed before the result was known"


def _failed(job: _Job, reason: str) -> Any:
  return CALLS[job[0]][1]._replace(reason=reason)


def _pickle_task(task: Task) -> bytes:
  try:
    return pickle.dumps(task)
  except Exception as error:
    raise ValueError(
      f"{type(task).__name__} cannot be sent to reward workers ({error}): keep functions and open files out of its "
      "fields, or use workers=0"
    ) from error


class RewardPool:
  """Scores completions in worker processes, each of which is killed and replaced when it exceeds the time limit.

  The same workers answer for the tools of a `ToolTask`, with the same safety.

  The pool is bounded: `submit` blocks while `capacity` completions wait. A verifier that hangs, crashes its process
  (also by `os._exit` or by running out of memory), raises, or returns NaN costs one sample, which is scored
  `failure_value` and counted in `failures`; everything else goes on. A task that cannot be loaded in a worker is a
  mistake in the program and is raised as RuntimeError.

  With `workers=0` the rewards are computed by the caller of `submit`: no process, no time limit, the same results.

  >>> from async_rl import tasks
  >>> task = tasks.make("sums")
  >>> prompt = task.prompt(0, (12, 34, 56))
  >>> with tasks.RewardPool(task, workers=0) as pool:
  ...   pool.submit(prompt, "34+012=046;56+046=102", "stop").result()
  RewardResult(value=1.0, failed=False, reason='')
  """

  def __init__(
    self,
    task: Task,
    workers: int,
    timeout_s: float = 10.0,
    *,
    failure_value: float = 0.0,
    capacity: int = 4096,
    memory_bytes: int = 8 << 30,
  ):
    """Starts the workers, which get ready in the background.

    Args:
      task: an importable, picklable task.
      workers: number of processes; 0 computes in the caller.
      timeout_s: seconds that one reward may take, at most `MAX_TIMEOUT_S`.
      failure_value: the reward of a sample whose judgment failed. It should not exceed that of a wrong answer, or
        the policy learns to break the verifier.
      capacity: completions that may wait before `submit` blocks.
      memory_bytes: address space of one worker; beyond it the reward gets a MemoryError.
    """
    if workers < 0 or not 0 < timeout_s <= MAX_TIMEOUT_S or capacity < 1:
      raise ValueError(
        f"workers must be >= 0, timeout_s > 0 and <= {MAX_TIMEOUT_S:g}, and capacity >= 1, got workers={workers}, "
        f"timeout_s={timeout_s}, capacity={capacity}"
      )
    if not abs(failure_value) <= MAX_REWARD:
      raise ValueError(f"failure_value must be finite in float32, got failure_value={failure_value}")
    if workers and type(task).__module__ == "__main__":
      raise ValueError(f"{type(task).__name__} is defined in __main__: move it to a module, or use workers=0")
    self._task = task
    self._timeout_s = timeout_s
    self.failure_value = failure_value
    self._capacity = capacity
    self._boot = (memory_bytes, _pickle_task(task) if workers else b"")
    self._monitor = Monitor("the reward pool")
    self._waiting: dict[str, collections.deque[tuple[Future[Any], _Job]]] = {
      name: collections.deque() for name in CALLS
    }
    self._failures: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in CALLS}
    self._first_reasons: list[str] = []
    self._workers = [_Worker(self._boot) for _ in range(workers)]
    self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(workers)]
    for thread in self._threads:
      thread.start()

  @property
  def failures(self) -> dict[str, int]:
    """Returns how many judgments failed so far, by the first word of the reason."""
    with self._monitor:
      return dict(self._failures["reward"])

  @property
  def tool_failures(self) -> dict[str, int]:
    """Returns how many calls of tools failed so far, by the first word of the reason."""
    with self._monitor:
      return dict(self._failures["respond"])

  @property
  def first_reasons(self) -> tuple[str, ...]:
    """Returns the reason of the first failure of each kind, of rewards and tools, in the order of occurrence."""
    with self._monitor:
      return tuple(self._first_reasons)

  def submit(self, prompt: Prompt, text: str, finish: str) -> Future[RewardResult]:
    """Queues one completion; blocks while the pool is full.

    Raises:
      RuntimeError: if the pool is closed, or its workers cannot load the task.
    """
    return self._submit(("reward", (prompt, text, finish)))

  def respond(self, prompt: Prompt, turns: Sequence[str]) -> Future[ToolResult]:
    """Queues a call of the task's `respond`; such calls are served before rewards. Else like `submit`."""
    return self._submit(("respond", (prompt, tuple(turns))))

  def _submit(self, job: _Job) -> Future[Any]:
    future: Future[Any] = Future()
    if not self._threads:
      self._monitor.check_open()
      future.set_result(self._counted(job, CALLS[job[0]][0](self._task, *job[1])))
      return future
    with self._monitor:
      self._monitor.wait_for(lambda: self._count() < self._capacity)
      self._monitor.check_open()
      self._waiting[job[0]].append((future, job))
      self._monitor.notify()
    return future

  def close(self) -> None:
    """Kills the workers and cancels the calls that wait. Idempotent; never waits for a reward."""
    with self._monitor:
      self._monitor.close()
      for future, _ in self._take_waiting():
        future.cancel()
      for worker in self._workers:
        worker.signal()
    for thread in self._threads:
      thread.join(timeout=10)

  def __enter__(self) -> RewardPool:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _count(self) -> int:
    """Returns the number of calls that wait."""
    return sum(map(len, self._waiting.values()))

  def _take_waiting(self) -> Iterator[tuple[Future[Any], _Job]]:
    """Removes and yields the calls that wait, in the order in which they are served."""
    for queue in self._waiting.values():
      while queue:
        yield queue.popleft()

  def _counted(self, job: _Job, result: Any) -> Any:
    if not result.failed:
      return result
    kind = result.reason.split()[0]
    with self._monitor:
      if not self._failures[job[0]][kind]:
        self._first_reasons.append(f"{job[0]}: {result.reason}")
      self._failures[job[0]][kind] += 1
    return result._replace(value=self.failure_value) if job[0] == "reward" else result

  def _serve(self, index: int) -> None:
    """Runs the thread of one worker: hands it one job at a time until the pool closes."""
    while True:
      with self._monitor:
        if not self._monitor.wait_for(self._count):
          break
        future, job = next(self._take_waiting())
        self._monitor.notify()
      if not future.set_running_or_notify_cancel():
        continue
      try:
        future.set_result(self._counted(job, self._call(index, job)))
      except Exception as error:
        future.set_exception(error)
    self._workers[index].kill()

  def _call(self, index: int, job: _Job) -> Any:
    """Has worker `index` serve one call, and replaces the worker if it must be killed."""
    worker = self._workers[index]
    if not worker.idle():
      worker = self._replace(index)
    try:
      worker.wait_ready()
    except RuntimeError as error:
      return self._give_up(error, job)
    try:
      worker.connection.send(job)
      if worker.connection.poll(self._timeout_s):
        return worker.connection.recv()
      reason = f"timeout after {self._timeout_s} s"
    except (EOFError, ConnectionError):
      reason = f"died with exit status {worker.kill()}"
    if self._monitor.closed:
      return _failed(job, _CLOSED)
    self._replace(index)
    return _failed(job, reason)

  def _replace(self, index: int) -> _Worker:
    self._workers[index].kill()
    with self._monitor:  # close() kills what it sees; a worker started after it would be left behind
      if not self._monitor.closed:
        self._workers[index] = _Worker(self._boot)
    return self._workers[index]

  def _give_up(self, error: RuntimeError, job: _Job) -> Any:
    """A worker that cannot start is no fault of a sample: the pool is broken, and everyone who waits is told."""
    with self._monitor:
      if self._monitor.closed:
        return _failed(job, _CLOSED)
      self._monitor.close(error)
      for future, _ in self._take_waiting():
        if future.set_running_or_notify_cancel():
          future.set_exception(error)
    raise error


class _Worker:
  """One worker process and the socket to it. Its methods are called by one thread, except `signal`."""

  def __init__(self, boot: tuple[int, bytes]):
    self.connection, theirs = multiprocessing.connection.Pipe()
    environment = os.environ | {
      "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
      "JAX_PLATFORMS": "cpu",  # a verifier that does import JAX must not take the accelerator
      "OMP_NUM_THREADS": "1",
    }
    with theirs:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "async_rl.tasks._reward_worker", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # away from the terminal's Ctrl-C, and killed with the children it may start
      )
    self._ready = False
    with contextlib.suppress(ConnectionError):  # found out by wait_ready
      self.connection.send(boot)

  def idle(self) -> bool:
    """Returns whether the process lives and owes no answer."""
    return self._process.poll() is None

  def wait_ready(self) -> None:
    """Waits until the task is loaded. Raises RuntimeError if that fails."""
    if self._ready:
      return
    try:
      error = self.connection.recv() if self.connection.poll(START_LIMIT_S) else f"no answer after {START_LIMIT_S} s"
    except (EOFError, ConnectionError):
      error = f"it died with exit status {self.kill()}"
    if error:
      self.kill()
      raise RuntimeError(f"a reward worker could not load the task: {error}")
    self._ready = True

  def signal(self) -> None:
    """Sends the kill and returns at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      if self._process.returncode is None:
        os.killpg(self._process.pid, signal.SIGKILL)

  def kill(self) -> int:
    """Kills the process with its children, reaps it, and returns its exit status."""
    self.signal()
    status = self._process.wait()
    self.connection.close()
    return status
