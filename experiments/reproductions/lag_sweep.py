"""Compares methods over lag and learning rate, in hundreds of small training runs at once.

    python -m experiments.reproductions.lag_sweep ch4/sync ch4/published:10 ch4/controls:10    # one GPU with 80 GB
    python -m experiments.reproductions.lag_sweep --plan experiments/reproductions/fresh_seeds.txt --folder runs/fresh
    python -m experiments.reproductions.lag_sweep --smoke                                      # any machine, a minute
    python -m experiments.reproductions.lag_sweep --report                                     # tables and figures

Every run is a whole training in the `simulated` way, at a fixed lag: a small transformer, warm-started by supervision
up to an accuracy of 0.2, then 400 updates of 32 prompts x 8 completions. Runs are vectorized (64 to a GPU at once; all
methods are one program) and split over the GPUs of the machine. Tasks: `ch4`, sums of four numbers with a scratchpad;
`cd4`, countdown with four numbers; `sort16` and `sort10`, sorting of digits; `ch4wide`, the sums with twice the width;
`words`, the toy of `laboratory`. A plan, on the command line or in a file, is a list of

    TASK/GROUP[:LAG,...][@SEEDS|@FIRST-LAST][%RATE,...|%chosen|%tried|%best]

The groups are those of `GROUPS`; the name of a method may stand for a group. The runs of `controls` need the ones that
they are matched to. Without rates each method is run at every rate of 1e-5 ... 2e-4; `%chosen` is the best rate of the
published results, whose seeds (0 to 4) the plan must then leave alone; `%tried` is the best rate of this folder's own
runs on other seeds than the item's, made before; `%best` is the same for the best method of the group alone.

Runs already in the folder are not repeated, so a plan that ran out of time can be given again. Warm starts are kept in
the folder, and runs from other warm starts are refused: only runs of one warm start are paired. What the results say:
lag_sweep.md, and which_correction.md for the studies on fresh seeds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np

from experiments.reproductions import _lag_sweep_plan as plans
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _lag_sweep_tasks as problems
from experiments.reproductions import laboratory
from experiments.reproductions._lag_sweep_run import Program
from experiments.reproductions._lag_sweep_run import Runner
from experiments.reproductions._lag_sweep_starts import WarmStarts
from experiments.reproductions._lag_sweep_table import Table
from experiments.reproductions._lag_sweep_table import choose_rate

#: How much longer a chunk of runs takes with one gradient per trajectory.
EXACT_COST = 1.8


class Sweep:
  """Makes the runs of a plan.

  Args:
    folder: the folder of results and tokenized problems.
    settings: the settings by task name.
    devices: the devices that the runs are split over.
    runs_per_device: the number of vectorized runs.
    dtype: the dtype of the policies.
    seconds: the time limit; no chunk of runs is begun that would probably end later.
    data_dir: the folder of TFDS.
    starts: the folder of the warm starts, *folder* by default.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    settings: dict[str, problems.Setting | laboratory.Toy],
    devices: list[jax.Device],
    runs_per_device: int,
    dtype: str,
    seconds: float,
    data_dir: str | None = None,
    starts: pathlib.Path | None = None,
  ):
    self.folder, self.settings, self.dtype, self.data_dir = folder, settings, dtype, data_dir
    self.starts = starts or folder
    self.began, self.seconds = time.monotonic(), seconds
    kind = (jax.sharding.AxisType.Auto,)
    self.mesh = jax.make_mesh((len(devices),), ("runs",), axis_types=kind, devices=devices)
    self.runs = runs_per_device * len(devices)
    self.results = plans.Results(folder)
    self.slowest = 0.0
    self.max_lag = plans.MAX_LAG

  def __call__(self, items: list[plans.Item]) -> None:
    """Makes the missing runs of a plan in its order, and compiles ahead in the background."""
    self.max_lag = max((lag for item in items for lag in item.lags), default=0)
    stages: list[list[plans.Item]] = []  # each in one program; what depends on other runs begins a new one
    for item in items:
      last = stages[-1][-1] if stages else None
      needs_last = last and ((item.controls and not last.controls) or (item.tried and not last.tried))
      if last is None or needs_last or (item.task, item.exact) != (last.task, last.exact):
        stages.append([])
      stages[-1].append(item)
    # One program at a time, and the first one alone: on a GPU the compiler times kernels.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      data = {task: self._problems(task) for task in self._tasks(items)}
      programs: dict[tuple[str, bool], concurrent.futures.Future[Program]] = {}
      for item in items:
        if (item.task, item.exact) not in programs and (item.depends or item.runs(self.results)):
          programs[item.task, item.exact] = pool.submit(self._compile, item.task, item.exact, *data[item.task])
      for stage in stages:
        task, exact = stage[0].task, stage[0].exact
        runs = {run: knobs for item in stage for run, knobs in item.runs(self.results).items()}
        if runs:
          program = programs[task, exact].result()
          starts = self._warm_starts(task, plans.seeds_of(items, task), *data[task])
          self._chunks(task, EXACT_COST if exact else 1.0, program, runs, starts)
        if waiting := sum(item.waiting(self.results) for item in stage):
          self._say(f"{waiting} runs of {task} were not made: those that they are matched to are missing")

  def _tasks(self, items: list[plans.Item]) -> list[str]:
    return list(dict.fromkeys(item.task for item in items))

  def _problems(self, task: str) -> tuple[problems.Problems, problems.Problems]:
    setting = self.settings[task]
    if isinstance(setting, laboratory.Toy):
      words = laboratory.WordTraining(setting).problems
      return words, words
    return problems.problems(setting, self.folder, self.data_dir)

  def _runner(self, task: str, exact: bool = False) -> Runner | laboratory.WordTraining:
    setting = self.settings[task]
    if isinstance(setting, laboratory.Toy):
      return laboratory.WordTraining(setting, self.max_lag, exact)
    return Runner(setting, self.dtype, exact, self.max_lag)

  def _say(self, text: str) -> None:
    print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

  def _compile(self, task: str, exact: bool, *data: problems.Problems) -> Program:
    program = self._runner(task, exact).compile(self.runs, self.mesh, *data)
    self._say(f"compiled {task}{', exact norms' if exact else ''}: {program.describe()}")
    return program

  def _warm_starts(self, task: str, seeds: set[int], *data: problems.Problems) -> WarmStarts:
    """Returns the warm starts of all seeds of the plan; those that the folder lacks are made in one batch and kept."""
    starts = WarmStarts(self.starts / f"warm_{task}.npz")
    made = starts.make(seeds, self._runner(task), *data)
    if made:
      updates, accuracies = ([values[seed] for seed in made] for values in (starts.updates, starts.accuracies))
      self._say(f"warm starts of {task}: {updates} updates, accuracies {np.round(accuracies, 3)}")
    self.results.check_starts(task, starts.checksums())
    return starts

  def _chunks(self, task: str, cost: float, program: Program, runs: dict[plans.Run, Any], starts: WarmStarts) -> None:
    todo, checksums = list(runs), starts.checksums()
    for first in range(0, len(todo), self.runs):
      chunk, start = todo[first : first + self.runs], time.monotonic()
      if start - self.began + 1.1 * cost * self.slowest > self.seconds:
        self._say(f"out of time with {len(todo) - first} runs of {task} to go")
        return
      weights = np.stack([starts.weights[run.seed] for run in chunk])
      self.results.add(chunk, program([runs[run] for run in chunk], weights), checksums)
      self.results.save(task)
      took = time.monotonic() - start
      self.slowest = max(self.slowest, took / cost)
      self._say(f"{task}: {first + len(chunk)} of {len(todo)} runs, {took:.1f} s a chunk, last {chunk[-1][1:]}")


SMOKE = ("ch3/sync@1", "ch3/PPO + GAC:2@1", "ch3/PPO + random skips:2@1", "ch3/VCPO, exact:2@1")


def _chooser(results: pathlib.Path, seeds: set[int]) -> plans.ChooseRate:
  """Returns the function that chooses rates by the condensed *results*, whose seeds must not be among *seeds*."""
  tables: dict[str, Table] = {}

  def choose(task: str, method: str, lag: int) -> float:
    if task not in tables:
      tables[task] = Table.load(results / f"lag_sweep_{task}.npz")
    if used := sorted(seeds & set(tables[task].seeds)):
      raise ValueError(f"the rates of {task} are chosen on seeds {used}; plan others, such as @1000-1019.")
    return choose_rate(tables[task], method, lag)

  return choose


def _items(texts: list[str]) -> list[plans.Item]:
  """Returns the items of a plan, with every rate that it leaves to be chosen looked up once, to fail early."""
  choosing = [text for text in texts if text.endswith("%chosen")]
  seeds = {seed for text in choosing for seed in plans.parse(text.removesuffix("%chosen")).seeds}
  items = [plans.parse(text, _chooser(reports.RESULTS, seeds)) for text in texts]
  for item in items:
    for name, lag in itertools.product(item.names, item.lags):
      item.rates_of(name, lag)  # `%tried` has none yet
  return items


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("items", nargs="*", help=plans.FORM.replace("%", "%%"))
  parser.add_argument("--plan", type=pathlib.Path, help="a file with further items, one a line")
  parser.add_argument("--folder", type=pathlib.Path, help="the runs; default runs/lag_sweep, or one for --smoke")
  parser.add_argument("--warm-starts", type=pathlib.Path, help="the folder of warm_TASK.npz; default --folder")
  parser.add_argument("--results", type=pathlib.Path, help="the folder of the report; default beside the page")
  parser.add_argument("--data-dir", default="runs/data", help="TFDS, used where --folder lacks the tokenized problems")
  parser.add_argument("--budget-s", type=float, default=float("inf"), help="the time limit in seconds from the start")
  parser.add_argument("--runs-per-device", type=int, default=64)
  parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, for any machine")
  parser.add_argument("--report", action="store_true", help="condense the folder's runs; tables and figures")
  return parser


def main(arguments: list[str] | None = None) -> plans.Results:
  parser = _parser()
  options = parser.parse_args(arguments)
  folder = options.folder or pathlib.Path("runs/lag_sweep_smoke" if options.smoke else "runs/lag_sweep")
  where = options.results or (folder if options.smoke else reports.RESULTS)
  if not (options.items or options.plan or options.smoke or options.report):
    parser.error("nothing to do: give a plan, --smoke or --report")
  if options.runs_per_device < 1:
    parser.error(f"--runs-per-device must be at least 1, got {options.runs_per_device}")
  try:
    texts = [*options.items, *(plans.read(options.plan) if options.plan else [])]
    settings, items = problems.SETTINGS | {"words": laboratory.Toy()}, _items(texts)
  except (ValueError, OSError) as error:
    parser.error(str(error))
  devices, runs, dtype = jax.devices(), options.runs_per_device, options.dtype
  if options.smoke:
    settings = {"ch3": dataclasses.replace(settings["ch3"], **problems.TINY)}
    items = [dataclasses.replace(item, rates=(1e-2,), choose=None) for item in items or _items(list(SMOKE))]
    if others := {item.task for item in items} - set(settings):
      parser.error(f"--smoke is of task ch3 only, got {', '.join(others)}")
    devices, runs, dtype = devices[:2], 1, "float32"
  sweep = Sweep(folder, settings, devices, runs, dtype, options.budget_s, options.data_dir, options.warm_starts)
  try:
    sweep(items)
    if options.report:
      print(reports.report(sweep.results, where))
  except ValueError as error:
    parser.error(str(error))
  return sweep.results


if __name__ == "__main__":
  main()
