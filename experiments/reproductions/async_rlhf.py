"""Compares methods of Asynchronous RLHF over N, the number of batches that are sampled at a time.

    python -m experiments.reproductions.async_rlhf            # two CPU cores or a GPU; makes the runs, then the report
    python -m experiments.reproductions.async_rlhf --report   # the report alone, of all runs in the folder
    python -m experiments.reproductions.async_rlhf --smoke    # a minute

Every run is a run of the trainer with the config `keywords`, `--mode simulated --lag rounds`: N batches are sampled by
one policy, then trained on one after the other, the last one N - 1 updates later (Noukhovitch et al., Asynchronous
RLHF, 2024, section 3). All runs start from one supervised policy and are rewarded by one reward model; the true reward
judges held-out samples. Runs that are finished are not repeated. What came out: async_rlhf.md.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import time
from typing import Any
from typing import NamedTuple
from typing import get_args

import jax
import numpy as np

from async_rl import recording
from async_rl import runtime
from async_rl.learning import Method
from experiments.configs import keywords
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import verdict

METHODS: tuple[Method, ...] = ("online_dpo", "rloo", "proximal_rloo", "best_of_n", "ppo")
ROUNDS = (1, 4, 16, 64)
RESULTS = pathlib.Path(__file__).parent / "results"


class Look(NamedTuple):
  """Measurement of a run at a step, on held-out samples: true reward, reward of the reward model, KL to the start."""

  method: str
  rounds: int
  seed: int
  step: int
  gold: float
  proxy: float
  kl: float


def experiment(folder: pathlib.Path, method: Method, rounds: int, seed: int, smoke: bool) -> runtime.Experiment:
  """Returns the experiment of one run, which makes two rounds of the largest N."""
  lengths: dict[str, Any] = (
    keywords.SMOKE | {"steps": 4, "eval_every": 2} if smoke else {"steps": 128, "eval_every": 32}
  )
  options = runtime.override(
    keywords.Options(),
    run_dir=str(folder / f"{method}_n{rounds}_seed{seed}"),
    stages=str(folder / "stages"),
    mode="simulated",
    lag="rounds",
    max_lag=rounds - 1,
    method=method,
    seed=seed,
    **lengths | {"checkpoint_every": 0},
  )
  return keywords.build(options)


def looks(folder: pathlib.Path) -> list[Look]:
  """Returns the measurements of all runs in the folder, finished or not."""
  found = []
  for file in sorted(folder.glob("*_n*_seed*/metrics.jsonl")):
    method, rounds, seed = file.parent.name.rsplit("_", 2)
    for row in recording.read_metrics(file):
      if "eval/kl_reference" in row:
        values = (row[f"eval/{name}"] for name in ("accuracy", "proxy", "kl_reference"))
        found.append(Look(method, int(rounds[1:]), int(seed[4:]), row["step"], *values))
  return found


def read(file: pathlib.Path) -> list[Look]:
  """Returns the measurements of a report's csv file."""
  with open(file, newline="") as lines:
    return [
      Look(row["method"], *(int(row[k]) for k in Look._fields[1:4]), *(float(row[k]) for k in Look._fields[4:]))
      for row in csv.DictReader(lines)
    ]


class Ends:
  """The last measurements of all runs.

  Args:
    found: the measurements of runs.

  Attributes:
    methods: the methods, in the order in which they appear.
    rounds: the values of N, in ascending order.
    seeds: the seeds, in ascending order.
    step: the last step.
  """

  def __init__(self, found: list[Look]):
    self.step = max(look.step for look in found)
    self._ends = {look[:3]: look for look in found if look.step == self.step}
    self.methods = list(dict.fromkeys(look.method for look in found))
    self.rounds = sorted({look.rounds for look in found})
    self.seeds = sorted({look.seed for look in found})

  def values(self, method: str, rounds: int, field: str = "gold") -> np.ndarray:
    """Returns a field of every seed, NaN where there is no finished run, [S]."""
    looks = [self._ends.get((method, rounds, seed)) for seed in self.seeds]
    return np.array([np.nan if look is None else getattr(look, field) for look in looks])


def table(found: list[Look]) -> str:
  """Returns a row per method: true reward at the end with its 95 % interval over seeds, and the mean KL."""
  ends = Ends(found)
  rows = []
  for method in ends.methods:
    row = [method]
    for n in ends.rounds:
      gold, kl = ends.values(method, n), ends.values(method, n, "kl")
      row.append("" if np.isnan(gold).all() else f"{measure(gold, 3)}, KL {np.nanmean(kl):.1f}")
    rows.append(row)
  return grid(["method", *(f"N = {n}" for n in ends.rounds)], rows)


def differences_to_one_round(found: list[Look]) -> str:
  """Returns a row per method: true reward at every larger N minus that at the smallest, paired by seed."""
  ends = Ends(found)
  first, *more = ends.rounds
  rows = []
  for method in ends.methods:
    differences = [ends.values(method, n) - ends.values(method, first) for n in more]
    rows.append([method, *(verdict(values, len(ends.methods) * len(more)) for values in differences)])
  return grid([f"minus N = {first}", *(f"N = {n}" for n in more)], rows)


def differences_to_method(found: list[Look], other: str) -> str:
  """Returns a row per method: true reward minus that of the method *other* at the same N, paired by seed."""
  ends = Ends(found)
  rivals = [method for method in ends.methods if method != other]
  rows = []
  for method in rivals:
    differences = [ends.values(method, n) - ends.values(other, n) for n in ends.rounds]
    rows.append([method, *(verdict(values, len(rivals) * len(ends.rounds)) for values in differences)])
  return grid([f"minus {other}", *(f"N = {n}" for n in ends.rounds)], rows)


def draw(found: list[Look], file: pathlib.Path) -> None:
  """Draws the true reward at the end against N, and on the way against the KL, at the smallest and at the largest N."""
  import matplotlib.pyplot as plt

  ends, rounds = Ends(found), sorted({look.rounds for look in found})
  figure, (against_rounds, *ways) = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
  for i, method in enumerate(ends.methods):
    style = {"color": f"C{i}", "label": method}
    for n in rounds:
      gold = ends.values(method, n)
      place = n * 1.06 ** (i - 1.5)  # beside each other
      against_rounds.plot([place] * len(gold), gold, ".", color=f"C{i}", markersize=5)
    against_rounds.plot(rounds, [np.nanmean(ends.values(method, n)) for n in rounds], **style)
    for axis, n in zip(ways, (rounds[0], rounds[-1])):
      for seed in ends.seeds:
        way = [look for look in found if (look.method, look.rounds, look.seed) == (method, n, seed)]
        axis.plot([max(k.kl, 1e-2) for k in way], [k.gold for k in way], ".-", linewidth=0.8, color=f"C{i}")
  title = f"after {ends.step} updates, every seed"
  against_rounds.set(xscale="log", xlabel="N, batches sampled at a time", ylabel="true reward", title=title)
  against_rounds.set_xticks(rounds, map(str, rounds))
  against_rounds.legend(fontsize=8)
  for axis, n in zip(ways, (rounds[0], rounds[-1])):
    axis.set(xscale="log", xlabel="KL to the supervised policy", title=f"on the way, N = {n}")
  figure.tight_layout()
  figure.savefig(file, dpi=100)
  plt.close(figure)


def report(folder: pathlib.Path, results: pathlib.Path) -> None:
  """Writes async_rlhf.csv and .png to `results` and prints the table."""
  found = looks(folder)
  if not found:
    raise FileNotFoundError(f"{folder} holds no runs to report; make some first, or give --folder.")
  results.mkdir(parents=True, exist_ok=True)
  with open(results / "async_rlhf.csv", "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Look._fields)
    writer.writerows([*look[:4], *(f"{value:.4f}" for value in look[4:])] for look in found)
  draw(found, results / "async_rlhf.png")
  print(table(found))


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--folder", type=pathlib.Path, help="the runs; default runs/async_rlhf, or one for --smoke")
  parser.add_argument("--results", type=pathlib.Path, help="where csv and png go; default beside the page")
  parser.add_argument("--methods", nargs="+", default=METHODS, choices=get_args(Method))
  parser.add_argument("--rounds", nargs="+", type=int, default=ROUNDS, help="the values of N")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--smoke", action="store_true", help="a few updates of few runs")
  parser.add_argument("--report", action="store_true", help="only report")
  options = parser.parse_args(arguments)
  folder = pathlib.Path("runs/async_rlhf_smoke" if options.smoke else "runs/async_rlhf")
  options.folder = options.folder or folder
  options.results = options.results or (options.folder if options.smoke else RESULTS)
  if options.seeds < 1 or min(options.rounds) < 1:
    parser.error(f"--seeds and --rounds must be at least 1, got {options.seeds} and {options.rounds}")
  if options.smoke:
    options.methods, options.rounds, options.seeds = METHODS[:1], ROUNDS[:2], 1
  if not options.report:
    began = time.monotonic()
    if jax.config.values["jax_compilation_cache_dir"] is None:  # the programs are few, the runs many
      jax.config.update("jax_compilation_cache_dir", str((options.folder / "compiled").absolute()))
    for seed in range(options.seeds):
      for n in options.rounds:
        for method in options.methods:
          summary = runtime.train(experiment(options.folder, method, n, seed, options.smoke))
          print(f"{time.monotonic() - began:.0f} s: {summary.folder.path}: {summary.accuracy:.3f}", flush=True)
  try:
    report(options.folder, options.results)
  except FileNotFoundError as error:
    parser.error(str(error))


if __name__ == "__main__":
  main()
