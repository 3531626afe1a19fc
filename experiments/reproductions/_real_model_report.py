"""What the runs of a real model say: accuracy by update, differences at the end, and what was to be seen before."""

from __future__ import annotations

import csv
import io
import itertools
import math
import pathlib
from collections.abc import Iterable
from collections.abc import Mapping

import numpy as np
from scipy import stats

from async_rl._paths import write_text
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._lag_sweep_table import rate_text
from experiments.reproductions._real_model_runs import COLUMNS
from experiments.reproductions._real_model_runs import METHODS
from experiments.reproductions._real_model_runs import SYNC
from experiments.reproductions._real_model_runs import Run
from experiments.reproductions._real_model_runs import Steps
from experiments.reproductions._real_model_runs import diverged

Runs = Mapping[Run, Steps]
#: The number of test problems.
PROBLEMS = 440
#: The run that others are compared with, of the same rate and seed.
BEST = "TOPR"
#: What the name of a method ends with that is computed in float16, after that of the same in bfloat16.
FLOAT16 = ", float16"
#: After three starts a mean ESS of tokens below this over these updates was taken for the sign of a collapse.
LOW = 0.7
PERIOD = (24, 48)
#: What may tell of a collapse, in words.
SIGNS = {
  "reward": "reward of the batches",
  "ess": "ESS of sequences",
  "token_ess": "ESS of tokens",
  "cosine": "cosine to the gradient before",
  "gradient": "norm of the gradient",
  "length": "tokens a sample",
}


def read(file: pathlib.Path) -> dict[Run, Steps]:
  """Returns the runs of a csv file that `write` wrote, by lag; none if it is missing."""
  found: dict[Run, Steps] = {}
  if not file.exists():
    return found
  with open(file, newline="") as lines:
    for row in csv.DictReader(lines):
      run = Run(row["method"], int(row["lag_bound"]), int(row["seed"]), float(row["rate"]))
      values = {name: float(row[name]) for name in COLUMNS if row.get(name)}
      found.setdefault(run, {})[int(row["step"])] = values
  return dict(sorted(found.items(), key=lambda item: (item[0].lag, item[0].seed)))


def write(runs: Runs, file: pathlib.Path) -> None:
  """Writes every step of the runs, five digits each."""
  lines = io.StringIO()
  writer = csv.writer(lines, lineterminator="\n")
  writer.writerow(["method", "lag_bound", "seed", "rate", "step", *COLUMNS])
  for run, steps in runs.items():
    for step, row in sorted(steps.items()):
      values = (f"{row[name]:.5g}" if name in row else "" for name in COLUMNS)
      writer.writerow([run.method, run.lag, run.seed, f"{run.rate:g}", step, *values])
  file.parent.mkdir(parents=True, exist_ok=True)
  write_text(file, lines.getvalue())


def accuracies(steps: Steps) -> dict[int, float]:
  """Returns the accuracy by step."""
  return {step: row["accuracy"] for step, row in sorted(steps.items()) if "accuracy" in row}


def last_accuracy(steps: Steps) -> float:
  """Returns the accuracy of the last evaluation, NaN without one."""
  return list(accuracies(steps).values())[-1] if accuracies(steps) else math.nan


def finished(runs: Runs) -> dict[Run, Steps]:
  """Returns the runs that have the last evaluation that any of them has; the others were cut off or diverged."""
  last = max((step for steps in runs.values() for step in accuracies(steps)), default=0)
  return {run: steps for run, steps in runs.items() if last in accuracies(steps)}


def collapse(steps: Steps) -> int | None:
  """Returns the step of the first evaluation with less than half of the start's accuracy, `None` without one."""
  seen = accuracies(steps)
  return next((step for step, accuracy in seen.items() if accuracy < seen.get(0, math.nan) / 2), None)


def interval(share: float, comparisons: int = 1, samples: int = PROBLEMS) -> tuple[float, float]:
  """Returns Wilson's 95 % interval of a share of the samples, widened if it is one of several (Bonferroni)."""
  found = stats.binomtest(round(share * samples), samples).proportion_ci(1 - 0.05 / comparisons, "wilson")
  return float(found.low), float(found.high)


def difference(first: float, second: float, comparisons: int = 1, samples: int = PROBLEMS) -> tuple[float, float]:
  """Returns Newcombe's 95 % interval of the difference of two shares of as many samples.

  It takes them for independent, which is too wide for answers to the same problems.

  References:
    Newcombe, Interval estimation for the difference between independent proportions, 1998 (method 10)
  """
  (low, high), (other_low, other_high) = (interval(share, comparisons, samples) for share in (first, second))
  middle = first - second
  return (
    middle - math.hypot(first - low, other_high - second),
    middle + math.hypot(high - first, second - other_low),
  )


def accuracy_table(runs: Runs) -> str:
  """Returns a row per run: the accuracy of every evaluation, and the first that is below half of the start's.

  The last cell of a run that was cut off, or diverged, says so.
  """
  steps = sorted({step for found in runs.values() for step in accuracies(found)})
  ended = finished(runs)
  rows = []
  for run, found in runs.items():
    seen, gone = accuracies(found), collapse(found)
    cells = [number(seen[step], 3) if step in seen else "" for step in steps]
    said = ["–" if run in ended else ""] if gone is None else [f"at {gone}"]
    said += [] if run in ended else [_stop(found)]
    rows.append([*_names(run), *cells, ", ".join(filter(None, said))])
  return grid([*_NAMES, *("start" if step == 0 else str(step) for step in steps), "below half"], rows)


def end_table(runs: Runs, samples: int = PROBLEMS, every_lag: bool = False) -> str:
  """Returns a row per run: accuracy at the end with its interval, its differences to the start and to other runs.

  Differences in bold stay clear of 0 when the intervals are widened to hold for all of the table jointly. A run that
  was cut off has no row, and what no run can be compared with no column.

  Args:
    runs: the runs.
    samples: the number of samples of an evaluation.
    every_lag: whether runs are compared with `BEST` at their own lag, with sync and, if their method's name ends with
      `FLOAT16`, with the same in bfloat16, not with `BEST` at the largest lag.
  """
  largest = max(run.lag for run in runs)
  runs = finished(runs)
  others = {f"minus {BEST} at lag {largest}": lambda run: run._replace(method=BEST, lag=largest)}
  if every_lag:
    others = {
      f"minus {BEST} at its lag": lambda run: run._replace(method=BEST),
      "minus sync": lambda run: run._replace(method=SYNC, lag=0),
      "minus bfloat16": lambda run: run._replace(method=run.method.removesuffix(FLOAT16)),
    }
  others = {head: other for head, other in others.items() if any(other(run) in runs.keys() - {run} for run in runs)}
  pairs = {}
  for run, steps in runs.items():
    found = [runs.get(other(run), {}) for other in others.values()]
    ends = (math.nan if other is steps else last_accuracy(other) for other in found)
    pairs[run] = [accuracies(steps).get(0, math.nan), *ends]
  comparisons = sum(not math.isnan(other) for accuracy in pairs.values() for other in accuracy)
  rows = []
  for run in pairs:
    end = last_accuracy(runs[run])
    low, high = interval(end, samples=samples)
    cells = [_difference(end, other, comparisons, samples) for other in pairs[run]]
    rows.append([*_names(run), f"{number(end, 3)} ({number(low, 3)} to {number(high, 3)})", *cells])
  return grid([*_NAMES, "end", "minus its start", *others], rows)


def sign_table(runs: Runs) -> str:
  """Returns a row per run: means of the signs over the updates before the first, the second and the last evaluation.

  A run that was cut off has a dash for what it has not all updates of.
  """
  steps = sorted({step for found in runs.values() for step in accuracies(found)})
  periods = list(itertools.pairwise(steps))
  periods = [*periods[:2], *periods[2:][-1:]]
  rows = []
  for run, found in runs.items():
    cells = []
    for column in SIGNS:
      means = [mean_of_period(found, column, period) if period[1] in found else math.nan for period in periods]
      texts = ("–" if math.isnan(mean) else _signed(mean, 1 if column == "length" else 3) for mean in means)
      cells.append("" if np.all(np.isnan(means)) else " → ".join(texts))
    rows.append([*_names(run), *cells])
  return grid([*_NAMES, *SIGNS.values()], rows)


def reward_table(runs: Runs) -> str:
  """Returns a row per run: the mean reward of the batches before its first and its last evaluation, and the rise.

  Intervals are Student's and Welch's at 95 %, over batches, each of other prompts; a rise in bold stays clear of 0 when
  the intervals are widened to hold for all of the table jointly. A run that was cut off has no row.
  """
  found = {run: rewards for run, steps in finished(runs).items() if (rewards := _rewards(steps)) is not None}
  rows = []
  for run, (first, last) in found.items():
    welch = stats.ttest_ind(last, first, equal_var=False)
    low, high = welch.confidence_interval(0.95)
    text = f"{_signed((low + high) / 2, plus='+')} ± {number((high - low) / 2, 3)}"
    low, high = welch.confidence_interval(1 - 0.05 / len(found))
    rows.append([*_names(run), measure(first, 3), measure(last, 3), text if low <= 0 <= high else f"**{text}**"])
  return grid([*_NAMES, "first", "last", "rise"], rows)


def repeat_table(starts: Mapping[str, Runs], samples: int = PROBLEMS) -> str:
  """Returns a row per lag and method, a column per start and seed: the end minus the run's own start, and its collapse.

  A difference in bold stays clear of 0 when Newcombe's intervals are widened to hold for all of the table jointly. A
  run that was cut off has no difference and is not counted among those that may have collapsed.

  Args:
    starts: the runs of every start by its name.
    samples: the number of samples of an evaluation.
  """
  ends = {name: finished(runs) for name, runs in starts.items()}
  columns = [(name, seed) for name, runs in starts.items() for seed in sorted({run.seed for run in runs})]
  kinds = {(run.lag, run.method) for runs in starts.values() for run in runs}
  comparisons = sum(map(len, ends.values()))
  rows = []
  for lag, method in sorted(kinds, key=lambda kind: (kind[0], list(METHODS).index(kind[1]))):
    cells, collapsed = [], []
    for name, seed in columns:
      found = [run for run in starts[name] if (run.lag, run.method, run.seed) == (lag, method, seed)]
      cells.append("; ".join(_change(starts[name][run], run in ends[name], comparisons, samples) for run in found))
      collapsed += [collapse(ends[name][run]) is not None for run in found if run in ends[name]]
    counted = f"{sum(collapsed)} of {len(collapsed)}" if collapsed else "–"
    rows.append([*_names(Run(method, lag, 0, 0.0))[:2], *cells, counted])
  return grid(["lag", "method", *(f"{name}, seed {seed}" for name, seed in columns), "collapsed"], rows)


def _change(steps: Steps, ended: bool, comparisons: int, samples: int) -> str:
  """Returns what a run's end is minus its start and when it collapsed, or where it was cut off."""
  if not ended:
    return _stop(steps)
  start, end, gone = accuracies(steps).get(0, math.nan), last_accuracy(steps), collapse(steps)
  low, high = difference(end, start, comparisons, samples)
  text = _signed(end - start, plus="+")
  return (text if low <= 0 <= high else f"**{text}**") + ("" if gone is None else f", collapse at {gone}")


def _stop(steps: Steps) -> str:
  """Returns where a run without an end stopped."""
  return f"{'diverged' if diverged(steps) else 'cut off'} at {max(steps)}"


def warning_table(parts: Mapping[str, Iterable[Runs]]) -> str:
  """Returns a row per part of the runs and one of all: how often a low ESS of tokens went with a collapse.

  Low is a mean below `LOW` over `PERIOD`. Runs that were cut off are not counted.

  Args:
    parts: by its name, the runs of the starts that a part is made of.
  """
  found = {
    name: [
      (mean_of_period(steps, "token_ess", PERIOD) < LOW, collapse(steps))
      for runs in part
      for steps in finished(runs).values()
    ]
    for name, part in parts.items()
  }
  found["all"] = list(itertools.chain(*found.values()))
  rows = []
  for name, pairs in found.items():
    hits = [gone for low, gone in pairs if low and gone is not None]
    later = sum(gone > PERIOD[1] for gone in hits)
    false = sum(low and gone is None for low, gone in pairs)
    missed = sum(not low and gone is not None for low, gone in pairs)
    counts = [len(pairs), len(hits), later, false, missed, len(pairs) - len(hits) - false - missed]
    rows.append([name, *map(str, counts)])
  heads = ["low, collapse", f"of these after update {PERIOD[1]}", "low, no collapse", "not low, collapse", "neither"]
  return grid(["runs of", "runs", *heads], rows)


def _rewards(steps: Steps) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns the rewards of the batches before a run's first and its last evaluation, `None` if it has but one."""
  periods = list(itertools.pairwise(accuracies(steps)))
  if len(periods) < 2:
    return None
  first, last = ([steps[step]["reward"] for step in range(a + 1, b + 1)] for a, b in (periods[0], periods[-1]))
  return np.array(first), np.array(last)


def mean_of_period(steps: Steps, column: str, period: tuple[int, int]) -> float:
  """Returns the mean of a column over the steps after the first of the period up to the last, NaN if there is none."""
  values = [steps[step][column] for step in range(period[0] + 1, period[1] + 1) if column in steps.get(step, {})]
  return float(np.mean(values)) if values else math.nan


_NAMES = ["lag", "method", "rate", "seed"]


def _names(run: Run) -> list[str]:
  method = f"{run.method} (sync)" if run.method == SYNC and not run.lag else run.method
  return [str(run.lag), method, rate_text(run.rate), str(run.seed)]


def _difference(first: float, second: float, comparisons: int, samples: int) -> str:
  if math.isnan(second):
    return ""
  low, high = difference(first, second, samples=samples)
  text = f"{_signed(first - second, plus='+')} ({_end(low)} to {_end(high)})"
  low, high = difference(first, second, comparisons, samples)
  return text if low <= 0 <= high else f"**{text}**"


def _end(x: float) -> str:
  """Returns an end of an interval; one that rounds to 0 keeps its sign, which says whether the interval holds 0."""
  return ("−" if x < 0 else "+") + number(abs(x), 3)


def _signed(x: float, digits: int = 3, plus: str = "") -> str:
  return ("−" if round(x, digits) < 0 else plus) + number(abs(x), digits)


def tables(runs: Runs, samples: int = PROBLEMS) -> str:
  """Returns all tables of runs whose evaluations have this number of samples."""
  return "\n\n".join((accuracy_table(runs), end_table(runs, samples), reward_table(runs), sign_table(runs)))


#: The signs that are drawn.
_DRAWN = ("ess", "token_ess", "cosine")


def draw(runs: Runs, file: pathlib.Path, samples: int = PROBLEMS) -> None:
  """Draws accuracy with its intervals, both ESS and the cosine by step, a column per lag, every run a line."""
  import matplotlib.pyplot as plt

  lags = sorted({run.lag for run in runs})
  methods = list(dict.fromkeys(run.method for run in runs))
  rates = sorted({run.rate for run in runs})
  figure, panels = plt.subplots(
    4, len(lags), figsize=(4 * len(lags) + 0.8, 10), sharex=True, sharey="row", squeeze=False, layout="constrained"
  )
  for run, steps in runs.items():
    axes = panels[:, lags.index(run.lag)]
    style = dict(color=f"C{methods.index(run.method)}", linestyle=("-", "--", ":")[min(rates.index(run.rate), 2)])
    seen = accuracies(steps)
    shift = 0.7 * methods.index(run.method)  # so that the intervals stand side by side
    bounds = np.array([interval(accuracy, samples=samples) for accuracy in seen.values()]).reshape(-1, 2)
    values = np.array(list(seen.values()))
    errors = np.maximum(np.stack([values - bounds[:, 0], bounds[:, 1] - values]), 0.0)
    axes[0].errorbar([step + shift for step in seen], values, errors, elinewidth=0.8, linewidth=1.2, **style)
    for axis, column in zip(axes[1:], _DRAWN):
      points = {step: row[column] for step, row in sorted(steps.items()) if column in row}
      axis.plot(list(points), _smooth(np.array(list(points.values()))), linewidth=1.2, **style)
  for axis, lag in zip(panels[0], lags):
    axis.set_title(f"lag {lag}")
    axis.set_ylim(bottom=0)
  for axes, words in zip(panels, ("accuracy, 95 % intervals", *(SIGNS[column] for column in _DRAWN))):
    axes[0].set_ylabel(words)
  for axis in panels[1]:
    axis.set(yscale="log", ylim=(0.005, 1.2))
  for axis in panels[2]:
    axis.set_ylim(0.0, 1.05)
  for axis in panels[3]:
    axis.axhline(0.0, color="gray", linewidth=0.5)
    axis.set_xlabel("update")
  entries = [plt.Line2D([], [], color=f"C{i}", label=method) for i, method in enumerate(methods)]
  for rate, line in zip(rates if len(rates) > 1 else (), ("-", "--", ":")):
    entries += panels[0, 0].plot([], [], line, color="gray", label=rate_text(rate))
  figure.legend(handles=entries, loc="outside lower center", ncols=4, frameon=False)
  figure.savefig(file, dpi=100)
  plt.close(figure)


def _smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
  """Returns the mean of each value and the few before it."""
  sums = np.cumsum([0.0, *values])
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(ends - width, 0)
  return (sums[ends] - sums[starts]) / (ends - starts)
