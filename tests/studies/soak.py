"""Runs thousands of small steps and compares the last quarter with the first: memory is flat, no step gets slower.

Command: python tests/studies/soak.py [--mode simulated]
Hardware and time: two CPU cores, a few minutes for 2,000 steps.
Result: one line per quantity, then "flat"; the exit status is 1 if something grew.

The run is asynchronous unless told otherwise, with a reward worker, evaluations and checkpoints. Quantities are
measured before every step, once a tenth of the steps has passed. A quarter's value is its median, so that neither an
evaluation nor another process on the machine counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

#: By how much the last quarter may exceed the first, as a factor and then as a number. The wall time of a step is
#: shown but not judged, since other processes may share the machine.
LIMITS = {
  "resident memory, MB": (1.02, 8.0),
  "live JAX arrays": (1.0, 2.0),
  "open files": (1.0, 0.0),
  "threads": (1.0, 0.0),
  "CPU time of a step, ms": (1.1, 0.0),
  "wall time of a step, ms": (float("inf"), 0.0),
}


def measure():
  """Returns the quantities of this process now; the times are totals."""
  import jax

  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return {
    "resident memory, MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    "live JAX arrays": len(jax.live_arrays()),
    "open files": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "CPU time of a step, ms": time.process_time() * 1e3,
    "wall time of a step, ms": time.monotonic() * 1e3,
  }


def record_run(mode, steps, folder):
  """Runs the experiment; returns the quantities before each of its steps, by name."""
  from tiny import tiny

  from async_rl import runtime
  from async_rl.runtime import _session

  found = []
  step = _session.Session.step

  def measured(session, groups):
    found.append(measure())
    step(session, groups)

  _session.Session.step = measured
  experiment = tiny(
    run_dir=str(folder / "run"),
    mode=mode,
    steps=steps,
    reward_workers=1,
    eval_prompts=8,
    eval_every=max(1, steps // 8),
    checkpoint_every=max(1, steps // 10),
  )
  summary = runtime.train(experiment)
  assert summary.version == steps
  series = {name: [values[name] for values in found] for name in LIMITS}
  for name in LIMITS:
    if "time" in name:
      series[name] = [after - before for before, after in zip(series[name], series[name][1:])]
  return series


def compare_quarters(values):
  """Returns the medians of the first and the last quarter after warm-up."""
  steady = values[len(values) // 10 :]
  quarter = len(steady) // 4
  return statistics.median(steady[:quarter]), statistics.median(steady[-quarter:])


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=2000)
  parser.add_argument("--mode", choices=("async", "simulated", "sync"), default="async")
  parser.add_argument("--folder", type=pathlib.Path, help="where the run is kept; by default it is deleted")
  arguments = parser.parse_args()
  start = time.monotonic()
  with contextlib.ExitStack() as stack:
    folder = arguments.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
    series = record_run(arguments.mode, arguments.steps, folder)
  grown, result = [], {}
  for name, (factor, number) in LIMITS.items():
    first, last = compare_quarters(series[name])
    result[name] = [round(first, 2), round(last, 2)]
    print(f"{name:26}{first:10.2f} -> {last:.2f}")
    if last > first * factor + number:
      grown.append(name)
  print(
    json.dumps(
      result | {"mode": arguments.mode, "steps": arguments.steps, "minutes": round((time.monotonic() - start) / 60, 1)}
    )
  )
  print(f"grown: {', '.join(grown)}" if grown else "flat")
  return int(bool(grown))


if __name__ == "__main__":
  sys.exit(main())
