"""The reward worker process: `python -m async_rl.tasks._reward_worker FD PARENT`.

It is a fresh interpreter that imports the task's module and nothing else. `multiprocessing` is not used to start it:
its fork copies JAX's threads in unknown states, and its spawn imports the training script, and so JAX, once more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from multiprocessing.connection import Connection


def main(fd: int, parent: int) -> None:
  """Serves the calls that arrive on the socket `fd` until it is closed.

  The first message is the pickled (memory limit in bytes, task), answered by None or by the error; each further one is
  the name of a call and its arguments, answered by a `RewardResult` or a `ToolResult`.
  """
  threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
  connection = Connection(fd)
  try:
    memory_bytes, payload = connection.recv()
    _limit_memory(memory_bytes)
    task = pickle.loads(payload)
    getattr(task, "warm_up", lambda: None)()
    from async_rl.tasks._reward_pool import CALLS
  except Exception as error:
    connection.send(f"{type(error).__name__}: {error}")
    return
  connection.send(None)
  while True:
    try:
      name, arguments = connection.recv()
    except (EOFError, OSError):
      return
    connection.send(CALLS[name][0](task, *arguments))


def _die_with(parent: int) -> None:
  """Ends this process when the trainer has gone, even in the middle of a reward that would never return."""
  while os.getppid() == parent:
    time.sleep(1)
  os._exit(1)


def _limit_memory(memory_bytes: int) -> None:
  """Makes a runaway reward fail with MemoryError instead of taking the host's memory (where the system can)."""
  with contextlib.suppress(ImportError, ValueError, OSError):
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]))
