"""What the runs of a real model say: accuracy by lag and method, collapses, and what was to be seen before them."""

from __future__ import annotations

import csv
import itertools
import math
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import number
from experiments.reproductions._real_model_runs import COLUMNS
from experiments.reproductions._real_model_runs import Run
from experiments.reproductions._real_model_runs import Steps

Runs = Mapping[Run, Steps]
#: The signs of a collapse that the tables show, in words.
SIGNS = {
  "ess": "ESS of the sequences' weights",
  "cosine": "cosine to the gradient before",
  "entropy": "entropy of a token",
  "gradient": "norm of the gradient",
}


def read(file: pathlib.Path) -> dict[Run, Steps]:
  """Returns the runs of a csv file that `write` wrote; none if it is missing."""
  found: dict[Run, Steps] = {}
  if not file.exists():
    return found
  with open(file, newline="") as lines:
    for row in csv.DictReader(lines):
      run = Run(row["method"], int(row["lag_bound"]), int(row["seed"]), float(row["rate"]))
      values = {name: float(row[name]) for name in COLUMNS if row.get(name)}
      found.setdefault(run, {})[int(row["step"])] = values
  return found


def write(runs: Runs, file: pathlib.Path) -> None:
  """Writes every step of the runs, five digits each."""
  file.parent.mkdir(parents=True, exist_ok=True)
  partial = file.with_suffix(".partial")
  with open(partial, "w", newline="") as lines:
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["method", "lag_bound", "seed", "rate", "step", *COLUMNS])
    for run, steps in runs.items():
      for step, row in sorted(steps.items()):
        values = (f"{row[name]:.5g}" if name in row else "" for name in COLUMNS)
        writer.writerow([run.method, run.lag, run.seed, f"{run.rate:g}", step, *values])
  partial.replace(file)


def evaluations(steps: Steps) -> dict[int, tuple[float, float]]:
  """Returns accuracy and half of its 95 % interval over problems by step."""
  return {step: (row["accuracy"], row["half_interval"]) for step, row in sorted(steps.items()) if "accuracy" in row}


def collapse(steps: Steps) -> int | None:
  """Returns the step of the first evaluation with less than half of the start's accuracy, `None` without one."""
  seen = evaluations(steps)
  start = seen[0][0] if 0 in seen else math.nan
  return next((step for step, (accuracy, _) in seen.items() if accuracy < start / 2), None)


def configurations(runs: Runs) -> dict[tuple[int, str, float], list[Run]]:
  """Returns the runs of each lag, method and rate, by seed; sorted by lag, in the order of the methods' first runs."""
  found: dict[tuple[int, str, float], list[Run]] = {}
  for run in sorted(runs, key=lambda run: (run.lag, run.seed)):
    found.setdefault((run.lag, run.method, run.rate), []).append(run)
  return found


def table(runs: Runs) -> str:
  """Returns a row per configuration: accuracy of the start and of the last evaluation, and the collapses.

  ± is half of the 95 % interval over the problems, the mean over the seeds' runs: they answer the same problems, so
  that their errors are not independent.
  """
  rows = []
  for (lag, method, rate), same in configurations(runs).items():
    seen = [evaluations(runs[run]) for run in same]
    ends = [list(each.items())[-1] for each in seen if each]
    if not ends:
      continue
    mean = float(np.mean([accuracy for _, (accuracy, _) in ends]))
    half = float(np.mean([half for _, (_, half) in ends]))
    starts = [each[0][0] for each in seen if 0 in each]
    gone = [collapse(runs[run]) for run in same]
    rows.append(
      [
        f"{lag}",
        method if lag else f"{method} (sync)",
        f"{rate:g}",
        number(float(np.mean(starts)), 3) if starts else "",
        f"{number(mean, 3)} ± {number(half, 3)}",
        ", ".join(f"{number(accuracy, 3)} at {step}" for step, (accuracy, _) in ends),
        ", ".join("–" if step is None else f"by {step}" for step in gone),
      ]
    )
  return grid(["lag", "method", "rate", "start", "end", "each seed", "below half of the start"], rows)


def periods(runs: Runs) -> list[tuple[int, int]]:
  """Returns the first and last steps of the periods between evaluations."""
  steps = sorted({step for found in runs.values() for step in evaluations(found)})
  return [(first + 1, last) for first, last in itertools.pairwise(steps)]


def mean_of_period(steps: Steps, column: str, period: tuple[int, int]) -> float:
  """Returns the mean of a column over a period's steps, NaN if the run has none of them."""
  values = [steps[step][column] for step in range(period[0], period[1] + 1) if column in steps.get(step, {})]
  return float(np.mean(values)) if values else math.nan


def sign_table(runs: Runs, column: str) -> str:
  """Returns a row per configuration: the mean of a column over seeds and steps, by period."""
  between = periods(runs)
  rows = []
  for (lag, method, rate), same in configurations(runs).items():
    by_seed = np.array([[mean_of_period(runs[run], column, period) for period in between] for run in same])
    seen = ~np.isnan(by_seed)
    means = np.where(seen, by_seed, 0.0).sum(axis=0) / np.maximum(seen.sum(axis=0), 1)
    cells = [_signed(mean) if any_seen else "" for mean, any_seen in zip(means, seen.any(axis=0))]
    rows.append([f"{lag}", method, f"{rate:g}", *cells])
  return grid([f"{SIGNS[column]}", "", "rate", *(f"steps {a}–{b}" for a, b in between)], rows)


def _signed(x: float) -> str:
  return ("−" if round(x, 3) < 0 else "") + number(abs(x), 3)


def warnings(runs: Runs) -> str:
  """Returns how well each sign of a period ranks the stale runs by their accuracy at the end (Spearman)."""
  between = periods(runs)
  stale = [steps for run, steps in runs.items() if run.lag and evaluations(steps)]
  ends = np.array([list(evaluations(steps).values())[-1][0] for steps in stale])
  rows = []
  for column, words in SIGNS.items():
    cells = []
    for period in between[:-1]:
      values = np.array([mean_of_period(steps, column, period) for steps in stale])
      there = ~np.isnan(values)
      tells = there.sum() > 2 and np.ptp(values[there]) > 0 and np.ptp(ends[there]) > 0
      cells.append(f"{stats.spearmanr(values[there], ends[there]).statistic:+.2f} ({there.sum()})" if tells else "")
    rows.append([words, *cells])
  return grid(
    ["rank correlation with the accuracy at the end (runs)", *(f"steps {a}–{b}" for a, b in between[:-1])], rows
  )


def tables(runs: Runs) -> str:
  """Returns all tables."""
  return "\n\n".join([table(runs), *(sign_table(runs, column) for column in SIGNS), warnings(runs)])


def draw(runs: Runs, file: pathlib.Path) -> None:
  """Draws accuracy, ESS and the cosine against the step, a column of panels per lag, every run a line."""
  import matplotlib.pyplot as plt

  lags = sorted({run.lag for run in runs})
  methods = list(dict.fromkeys(run.method for run in runs))
  rates = sorted({run.rate for run in runs})
  rows = ("accuracy", "ess", "cosine")
  figure, panels = plt.subplots(
    len(rows), len(lags), figsize=(3.6 * len(lags) + 0.8, 7.5), sharex=True, sharey="row", squeeze=False
  )
  for axis, lag in zip(panels[0], lags):
    axis.set_title(f"lag {lag}")
  for axes, column in zip(panels, rows):
    for axis, lag in zip(axes, lags):
      for run in (run for run in runs if run.lag == lag):
        points = {step: row[column] for step, row in sorted(runs[run].items()) if column in row}
        style = ("-", "--", ":")[min(rates.index(run.rate), 2)]
        values = list(points.values()) if column == "accuracy" else _smooth(list(points.values()))
        axis.plot(list(points), values, style, color=f"C{methods.index(run.method)}", linewidth=1)
    axes[0].set_ylabel({"accuracy": "accuracy, held-out problems", **SIGNS}[column], fontsize=8)
  for i, method in enumerate(methods):
    panels[0][0].plot([], [], color=f"C{i}", label=method)
  for rate, style in zip(rates, ("-", "--", ":")):
    panels[0][0].plot([], [], style, color="gray", label=f"rate {rate:g}")
  panels[0][0].legend(fontsize=6)
  for axis in panels[-1]:
    axis.set_xlabel("step")
  figure.tight_layout()
  figure.savefig(file, dpi=100)
  plt.close(figure)


def _smooth(values: Sequence[float], width: int = 5) -> np.ndarray:
  """Returns running means of a few steps."""
  sums = np.cumsum([0.0, *values])
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(ends - width, 0)
  return (sums[ends] - sums[starts]) / (ends - starts)
