"""Sends SIGTERM to a run at random moments, and measures how soon it is answered, and how soon the run is saved.

Command: python tests/studies/signals.py
Hardware and time: two CPU cores, about five minutes for 12 moments of the quickstart with frequent evaluations.
Result: one line per moment with the work at hand, the seconds until the answer, and until the process has saved and
ended; then the largest of each. The exit status is 1 unless all ended with status 143 and the run was resumed to its
end with every step once.

With --parameters N it measures in place of that how long a checkpoint of N float32 parameters with Adam's state takes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

STEPS = 40
OPTIONS = f"--steps {STEPS} --warm-accuracy 0 --eval-every 8 --eval-prompts 64 --checkpoint-every 16".split()
#: Seconds of work after the last interruption before the next one.
BETWEEN = (0.5, 20.0)


class Stopped(NamedTuple):
  """A process that was stopped: the work at hand, the seconds to the answer and to the end, and its exit status."""

  activity: str
  answered: float
  ended: float
  status: int


@contextlib.contextmanager
def training(folder):
  """The run in another process; gives it and a list of its lines with the times at which they came."""
  command = [sys.executable, "-m", "experiments.train", "quickstart", "--run-dir", str(folder), *OPTIONS]
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
  environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "XLA_FLAGS": flags}
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  with subprocess.Popen(command, cwd=folder.parent, env=environment, **pipes) as process:
    lines = []
    reader = threading.Thread(target=lambda: lines.extend((time.monotonic(), line) for line in process.stdout))
    reader.start()
    try:
      yield process, lines
    finally:
      process.kill()
      reader.join()


def stop_at(delay, folder):
  """Stops the run after `delay` seconds of work; `None` if it ended before."""
  with training(folder) as (process, lines):
    while not any("resumed" in line or "supervised" in line for _, line in lines) and process.poll() is None:
      time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(delay)
      return None
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status = process.wait()
    ended = time.monotonic() - sent
  answers = [(at - sent, line) for at, line in lines if line.startswith("SIGTERM received while")]
  at, line = answers[0] if answers else (float("inf"), "")
  return Stopped(re.sub(r"SIGTERM received while ([^:]*).*\n?", r"\1", line), at, ended, status)


def stop_often(count, seed):
  """Stops one run after another at `count` moments in all; returns whether each was resumed to its end."""
  rng, found, whole = random.Random(seed), [], True
  while len(found) < count:
    with tempfile.TemporaryDirectory() as scratch:
      folder, stopped = pathlib.Path(scratch) / "run", Stopped("", 0.0, 0.0, 0)
      while stopped is not None:
        stopped = stop_at(rng.uniform(*BETWEEN), folder) if len(found) < count else stop_at(None, folder)
        if stopped is not None:
          found.append(stopped)
          print(f"{stopped.activity:32} answered {stopped.answered:6.2f} s, ended {stopped.ended:6.2f} s", flush=True)
      whole &= steps_of(folder) == list(range(1, STEPS + 1))
  answered, ended = (max(getattr(x, name) for x in found) for name in ("answered", "ended"))
  print(f"{len(found)} moments: answered within {answered:.2f} s, saved and ended within {ended:.2f} s")
  return whole and all(x.status == 128 + signal.SIGTERM for x in found)


def steps_of(folder):
  from async_rl import recording

  return [row["step"] for row in recording.read_metrics(folder / "metrics.jsonl") if "reward/mean" in row]


def measure_save(parameters):
  """Measures a save of this many parameters with the state of Adam, as it is waited for after a signal."""
  import jax
  import jax.numpy as jnp
  import optax

  from async_rl import recording
  from async_rl.types import TrainState

  params = {f"layer_{i}": jax.random.normal(jax.random.key(i), (parameters // 16,)) for i in range(16)}
  state = jax.block_until_ready(TrainState(params, optax.adam(1e-3).init(params), jnp.int32(0)))
  size = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e9
  with tempfile.TemporaryDirectory() as scratch:
    checkpoints = recording.Checkpointer(pathlib.Path(scratch) / "checkpoints", keep=1, fingerprint={})
    start = time.monotonic()
    checkpoints.save(1, state, {})
    checkpoints.wait()
    print(f"{size:.2f} GB saved in {time.monotonic() - start:.1f} s")
    checkpoints.close()


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--moments", type=int, default=12)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--parameters", type=float)
  options = parser.parse_args()
  if options.parameters:
    measure_save(int(options.parameters))
    return 0
  return 0 if stop_often(options.moments, options.seed) else 1


if __name__ == "__main__":
  sys.exit(main())
