"""Reports: the curves of one run, or of several side by side."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import numpy as np

from async_rl.recording._metrics import read_metrics
from async_rl.recording._run_folder import RunFolder

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure


class _Panel(NamedTuple):
  """One plot: its metrics by label; comparisons of runs show the first only."""

  title: str
  unit: str
  metrics: dict[str, str]
  limits: tuple[float | None, float | None] = (None, None)


class _Curve(NamedTuple):
  label: str
  steps: np.ndarray
  values: np.ndarray


_PANELS = (
  _Panel("Reward", "mean of the batch", {"training": "reward/mean"}),
  _Panel("Held-out accuracy", "mean reward", {"held out": "eval/accuracy"}),
  _Panel("Lag", "optimizer steps", {"mean": "staleness/mean", "max": "staleness/max"}, (0, None)),
  _Panel("Effective sample size", "share", {"sequences": "ess/sequence", "tokens": "ess/token"}, (0, 1.03)),
  _Panel("Gradient alignment", "cosine to the previous", {"cosine": "grad/cosine_to_previous"}),
  _Panel("Idle time", "share of the step", {"learner": "idle/learner", "generator": "idle/generator"}, (0, 1.03)),
)
#: Okabe and Ito's colors, told apart by the color-blind.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Curves of more points than this are drawn faintly, with their running mean on top.
_SMOOTH_FROM = 40


def write_report(folder: RunFolder) -> pathlib.Path:
  """Draws the curves of a run to report.png in its folder, and returns its path; without metrics it says so there."""
  rows = list(read_metrics(folder.metrics))
  panels = [[_curve(label, metric, rows) for label, metric in panel.metrics.items()] for panel in _PANELS]
  figure = _draw(panels)
  figure.suptitle(folder.path.name if rows else f"{folder.path.name}: no metrics yet")
  for axes, curves in zip(figure.axes, panels):
    if len(curves) > 1 and axes.lines:
      axes.legend(frameon=False)
  figure.savefig(folder.report)
  return folder.report


def compare_runs(folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> pathlib.Path:
  """Draws the curves of several runs into one picture and returns its path.

  Args:
    folders: the folders of the runs; their names become the legend.
    output: the path of the picture; its suffix determines the format.

  Raises:
    FileNotFoundError: if a run has no metrics.
  """
  paths = [pathlib.Path(folder) for folder in folders]
  labels = [path.name for path in paths]
  if len(set(labels)) < len(labels):
    labels = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
  runs = [(label, _read(path)) for label, path in zip(labels, paths)]
  main = [next(iter(panel.metrics.values())) for panel in _PANELS]
  panels = [[_curve(label, metric, rows) for label, rows in runs] for metric in main]
  figure = _draw(panels)
  for axes, panel in zip(figure.axes, _PANELS):
    if len(panel.metrics) > 1:
      axes.set_title(f"{panel.title}: {next(iter(panel.metrics))}", loc="left", fontweight="bold")
  figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
  figure.savefig(output)
  return pathlib.Path(output)


def _read(folder: pathlib.Path) -> list[dict[str, Any]]:
  rows = list(read_metrics(folder / "metrics.jsonl"))
  if not rows:
    raise FileNotFoundError(f"{folder} has no metrics.jsonl with values: is it the folder of a run?")
  return rows


def _curve(label: str, metric: str, rows: list[dict[str, Any]]) -> _Curve:
  points = {row["step"]: row[metric] for row in rows if metric in row}  # a step that was done twice counts as redone
  return _Curve(label, np.asarray(list(points), float), np.asarray(list(points.values()), float))


def _draw(panels: Sequence[Sequence[_Curve]]) -> Figure:
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13, 6.5), dpi=110, layout="constrained")
  grid = figure.subplots(2, 3, sharex=True)
  for axes, panel, curves in zip(grid.flat, _PANELS, panels):
    _draw_panel(axes, panel, [curve for curve in curves if np.isfinite(curve.values).any()])
  for axes in grid[-1]:
    axes.set_xlabel("optimizer step")
  return figure


def _draw_panel(axes: Axes, panel: _Panel, curves: Sequence[_Curve]) -> None:
  axes.set_title(panel.title, loc="left", fontweight="bold")
  axes.set_ylabel(panel.unit)
  axes.grid(alpha=0.25)
  axes.spines[["top", "right"]].set_visible(False)
  for curve, color in zip(curves, _COLORS * (len(curves) // len(_COLORS) + 1)):
    smooth = len(curve.steps) > _SMOOTH_FROM
    axes.plot(
      curve.steps,
      _running_mean(curve.values) if smooth else curve.values,
      label=curve.label,
      color=color,
      marker=None if smooth else ".",
    )
    if smooth:
      axes.plot(curve.steps, curve.values, color=color, alpha=0.2, linewidth=0.8, zorder=1)
  axes.set_ylim(*panel.limits)  # None: as the curves need it
  if not curves:
    axes.text(0.5, 0.5, "not measured", ha="center", va="center", color="gray", transform=axes.transAxes)


def _running_mean(values: np.ndarray) -> np.ndarray:
  """Centered mean over a twentieth of the curve, of the values that are finite; its windows are shorter at the ends."""
  window = np.ones(2 * (len(values) // 40) + 1)
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), window, mode="same")
  count = np.convolve(finite.astype(float), window, mode="same")
  return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
