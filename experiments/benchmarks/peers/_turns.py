"""Systems in processes of their own, which work in turns."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import numpy as np

if TYPE_CHECKING:  # a process imports what its own system needs, no more
  from experiments.benchmarks.peers._work import Work


class System(NamedTuple):
  """A system: its name, the module with its `describe` and parts, and the packages that must be installed."""

  name: str
  module: str
  packages: tuple[str, ...] = ()

  def missing(self) -> list[str]:
    """Returns the packages that are not installed."""
    return [package for package in self.packages if importlib.util.find_spec(package) is None]


class Failed(Exception):
  """A system gave no result; the message is the reason."""


class Worker:
  """A process in which a system is ready to repeat a part of the work.

  Args:
    system: the system.
    part: the part.
    work: the work.
    limit: seconds after which no answer is waited for.

  Raises:
    Failed: if packages are missing.
  """

  def __init__(self, system: System, part: str, work: Work, limit: float):
    if system.missing():
      raise Failed(f"not installed: {', '.join(system.missing())}")
    context = multiprocessing.get_context("spawn")
    self._connection, remote = context.Pipe()
    self._limit = limit
    self._process = context.Process(target=_serve, args=(remote, system.module, part, work), daemon=True)
    self._process.start()
    remote.close()

  def describe(self) -> dict[str, Any]:
    """Waits until it is ready; returns device and versions, with the seconds of its start, imports included, and of its
    first run, during which other systems may start.

    Raises:
      Failed: if it could not do the part once.
    """
    return self._receive()

  def run(self) -> tuple[float, float]:
    """Does the part once; returns its seconds, and those of its process on all cores."""
    with contextlib.suppress(OSError):  # if it ended, there is no answer either
      self._connection.send(True)
    return self._receive()

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.join()

  def _receive(self) -> Any:
    if not self._connection.poll(self._limit):
      raise Failed(f"no answer within {self._limit:g} s")
    try:
      answer = self._connection.recv()
    except (EOFError, OSError):
      self._process.join()
      raise Failed(f"the process ended with status {self._process.exitcode}") from None
    if isinstance(answer, Failed):
      raise answer
    return answer


def _serve(connection: Connection, module: str, part: str, work: Work) -> None:
  """Makes a part of a system ready, and repeats it whenever it is asked to; sends seconds, or the exception."""
  start = time.perf_counter()
  try:
    system = importlib.import_module(module)
    run = getattr(system, part)(work)
    ready = time.perf_counter()
    run()
    first = time.perf_counter()
    run()  # some compile in the second run, too
    connection.send(system.describe() | {"start_s": round(ready - start, 1), "first_s": round(first - ready, 1)})
    while connection.recv():
      start, cpu = time.perf_counter(), time.process_time()
      run()
      connection.send((time.perf_counter() - start, time.process_time() - cpu))
  except (EOFError, BrokenPipeError):  # nobody asks any more
    return
  except Exception as error:
    connection.send(Failed(f"{type(error).__name__}: {error}"[:500]))
    raise  # its traceback is for whoever watches


def take_turns(
  systems: Sequence[System], part: str, work: Work, repeats: int, limit: float
) -> dict[str, dict[str, Any]]:
  """Lets systems do a part of the work in turns, each in a process of its own.

  Args:
    systems: the systems, of distinct names.
    part: one of `PARTS`.
    work: the work.
    repeats: rounds; every system works once in each, another one first in each.
    limit: seconds after which a system's answer is not waited for, compilation included.

  Returns:
    by the name of each system its device, versions, and `seconds` and `cpu_seconds`, one per round, the latter those
    of its process on all cores; or `failed`, the reason, with the seconds of the rounds until then.
  """
  rows: dict[str, dict[str, Any]] = {}
  workers: dict[str, Worker] = {}
  try:
    for system in systems:  # they get ready side by side
      try:
        workers[system.name] = Worker(system, part, work, limit)
      except Failed as error:
        rows[system.name] = {"failed": str(error)}
    for name in list(workers):
      try:
        rows[name] = workers[name].describe() | {"seconds": [], "cpu_seconds": []}
      except Failed as error:
        rows[name] = {"failed": str(error)}
        workers.pop(name).close()
    for turn in range(repeats):
      order = collections.deque(workers)
      order.rotate(-turn)
      for name in order:
        try:
          seconds, cpu_seconds = workers[name].run()
          rows[name]["seconds"].append(round(seconds, 4))
          rows[name]["cpu_seconds"].append(round(cpu_seconds, 4))
        except Failed as error:
          rows[name]["failed"] = str(error)
          workers.pop(name).close()
  finally:
    for worker in workers.values():
      worker.close()
  return {system.name: rows[system.name] for system in systems}


def summarize(rows: dict[str, dict[str, Any]], tokens: int, reference: str) -> dict[str, dict[str, Any]]:
  """Returns rows with what follows from their seconds.

  Args:
    rows: as from `take_turns`.
    tokens: the tokens of one run.
    reference: the name of the system to whose seconds in the same round the others' are compared.

  Returns:
    the rows; those without `failed` have also `median_s`, `range_s` (shortest and longest), `tokens_per_s` (at the
    median) and, where the reference did not fail, `times_reference`: the median of their seconds by the reference's,
    round by round, the least and the largest; and `cpu_times_reference`, the same of `cpu_seconds`.
  """
  result = {}
  base = rows.get(reference, {"failed": "left out"})
  for name, row in rows.items():
    result[name] = dict(row)
    if "failed" in row:
      continue
    median = float(np.median(row["seconds"]))
    result[name] |= {
      "median_s": round(median, 4),
      "range_s": [min(row["seconds"]), max(row["seconds"])],
      "tokens_per_s": round(tokens / median, 1),
    }
    if "failed" not in base:
      for prefix in ("", "cpu_"):
        ratios = np.divide(row[f"{prefix}seconds"], base[f"{prefix}seconds"])
        spread = np.median(ratios), ratios.min(), ratios.max()
        result[name][f"{prefix}times_reference"] = [round(float(x), 2) for x in spread]
  return result
