"""Trains ten steps on every mesh of this machine's devices, and compares each run with the same run on one device.

    python -m experiments.benchmarks.mesh_runs                # two GPUs or more, about 4 minutes
    python -m experiments.benchmarks.mesh_runs --forced 2     # any machine, on two forced CPU devices

Every run is `experiments.train quickstart` in a process of its own, in float32 with exact products, from the weights of
one run that made the supervised warm start. `sync` and `simulated` runs draw the same samples on every mesh but for
rounding, so their metrics must agree with those on one device; `async` runs depend on time, so they must only keep the
bound of the lag. Prints a row per run and writes mesh_runs.json.

Columns: largest difference over the steps of the mean reward, and largest relative differences of the loss and of the
gradient's norm; largest lag of a trained token; seconds of the last steps, in the median.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any
from typing import NamedTuple

from async_rl.recording import read_metrics
from experiments.benchmarks._run_on_devices import run_on_devices


class Run(NamedTuple):
  """A run of the comparison: a mode, the number of devices, and the options of its meshes."""

  mode: str
  devices: int
  options: tuple[tuple[str, int], ...]

  def __str__(self) -> str:
    meshes = " ".join(f"{name}={value}" for name, value in self.options)
    return f"{self.mode:9} {self.devices} {meshes}"


def runs_of(count: int) -> list[Run]:
  """Returns the runs on `count` devices, each mode's run on one device first."""
  runs = []
  for mode in ("sync", "simulated"):
    runs.append(Run(mode, 1, ()))
    fsdp, tensor, generation_tensor = (("fsdp", count),), (("tensor", count),), (("generation_tensor", count),)
    shared = ((), fsdp, tensor, fsdp + generation_tensor)
    runs += [Run(mode, count, (("generation_devices", 0), *axes)) for axes in shared]
    runs.append(Run(mode, count, (("generation_devices", count // 2),)))
  return runs + [Run("async", count, (("generation_devices", sampling),)) for sampling in (0, count // 2)]


def train(run: Run, folder: pathlib.Path, forced: bool, **options: Any) -> list[dict[str, Any]]:
  """Returns the metrics of the steps of a run of quickstart, in a process of its own; `options` are of its command."""
  variables = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  options = {"run_dir": folder, "mode": run.mode, "max_lag": 2, "eval_prompts": 0, **dict(run.options), **options}
  flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
  command = [sys.executable, "-m", "experiments.train", "quickstart", *flags]
  run_on_devices(command, range(run.devices), folder.parent / "cache", forced=forced, **variables)
  return [row for row in read_metrics(folder / "metrics.jsonl") if "reward/mean" in row]


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
    train(Run("sync", 1, ()), path / "warm", bool(args.forced), steps=1)

    def train_from_there(numbered: tuple[int, Run]) -> list[dict[str, Any]]:
      number, run = numbered
      return train(run, path / str(number), bool(args.forced), steps=args.steps, init_from=path / "warm", seed=1)

    rows = dict(zip(runs, pool.map(train_from_there, enumerate(runs)), strict=True))
  results = []
  for run in runs:
    found = rows[run]
    result: dict[str, Any] = {"run": str(run), "lag": max(row["staleness/max"] for row in found)}
    result["seconds"] = statistics.median(row["time/step"] for row in found[len(found) // 2 :])
    if run.mode != "async":
      result |= compare(found, rows[Run(run.mode, 1, ())])
    results.append(result)
    values = " ".join(f"{name} {value:.2g}" for name, value in result.items() if name != "run")
    print(f"{run!s:60} {values}")
  args.out.write_text(
    json.dumps({"device": device, "devices": count, "jax": jax.__version__, "runs": results}, indent=1)
  )


if __name__ == "__main__":
  main()
