"""Runs `_measure` in child processes: whatever its compiler does, the plan goes on with the next program."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from experiments.plan._request import Request

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Seconds until a child has imported everything and built the run.
_START_SECONDS = 300


def measure_all(request: Request, limit: float, names: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns what `_measure` prints first, and its results by program.

  A program at which the compiler aborted, or that took longer than `limit` seconds, has an "error".

  Args:
    request: the run to plan.
    limit: the seconds that each program may take.
    names: the programs, or first words of their names; none for all.

  Raises:
    ValueError: if the run cannot be built; with the child's last words.
  """
  head: dict[str, Any] = {}
  results: dict[str, Any] = {}
  left = list(names)
  while left or not head:
    current = None
    for message in _messages(request, left, limit):
      if "failed" in message:
        if current is None:
          raise ValueError(message["failed"])
        results[current] = {"error": message["failed"]}
      elif "program" in message:
        current = message["program"]
        results[current] = message
      else:
        head = message
    left = [name for name in select(head["programs"], names) if name not in results]
  return head, results


def select(programs: Iterable[str], names: Sequence[str]) -> list[str]:
  """Returns the programs whose names, or first words of them, are among `names`; all if there are none."""
  return [name for name in programs if not names or name in names or name.partition(" ")[0] in names]


def _messages(request: Request, names: list[str], limit: float) -> Iterator[dict[str, Any]]:
  """Yields what one child prints, and {"failed": reason} if it ended badly."""
  command = [sys.executable, "-m", "experiments.plan._measure", *names]
  pipe = subprocess.PIPE
  with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment()) as child:
    assert child.stdin is not None
    child.stdin.write(request.to_json())
    child.stdin.close()
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str | None] = []
    threads = [
      threading.Thread(target=_forward, args=(child.stdout, lines.put)),
      threading.Thread(target=_forward, args=(child.stderr, errors.append)),
    ]
    for thread in threads:
      thread.start()
    seconds: float = _START_SECONDS
    try:
      while (line := lines.get(timeout=seconds)) is not None:
        if line.startswith("{"):
          message = json.loads(line)
          yield message
          seconds = limit if "program" in message else seconds
    except queue.Empty:
      child.kill()
      yield {"failed": f"it took longer than {seconds:.0f} seconds"}
    else:
      if child.wait():
        threads[1].join()
        words = "".join(x for x in errors if x).strip().splitlines()
        yield {"failed": _last_words(words) or f"the compiler ended with status {child.returncode}"}
    finally:
      child.kill()
      for thread in threads:
        thread.join()


def _forward(stream: Any, take: Any) -> None:
  for line in stream:
    take(line)
  take(None)


def _last_words(lines: list[str]) -> str:
  """Returns the line that tells why a process ended: a failed check of the compiler, or the exception's message."""
  for line in lines:
    if match := re.match(r"F\d{4} .*?\] (.*)", line):  # a fatal line of the compiler's log
      return match[1].strip()
  for line in reversed(lines):
    if line.strip() and not line.startswith((" ", "\t", "@", "*")):
      return re.sub(r"^(ValueError|ImportError): ", "", line.strip())
  return ""


def _environment() -> dict[str, str]:
  """Returns the environment of a child: JAX on the CPU."""
  return os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # programs for devices that are not there cannot be read back
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud machine's metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it only compiles, so that others may do so, too
    "XLA_FLAGS": "",  # libtpu refuses others' flags
  }
