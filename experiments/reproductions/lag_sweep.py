"""Does it work? Methods against lag and learning rate, hundreds of small training runs at once.

    python -m experiments.reproductions.lag_sweep ch4/sync ch4/published:10 ch4/controls:10    # one GPU with 80 GB
    python -m experiments.reproductions.lag_sweep --smoke                                      # any machine, a minute
    python -m experiments.reproductions.lag_sweep --report                                     # tables and figures

Every run is a whole training in the `simulated` way, at a fixed lag: a small transformer, warm-started by supervision
up to an accuracy of 0.2, then 400 updates of 32 prompts x 8 completions. Runs are vectorized (64 to a GPU at once; all
methods are one program) and split over the GPUs of the machine. Tasks: `ch4`, sums of four numbers with a scratchpad;
`cd4`, countdown with four numbers. A plan is a list of TASK/GROUP[:LAG,...][@SEEDS][%RATE,...]; the groups are sync,
published, ahead, candidates, second, sync_exact, third, controls (these need the runs that they are matched to), ramped
and exact, or the name of one method. Without rates each method is run at every learning rate of 1e-5 ... 2e-4.

Runs already in the folder are not repeated, so a plan that ran out of its time can be given again. The results and
what they say: lag_sweep.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reproductions import _lag_sweep_plan as plans
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _lag_sweep_tasks as problems
from experiments.reproductions._lag_sweep_run import Program
from experiments.reproductions._lag_sweep_run import Runner

#: Warm starts per task; the run with seed s begins with warm start s modulo this.
WARM_STARTS = 5
#: How much longer a chunk of runs takes with one gradient per trajectory.
EXACT_COST = 3.0


class Sweep:
  """Makes the runs of a plan.

  Args:
    folder: of results, warm starts and tokenized problems.
    settings: by task name.
    devices: that the runs are split over.
    runs_per_device: vectorized runs.
    dtype: of the policies.
    seconds: no chunk of runs is begun that would probably end later than this.
    data_dir: of TFDS.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    settings: dict[str, problems.Setting],
    devices: list[jax.Device],
    runs_per_device: int,
    dtype: str,
    seconds: float,
    data_dir: str | None = None,
  ):
    self.folder, self.settings, self.dtype, self.data_dir = folder, settings, dtype, data_dir
    self.began, self.seconds = time.monotonic(), seconds
    kind = (jax.sharding.AxisType.Auto,)
    self.mesh = jax.make_mesh((len(devices),), ("runs",), axis_types=kind, devices=devices)
    self.runs = runs_per_device * len(devices)
    self.results = plans.Results(folder)
    self.slowest = 0.0

  def __call__(self, items: list[plans.Item]) -> None:
    """Makes what is missing of the plan, in its order; compiles ahead in the background."""
    stages: list[list[plans.Item]] = []  # each in one program; what depends on other runs begins a new one
    for item in items:
      if item.depends or not stages or (item.task, item.exact) != (stages[-1][0].task, stages[-1][0].exact):
        stages.append([])
      stages[-1].append(item)
    # One program at a time, and the first one alone: on a GPU the compiler times kernels.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      data = {task: problems.problems(self.settings[task], self.folder, self.data_dir) for task in self._tasks(items)}
      programs: dict[tuple[str, bool], concurrent.futures.Future[Program]] = {}
      for item in items:
        if (item.task, item.exact) not in programs and (item.depends or item.runs(self.results)):
          programs[item.task, item.exact] = pool.submit(self._compile, item.task, item.exact, *data[item.task])
      for stage in stages:
        task, exact = stage[0].task, stage[0].exact
        runs = {run: knobs for item in stage for run, knobs in item.runs(self.results).items()}
        if runs:
          program = programs[task, exact].result()
          self._chunks(task, EXACT_COST if exact else 1.0, program, runs, self._warm_start(task, *data[task]))
        if waiting := sum(item.waiting(self.results) for item in stage):
          self._say(f"{waiting} runs of {task} were not made: those that they are matched to are missing")

  def _tasks(self, items: list[plans.Item]) -> list[str]:
    return list(dict.fromkeys(item.task for item in items))

  def _say(self, text: str) -> None:
    print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

  def _compile(self, task: str, exact: bool, *data: problems.Problems) -> Program:
    program = Runner(self.settings[task], self.dtype, exact).compile(self.runs, self.mesh, WARM_STARTS, *data)
    self._say(f"compiled {task}{', exact norms' if exact else ''}: {program.describe()}")
    return program

  def _warm_start(self, task: str, *data: problems.Problems) -> jax.Array:
    """Made once and kept, so that all runs of a task begin alike, in later calls too."""
    file = self.folder / f"warm_{task}.npz"
    if not file.exists():
      keys = jax.vmap(jax.random.key)(jnp.arange(WARM_STARTS))
      runner = Runner(self.settings[task], self.dtype)
      weights, updates, accuracies = jax.jit(jax.vmap(runner.warm_start, in_axes=(0, None, None)))(keys, *data)
      np.savez(file, weights=weights, updates=updates, accuracies=accuracies)
      self._say(f"warm starts of {task}: {np.array(updates)} updates, accuracies {np.array(accuracies).round(3)}")
    with np.load(file) as arrays:
      return jnp.asarray(arrays["weights"])

  def _chunks(self, task: str, cost: float, program: Program, runs: dict[plans.Run, Any], warm: jax.Array) -> None:
    todo = list(runs)
    for first in range(0, len(todo), self.runs):
      chunk, start = todo[first : first + self.runs], time.monotonic()
      if start - self.began + 1.1 * cost * self.slowest > self.seconds:
        self._say(f"out of time with {len(todo) - first} runs of {task} to go")
        return
      self.results.add(chunk, program([runs[run] for run in chunk], warm))
      self.results.save(task)
      took = time.monotonic() - start
      self.slowest = max(self.slowest, took / cost)
      self._say(f"{task}: {first + len(chunk)} of {len(todo)} runs, {took:.1f} s a chunk, last {chunk[-1][1:]}")


SMOKE = ("ch3/sync@1", "ch3/PPO + GAC:2@1", "ch3/PPO + random skips:2@1", "ch3/VCPO, exact:2@1")


def main(arguments: list[str] | None = None) -> plans.Results:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("plan", nargs="*", help="TASK/GROUP[:LAG,...][@SEEDS][%%RATE,...] ...")
  parser.add_argument("--folder", type=pathlib.Path, help="of the runs; default runs/lag_sweep, or one for --smoke")
  parser.add_argument("--results", type=pathlib.Path, help="where the report goes; default beside the page")
  parser.add_argument("--data-dir", default="runs/data", help="of TFDS, where the folder lacks the tokenized problems")
  parser.add_argument("--budget-s", type=float, default=float("inf"), help="when to stop, in seconds from the start")
  parser.add_argument("--runs-per-device", type=int, default=64)
  parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, for any machine")
  parser.add_argument("--report", action="store_true", help="condense the folder's runs; tables and figures")
  options = parser.parse_args(arguments)
  folder = options.folder or pathlib.Path("runs/lag_sweep_smoke" if options.smoke else "runs/lag_sweep")
  where = options.results or (folder if options.smoke else reports.RESULTS)
  if not (options.plan or options.smoke or options.report):
    parser.error("nothing to do: give a plan, --smoke or --report")
  if options.runs_per_device < 1:
    parser.error(f"--runs-per-device must be at least 1, got {options.runs_per_device}")
  try:
    settings, items = problems.SETTINGS, [plans.parse(text) for text in options.plan]
  except ValueError as error:
    parser.error(str(error))
  devices, runs, dtype = jax.devices(), options.runs_per_device, options.dtype
  if options.smoke:
    settings = {"ch3": dataclasses.replace(settings["ch3"], **problems.TINY)}
    items = [dataclasses.replace(plans.parse(text), rates=(1e-2,)) for text in options.plan or SMOKE]
    if others := {item.task for item in items} - set(settings):
      parser.error(f"--smoke is of task ch3 only, got {', '.join(others)}")
    devices, runs, dtype = devices[:2], 1, "float32"
  sweep = Sweep(folder, settings, devices, runs, dtype, options.budget_s, options.data_dir)
  sweep(items)
  if options.report:
    try:
      print(reports.report(sweep.results, where))
    except ValueError as error:
      parser.error(str(error))
  return sweep.results


if __name__ == "__main__":
  main()
