"""Compares methods of Asynchronous RLHF over N, the number of batches that are sampled at a time.

    JAX_PLATFORMS=cpu python -m experiments.reproductions.async_rlhf --workers 14   # on 14 cores; runs, then report
    python -m experiments.reproductions.async_rlhf --report                         # the report alone
    python -m experiments.reproductions.async_rlhf --smoke                          # a minute

Every run is a run of the trainer with the config `keywords`, `--mode simulated --lag rounds`: N batches are sampled by
one policy, then trained on one after the other, the last one N - 1 updates later (Noukhovitch et al., Asynchronous
RLHF, 2024, section 3). All runs start from one supervised policy and are rewarded by one reward model; the true reward
judges held-out samples. The learning rate of each method at each N is chosen on some seeds, and what it gives is
reported on others; rates are added until no best one lies at an edge. Runs that are finished are not repeated, so that
the command can be given again after its `--seconds`. What came out: async_rlhf.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import shutil
import time
from collections import deque
from typing import Any
from typing import get_args

import jax

from async_rl import recording
from async_rl import runtime
from async_rl.learning import Method
from experiments.configs import keywords
from experiments.reproductions import _async_rlhf_plan as plans
from experiments.reproductions import _async_rlhf_report as reports
from experiments.reproductions._async_rlhf_plan import Look
from experiments.reproductions._async_rlhf_plan import Run
from experiments.reproductions._run_many import run_many
from experiments.reproductions._run_many import train

METHODS: tuple[Method, ...] = ("online_dpo", "rloo", "proximal_rloo", "best_of_n", "ppo")
RESULTS = pathlib.Path(__file__).parent / "results"
CSV = "async_rlhf.csv"
STUDY = plans.Study(
  METHODS,
  rounds=(1, 4, 16, 64),
  rates=(2.5e-4, 5e-4, 1e-3, 2e-3),
  limits=(6.25e-5, 8e-3),
  choosing=(100, 101),
  reported=range(200, 220),
)
SMOKE = plans.Study(METHODS[:1], (1, 4), rates=(5e-4, 1e-3), limits=(5e-4, 1e-3), choosing=(100,), reported=(200, 201))


def experiment(folder: pathlib.Path, run: Run, smoke: bool) -> runtime.Experiment:
  """Returns the experiment of one run, which makes four rounds of the largest N."""
  lengths: dict[str, Any] = (
    keywords.SMOKE | {"steps": 4, "eval_every": 2} if smoke else {"steps": 256, "eval_every": 64}
  )
  options = runtime.override(
    keywords.Options(),
    run_dir=str(folder / "runs" / run.name),
    stages=str(folder / "stages"),
    mode="simulated",
    lag="rounds",
    max_lag=run.rounds - 1,
    method=run.method,
    learning_rate=run.rate,
    seed=run.seed,
    picture=False,
    **lengths | {"checkpoint_every": 0},
  )
  return keywords.build(options)


def make(folder: pathlib.Path, smoke: bool, run: Run) -> list[Look]:
  """Makes a run and returns its measurements; one that diverges ends with the lowest rewards there are."""
  made, lost = experiment(folder, run, smoke), []
  try:
    train(made)
  except runtime.Diverged:
    lost = [Look(*run, made.options.length.steps, -1.0, keywords.Options().rlhf.missing_end, math.nan)]
  return looks(pathlib.Path(made.options.output.run_dir), run) + lost


def looks(run_dir: pathlib.Path, run: Run) -> list[Look]:
  """Returns the measurements in the folder of a run."""
  names = [f"eval/{name}" for name in ("accuracy", "proxy", "kl_reference")]
  rows = recording.read_metrics(run_dir / "metrics.jsonl")
  return [Look(*run, row["step"], *(row[name] for name in names)) for row in rows if names[-1] in row]


def make_all(study: plans.Study, folder: pathlib.Path, workers: int, seconds: float, smoke: bool) -> int:
  """Makes the runs that are left, as far as the time allows; adds each to the csv file; returns how many failed."""
  began, found = time.monotonic(), plans.read(folder / CSV)
  jobs = deque(study.left(found))
  planned, failed = list(jobs), 0
  cores = None
  if workers > 1 and jax.config.values["jax_platforms"] == "cpu" and hasattr(os, "sched_setaffinity"):
    cores = list(itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0), reverse=True)), workers))
  begun: set[Run] = set()
  for outcome in run_many(functools.partial(make, folder, smoke), jobs, workers, seconds, cores):
    begun |= set(planned) - set(jobs)
    print(f"{time.monotonic() - began:.0f} s: {outcome.job.name}, {outcome.seconds:.0f} s: ", end="")
    if outcome.error:
      failed += 1
      print(f"failed\n{outcome.error}", flush=True)
      continue
    print(f"true reward {outcome.result[-1].gold:.3f}", flush=True)
    plans.append(folder / CSV, outcome.result)
    found += outcome.result
    planned = [run for run in study.left(found) if run not in begun]
    jobs.clear()
    jobs.extend(planned)
  print(f"{len(plans.ends(found))} runs are finished, {len(study.left(found))} are left or failed", flush=True)
  return failed


def report(study: plans.Study, folder: pathlib.Path, results: pathlib.Path) -> None:
  """Writes async_rlhf.csv and .png to `results` and prints the tables.

  Raises:
    FileNotFoundError: if no seed to be reported is finished for all methods and N.
  """
  found = plans.read(folder / CSV)
  reported = study.reports(found)
  if not reported:
    raise FileNotFoundError(f"{folder} holds no runs to report; make some first, or give --folder.")
  results.mkdir(parents=True, exist_ok=True)
  if folder.resolve() != results.resolve():
    shutil.copyfile(folder / CSV, results / CSV)
  reports.draw(found, study, results / "async_rlhf.png")
  print(f"{reports.rates(found, study)}\n\n{reports.table(reported)}")


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--folder", type=pathlib.Path, help="the runs; default runs/async_rlhf, or one for --smoke")
  parser.add_argument("--results", type=pathlib.Path, help="where csv and png go; default beside the page")
  parser.add_argument("--methods", nargs="+", choices=get_args(Method))
  parser.add_argument("--rounds", nargs="+", type=int, help="the values of N")
  parser.add_argument("--seeds", type=int, help="the number of seeds to report")
  parser.add_argument("--workers", type=int, default=1, help="processes; on the CPU each keeps to a core of its own")
  parser.add_argument("--seconds", type=float, default=math.inf, help="time for the runs, to be resumed later")
  parser.add_argument("--smoke", action="store_true", help="a few updates of few runs")
  only = parser.add_mutually_exclusive_group()
  only.add_argument("--report", action="store_true", help="only report")
  only.add_argument("--no-report", action="store_true", help="only make the runs")
  options = parser.parse_args(arguments)
  study = SMOKE if options.smoke else STUDY
  folder = options.folder or pathlib.Path("runs/async_rlhf_smoke" if options.smoke else "runs/async_rlhf")
  changed = {name: getattr(options, name) for name in ("methods", "rounds") if getattr(options, name)}
  if options.seeds is not None:
    changed["reported"] = study.reported[: options.seeds]
  study = dataclasses.replace(study, **changed)
  if not study.reported or min(study.rounds) < 1 or options.workers < 1:
    parser.error("--seeds, --rounds and --workers must be at least 1")
  if not options.report and make_all(study, folder, options.workers, options.seconds, options.smoke):
    parser.exit(1, "some runs failed; the same command makes them again\n")
  if not options.no_report:
    try:
      report(study, folder, options.results or (folder if options.smoke else RESULTS))
    except FileNotFoundError as error:
      parser.error(str(error))


if __name__ == "__main__":
  main()
