"""Puts together what several studies on fresh seeds have, by configuration, lag, loss and method."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from experiments.reproductions import _lag_sweep_paired as paired
from experiments.reproductions import _lag_sweep_tasks as problems
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import interval
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import number
from experiments.reproductions._intervals import verdict
from experiments.reproductions._lag_sweep_plan import LAST
from experiments.reproductions._lag_sweep_plan import final_accuracy
from experiments.reproductions._lag_sweep_run import CURVES
from experiments.reproductions._lag_sweep_table import Table
from experiments.reproductions._lag_sweep_table import rate_text

#: What counts as a large loss of accuracy to sync.
MUCH = 0.1


def having(studies: Sequence[paired.Study], config: tuple[str, int, float]) -> list[paired.Study]:
  """Returns the studies that have a configuration (method, lag, rate)."""
  return [study for study in studies if config in study.fresh.configs]


def minus_sync(studies: Sequence[paired.Study], config: tuple[str, int, float]) -> np.ndarray:
  """Returns the accuracies of a configuration minus those of sync, by seed, of all studies that have it."""
  return np.concatenate([study.minus_sync(*config) for study in having(studies, config)])


def at_edge(studies: Sequence[paired.Study], config: tuple[str, int, float]) -> bool:
  """Returns whether a configuration's rate lies at the edge of those tried in a study that chose it, and in none
  between them."""
  found = [row for x in having(studies, config) for row in x.rows[config[1]] if x.fresh.configs[row.config] == config]
  return any(row.edge for row in found) and not any(row.chosen and not row.edge for row in found)


def shared(studies: Sequence[paired.Study]) -> list[tuple[str, int, float]]:
  """Returns the configurations of two studies or more, without sync, by lag and by the accuracy in the first one."""
  every = dict.fromkeys(config for study in studies for config in study.fresh.configs)
  repeated = [config for config in every if len(having(studies, config)) > 1 and config[0] != "sync"]
  return sorted(repeated, key=lambda c: (c[1], -float(np.mean(having(studies, c)[0].accuracy(*c)))))


def together(studies: Sequence[paired.Study], comparisons: int) -> str:
  """Returns the table of what several studies share: differences to sync in each, and over all of their seeds.

  Every difference is to the sync run of the same study and seed, so that none is between two machines.

  Args:
    studies: the studies, on different seeds.
    comparisons: the number of comparisons of all tables, for what is bold.
  """
  rows = []
  for config in shared(studies):
    found = {id(study): study.minus_sync(*config) for study in having(studies, config)}
    cells = [verdict(found[id(study)], comparisons) if id(study) in found else "" for study in studies]
    every = np.concatenate(list(found.values()))
    method, lag, rate = config
    rows.append([method, str(lag), rate_text(rate), *cells, str(len(every)), verdict(every, comparisons)])
  names = [f"seeds {study.fresh.seeds[0]}–{study.fresh.seeds[-1]}" for study in studies]
  return grid(["minus sync", "lag", "rate", *names, "seeds", "over all of them"], rows)


def by_lag(studies: Sequence[paired.Study], method: str, lags: Sequence[int], rate: float, comparisons: int) -> str:
  """Returns a row per lag of a method: what it loses, on how many seeds much, and by the lag.

  Args:
    studies: the studies; of each the lags that it has count, and the differences of neighboring lags that it has both.
    method: the method.
    lags: the lags, the shortest first.
    rate: the learning rate.
    comparisons: the number of comparisons of all tables, for what is bold.
  """
  lines: list[list[str]] = []
  for lag, shorter in zip(lags, (None, *lags)):
    found = having(studies, (method, lag, rate))
    values = minus_sync(found, (method, lag, rate))
    many, more, seeds = f"{int(lost_much(values).sum())} of {len(values)}", "", ""
    if shorter is not None:
      both = having(found, (method, shorter, rate))
      differences = [study.accuracy(method, lag, rate) - study.accuracy(method, shorter, rate) for study in both]
      every = np.concatenate(differences)
      more, seeds = verdict(every, comparisons), str(len(every))
    lines.append([str(lag), rate_text(rate), verdict(values, comparisons), many, more, seeds])
  much = f"loses more than {number(MUCH, 1)} on seeds"
  return grid([f"{method} at lag", "rate", "minus sync", much, "minus the shorter lag", "over seeds"], lines)


def by_loss(splits: Sequence[paired.Split], method: str, lags: Iterable[int], rate: float) -> str:
  """Returns what runs that lose much to the sync run of their seed looked like, and the others, a row of each per lag.

  The quantities are means over the second half of the updates.

  Args:
    splits: the runs of the studies.
    method: the method.
    lags: the lags.
    rate: the learning rate, of sync as well.
  """
  names, lines = ("cosine", "ess", "kl", "entropy"), []
  sync = np.concatenate([_final(split.runs("sync", 0, rate)) for split in splits])
  for lag in lags:
    curves = np.concatenate([split.runs(method, lag, rate) for split in splits])
    much = lost_much(_final(curves) - sync)
    later = curves[:, :, curves.shape[2] // 2 :].mean(axis=2)
    for said, chosen in ((f"more than {number(MUCH, 1)}", much), ("less", ~much)):
      if chosen.any():
        values = [measure(later[chosen, CURVES.index(name)]) for name in names]
        lines.append([str(lag), said, str(chosen.sum()), *values])
  return grid([f"{method} at lag", "loses", "runs", *names], lines)


def by_update(split: paired.Split, pairs: Iterable[tuple[tuple[str, int, float], tuple[str, int, float]]]) -> str:
  """Returns a row per pair of configurations: the accuracy of one minus that of the other in parts of the updates, each
  as long as the one at the end of a run that is its accuracy; means over the fresh seeds."""
  setting, rows = problems.SETTINGS[split.task], []
  length = LAST * setting.probe_every
  spans = [f"{start + 1}–{start + length}" for start in range(0, setting.steps, length)]
  for pair in pairs:
    one, other = (split.runs(*config)[:, CURVES.index("accuracy")].mean(axis=0) for config in pair)
    parts = (one - other).reshape(-1, LAST).mean(axis=1).tolist()
    names = [f"{method} at {rate_text(rate)}" for method, _, rate in pair]
    rows.append([str(pair[0][1]), *names, *(("−" if x < 0 else "+") + number(abs(x)) for x in parts)])
  return grid(["lag", "method", "minus", *spans], rows)


def lost_much(differences: np.ndarray) -> np.ndarray:
  """Returns which differences to sync are losses of more than `MUCH`; what float32 makes of it is not more."""
  return np.round(differences, 6) < -MUCH


def _final(curves: np.ndarray) -> np.ndarray:
  return np.array([final_accuracy(run) for run in curves])


def draw_by_lag(
  studies: Sequence[paired.Study],
  shown: Mapping[str, Sequence[tuple[str, int, float]]],
  file: pathlib.Path,
) -> None:
  """Draws the differences to sync by lag, over all studies that have a configuration, with 95 % intervals.

  Args:
    studies: the studies.
    shown: the configurations (method, lag, rate) of every line by its label.
    file: the file.
  """
  import matplotlib.pyplot as plt

  figure, axis = plt.subplots(figsize=(8, 4.4), layout="constrained")
  axis.axhline(0, color="black", linewidth=0.8)
  nothing = 1.6  # where lag 0 stands on the logarithmic axis
  for i, (label, configs) in enumerate(shown.items()):
    differences = [interval(minus_sync(studies, config)) for config in configs]
    aside = 1.02 ** (i - len(shown) / 2)  # so that intervals of one lag lie beside each other
    places = [aside * (lag or nothing) for _, lag, _ in configs]
    means, halves = [x.mean for x in differences], [x.half for x in differences]
    axis.errorbar(places, means, yerr=halves, fmt="o-", color=f"C{i}", capsize=2.5, markersize=4, label=label)
  lags = sorted({lag for configs in shown.values() for _, lag, _ in configs})
  axis.set(xscale="log", xlabel="lag, updates", ylabel="accuracy minus sync")
  axis.set_xticks([lag or nothing for lag in lags], [str(lag) for lag in lags])
  axis.set_xticks([], minor=True)
  axis.grid(axis="y", linewidth=0.3)
  figure.legend(loc="outside right upper", fontsize=8)
  figure.savefig(file, dpi=110)
  plt.close(figure)


def coverage(studies: Sequence[paired.Study], tries: Sequence[Table], names: Iterable[str], lags: Sequence[int]) -> str:
  """Returns a row per method: by lag, on how many fresh seeds it was run, or else (in brackets) was only tried.

  A star says that the chosen rate is at the edge of those tried in each study that ran it at one, as in their tables.

  Args:
    studies: the studies on fresh seeds.
    tries: the runs on the seeds that rates were chosen on.
    names: the methods.
    lags: the lags.
  """
  rows = []
  for name in names:
    cells = []
    for lag in lags:
      fresh = sum(len(study.fresh.seeds) for study in studies if study.fresh.rates(name, lag))
      tried = sum(len(table.seeds) for table in tries if table.rates(name, lag))
      ran = [row for study in studies for row in study.rows.get(lag, ()) if study.fresh.configs[row.config][0] == name]
      edge = any(row.edge for row in ran) and not any(row.chosen and not row.edge for row in ran)
      cells.append(f"{fresh}{'*' * edge}" if fresh else f"({tried})" if tried else "–")
    rows.append([name, *cells])
  return grid(["method", *(f"lag {lag}" for lag in lags)], rows)
