"""How off-policy may RLHF be? Methods of Asynchronous RLHF against N, the batches that are sampled at a time.

    python -m experiments.reproductions.async_rlhf            # two CPU cores or a GPU; makes the runs, then the report
    python -m experiments.reproductions.async_rlhf --report   # of the runs there are
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

METHODS: tuple[Method, ...] = ("online_dpo", "rloo", "proximal_rloo", "best_of_n")
ROUNDS = (1, 4, 16, 64)
RESULTS = pathlib.Path(__file__).parent / "results"


class Look(NamedTuple):
  """Held-out samples of one run at one step: mean true reward, mean reward of the reward model, KL to the start."""

  method: str
  rounds: int
  seed: int
  step: int
  gold: float
  proxy: float
  kl: float


def config(folder: pathlib.Path, method: Method, rounds: int, seed: int, smoke: bool) -> keywords.Config:
  """One run; two rounds of the largest N."""
  options: dict[str, Any] = (
    keywords.SMOKE | {"steps": 4, "eval_every": 2} if smoke else {"steps": 128, "eval_every": 32}
  )
  return keywords.Config(
    run_dir=str(folder / f"{method}_n{rounds}_seed{seed}"),
    stages=str(folder / "stages"),
    mode="simulated",
    lag="rounds",
    max_lag=rounds - 1,
    method=method,
    seed=seed,
    **options | {"checkpoint_every": 0},
  )


def looks(folder: pathlib.Path) -> list[Look]:
  """Of all runs in the folder, finished or not."""
  found = []
  for file in sorted(folder.glob("*_n*_seed*/metrics.jsonl")):
    method, rounds, seed = file.parent.name.rsplit("_", 2)
    for row in recording.read_metrics(file):
      if "eval/kl_reference" in row:
        values = (row[f"eval/{name}"] for name in ("accuracy", "proxy", "kl_reference"))
        found.append(Look(method, int(rounds[1:]), int(seed[4:]), row["step"], *values))
  return found


def table(found: list[Look]) -> str:
  """True reward and KL at the end, mean and standard deviation over seeds; a row a method."""
  last = max(look.step for look in found)
  rounds = sorted({look.rounds for look in found})
  lines = ["| method | " + " | ".join(f"N = {n}" for n in rounds) + " |", "|---" * (len(rounds) + 1) + "|"]
  for method in dict.fromkeys(look.method for look in found):
    cells = []
    for n in rounds:
      ends = [look for look in found if (look.method, look.rounds, look.step) == (method, n, last)]
      gold, kl = np.array([look.gold for look in ends]), np.array([look.kl for look in ends])
      cells.append(f"{gold.mean():.3f} ± {gold.std():.3f}, KL {kl.mean():.1f}" if ends else "")
    lines.append(f"| {method} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def draw(found: list[Look], file: pathlib.Path) -> None:
  """True reward at the end against N, and on the way against the KL, at the smallest and at the largest N."""
  import matplotlib.pyplot as plt

  last, rounds = max(look.step for look in found), sorted({look.rounds for look in found})
  figure, (ends, *ways) = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
  for i, method in enumerate(dict.fromkeys(look.method for look in found)):
    style = {"color": f"C{i}", "label": method}
    gold = [[k.gold for k in found if (k.method, k.rounds, k.step) == (method, n, last)] for n in rounds]
    means = [np.mean(values) if values else np.nan for values in gold]
    ends.errorbar(rounds, means, [np.std(values) if values else 0.0 for values in gold], marker="o", capsize=3, **style)
    for axis, n in zip(ways, (rounds[0], rounds[-1])):
      for seed in sorted({look.seed for look in found}):
        way = [look for look in found if (look.method, look.rounds, look.seed) == (method, n, seed)]
        axis.plot([max(k.kl, 1e-2) for k in way], [k.gold for k in way], ".-", linewidth=0.8, color=f"C{i}")
  ends.set(xscale="log", xlabel="N, batches sampled at a time", ylabel="true reward", title=f"after {last} updates")
  ends.set_xticks(rounds, map(str, rounds))
  ends.legend(fontsize=8)
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
  parser.add_argument("--folder", type=pathlib.Path, help="of the runs; default runs/async_rlhf, or one for --smoke")
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
    options.methods, options.rounds, options.seeds = METHODS[:2], ROUNDS[:2], 1
  if not options.report:
    began = time.monotonic()
    if jax.config.values["jax_compilation_cache_dir"] is None:  # the programs are few, the runs many
      jax.config.update("jax_compilation_cache_dir", str((options.folder / "compiled").absolute()))
    for seed in range(options.seeds):
      for n in options.rounds:
        for method in options.methods:
          run = config(options.folder, method, n, seed, options.smoke)
          summary = runtime.train(run)
          print(f"{time.monotonic() - began:.0f} s: {run.run_dir}: {summary.accuracy:.3f}", flush=True)
  try:
    report(options.folder, options.results)
  except FileNotFoundError as error:
    parser.error(str(error))


if __name__ == "__main__":
  main()
