"""Trains ten steps on every mesh of this machine's devices, and compares each run with the same run on one device.

    python -m experiments.benchmarks.mesh_runs                # two GPUs or more, about 4 minutes
    python -m experiments.benchmarks.mesh_runs --forced 2     # any machine, on two forced CPU devices

Every run is `experiments.train quickstart` in a process of its own, in float32 with exact products, from the same
random weights after the same supervised steps. `sync` and `simulated` runs draw the same samples on every mesh but for
rounding, so their metrics must agree with those on one device; `async` runs depend on time, so they must only keep the
bound of the lag. Prints a row per run and writes mesh_runs.json.

Columns: largest difference over the steps of the mean reward, and largest relative differences of the loss and of the
gradient's norm; largest lag of a trained token; seconds of the last steps, in the median.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any
from typing import NamedTuple

from async_rl.recording import read_metrics


class Run(NamedTuple):
  """A run of the comparison: a mode, the number of devices, and the options of its meshes."""

  mode: str
  devices: int
  options: dict[str, int]

  def __str__(self) -> str:
    meshes = " ".join(f"{name}={value}" for name, value in self.options.items())
    return f"{self.mode:9} {self.devices} {meshes}"


def runs_of(count: int) -> list[Run]:
  """Returns the runs on `count` devices, each mode's run on one device first."""
  runs = []
  for mode in ("sync", "simulated"):
    runs.append(Run(mode, 1, {}))
    runs += [Run(mode, count, {"generation_devices": 0, **axes}) for axes in ({}, {"fsdp": count}, {"tensor": count})]
    runs.append(Run(mode, count, {"generation_devices": count // 2}))
  return [
    *runs,
    Run("async", count, {"generation_devices": 0}),
    Run("async", count, {"generation_devices": count // 2}),
  ]


def train(run: Run, folder: pathlib.Path, steps: int, forced: bool) -> list[dict[str, Any]]:
  """Returns the metrics of a run's steps."""
  environment = os.environ | {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
  }
  if forced:
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={run.devices}"
  else:
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(run.devices)))
  run_dir = folder / str(run).replace(" ", "-")
  options = {"run_dir": run_dir, "mode": run.mode, "max_lag": 2, "steps": steps, "warm_accuracy": 0.2, "seed": 1}
  options |= {"eval_prompts": 32, "eval_every": 0, **run.options}
  flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
  command = [sys.executable, "-m", "experiments.train", "quickstart", *flags]
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  if done.returncode:
    raise RuntimeError(f"{run} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
  return [row for row in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in row]


def compare(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
  """Returns the largest differences of a run's metrics from those of the run on one device."""
  pairs = list(zip(rows, expected, strict=True))
  result = {"reward": max(abs(a["reward/mean"] - b["reward/mean"]) for a, b in pairs)}
  for name in ("loss", "grad/norm"):
    scale = max(abs(b[name]) for _, b in pairs)
    result[name] = max(abs(a[name] - b[name]) for a, b in pairs) / scale
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--forced", type=int, default=0, help="forced CPU devices instead of the machine's GPUs")
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument(
    "--parallel", type=int, default=4, help="runs at the same time; their times are then not compared"
  )
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("mesh_runs.json"))
  args = parser.parse_args()
  import jax  # here, since GPUs that this process holds are shared with the runs

  device, count = jax.devices()[0].device_kind, args.forced or len(jax.devices())
  if count < 2:
    raise SystemExit("error: this compares meshes with one device, got 1 device; give --forced 2.")
  print(f"{count} x {device}, jax {jax.__version__}")
  runs = runs_of(count)
  with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
    path = pathlib.Path(folder)
    rows = dict(zip(map(str, runs), pool.map(lambda run: train(run, path, args.steps, bool(args.forced)), runs)))
  results = []
  for run in runs:
    found = rows[str(run)]
    result: dict[str, Any] = {"run": str(run), "lag": max(row["staleness/max"] for row in found)}
    result["seconds"] = statistics.median(row["time/step"] for row in found[len(found) // 2 :])
    if run.mode != "async":
      result |= compare(found, rows[str(Run(run.mode, 1, {}))])
    results.append(result)
    values = " ".join(f"{name} {value:.2g}" for name, value in result.items() if name != "run")
    print(f"{run!s:60} {values}")
  args.out.write_text(
    json.dumps({"device": device, "devices": count, "jax": jax.__version__, "runs": results}, indent=1)
  )


if __name__ == "__main__":
  main()
