"""Plots of metrics over the optimizer steps: what each panel shows, and how panels are drawn."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

import numpy as np

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

#: Okabe and Ito's colors, told apart by the color-blind.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINE_STYLES = ("-", "--", ":", "-.")
#: Curves of more points than this are drawn faintly, with their running mean on top.
_SMOOTH_FROM = 40
_COLUMNS = 4


class Panel(NamedTuple):
  """One plot of a few metrics.

  Attributes:
    title: the title.
    unit: the label of the vertical axis.
    metrics: the names of the metrics, by label.
    limits: the limits of the vertical axis; `None` follows the curves.
    log: whether the vertical axis is logarithmic; values that are not positive are left out there.
    stacked: the names of metrics, by label, that are drawn as areas on top of each other.
  """

  title: str
  unit: str
  metrics: Mapping[str, str]
  limits: tuple[float | None, float | None] = (None, None)
  log: bool = False
  stacked: Mapping[str, str] = types.MappingProxyType({})


class Curve(NamedTuple):
  """The values of a metric over the optimizer steps, float64 [N] each."""

  label: str
  steps: np.ndarray
  values: np.ndarray


_STEP_TIME = Panel("Step time", "seconds", {"step": "time/step"}, log=True)
_BREAKDOWN = Panel(
  "Step breakdown",
  "share of the step",
  {"generation": "time/generation/share", "weight push": "time/weight_push/share"},
  (0, 1.5),  # with room for the legend
  stacked={
    "learning": "time/learning/share",
    "waiting": "time/waiting/share",
    "evaluation": "time/evaluation/share",
    "checkpoint": "time/checkpoint/share",
  },
)
#: The panels of a run.
PANELS = (
  Panel("Reward", "mean of the batch", {"training": "reward/mean"}),
  Panel("Held-out accuracy", "mean reward", {"held out": "eval/accuracy"}),
  Panel("Completion length", "tokens", {"mean": "response/length_mean", "max": "response/length_max"}, (0, None)),
  Panel("Entropy", "nats per token", {"policy": "entropy"}, (0, None)),
  Panel("KL(sampler || policy)", "nats per token", {"behavior": "kl/behavior"}),
  Panel("KL(sampler || reference)", "nats per sequence", {"reference": "kl/reference"}),
  Panel("Lag", "optimizer steps", {"mean": "staleness/mean", "max": "staleness/max"}, (0, None)),
  Panel("Effective sample size", "share", {"sequences": "ess/sequence", "tokens": "ess/token"}, (0, 1.03)),
  Panel("Gradient norm", "before the optimizer", {"gradient": "grad/norm"}, log=True),
  Panel("Gradient alignment", "cosine to the previous", {"cosine": "grad/cosine_to_previous"}),
  Panel("Learning rate", "before stabilizers", {"rate": "optimizer/learning_rate"}),
  Panel("Throughput", "tokens/s", {"generated": "throughput/generated", "trained": "throughput/trained"}, (0, None)),
  _BREAKDOWN,
  Panel("Idle time", "share of the step", {"learner": "idle/learner", "generator": "idle/generator"}, (0, 1.03)),
)
#: The panels of a comparison, which has one curve per run: the step's length takes the place of its parts.
COMPARED = tuple(_STEP_TIME if panel is _BREAKDOWN else panel for panel in PANELS)


def make_curve(label: str, metric: str, rows: Rows) -> Curve:
  """Returns the curve of a metric.

  Args:
    label: the label of the curve.
    metric: the name of the metric; `time/x/share` is `time/x` as a share of `time/step`.
    rows: the rows of a run; a step that was done twice counts as it was redone.
  """
  name = metric.removesuffix("/share")
  points = {row["step"]: row[name] for row in rows if name in row}
  curve = Curve(label, np.asarray(list(points), float), np.asarray(list(points.values()), float))
  if name == metric:
    return curve
  seconds = {row["step"]: row["time/step"] for row in rows if "time/step" in row}
  return curve._replace(values=curve.values / np.asarray([seconds.get(step) for step in points], float))


def make_curves(panel: Panel, rows: Rows) -> list[Curve]:
  """Returns the curves of a panel, those of its stack first."""
  return [make_curve(label, metric, rows) for label, metric in {**panel.stacked, **panel.metrics}.items()]


def draw(panels: Sequence[tuple[Panel, Sequence[Curve]]]) -> Figure:
  """Draws the panels that have values, row by row; curve i has the same color in all of them."""
  from matplotlib.figure import Figure

  shown = [(panel, curves) for panel, curves in panels if any(_has_values(curve, panel.log) for curve in curves)]
  height = max(1, math.ceil(len(shown) / _COLUMNS))
  figure = Figure(figsize=(18, 1 + 2.8 * height), dpi=100, layout="constrained")
  for place, (panel, curves) in enumerate(shown, start=1):
    _draw_panel(figure.add_subplot(height, _COLUMNS, place), panel, curves)
  limits = [axes.get_xlim() for axes in figure.axes]
  for axes in figure.axes:
    axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
  if shown:
    figure.supxlabel("optimizer step")
  return figure


def _has_values(curve: Curve, log: bool) -> bool:
  return bool((np.isfinite(curve.values) & ((curve.values > 0) | (not log))).any())


def _draw_panel(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
  from matplotlib.ticker import MaxNLocator

  axes.set_title(panel.title, loc="left", fontweight="bold")
  axes.set_ylabel(panel.unit)
  axes.grid(alpha=0.25)
  axes.spines[["top", "right"]].set_visible(False)
  axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
  if panel.log:
    axes.set_yscale("log", nonpositive="mask")
  else:
    axes.yaxis.set_major_formatter("{x:g}")  # without a common factor, whose place is that of the title
  _draw_stack(axes, curves[: len(panel.stacked)])
  for i, curve in enumerate(curves[len(panel.stacked) :]):
    color, style = _COLORS[i % len(_COLORS)], _LINE_STYLES[i // len(_COLORS) % len(_LINE_STYLES)]
    if panel.stacked:  # areas have the colors
      color, style = "black", _LINE_STYLES[i + 1]
    if _has_values(curve, panel.log):
      _draw_line(axes, curve, color, style, faint=not panel.stacked)
  axes.set_ylim(*panel.limits)  # None: as the curves need it


def _draw_stack(axes: Axes, curves: Sequence[Curve]) -> None:
  if curves:
    smoothed = [np.nan_to_num(_smoothed(curve)) for curve in curves]
    labels = [curve.label for curve in curves]
    axes.stackplot(curves[0].steps, *smoothed, labels=labels, colors=_COLORS, alpha=0.55, linewidth=0)


def _draw_line(axes: Axes, curve: Curve, color: str, style: str, *, faint: bool) -> None:
  """Draws the running mean of a curve, over its faint values if wanted; a short curve is drawn as it is."""
  smooth = len(curve.steps) > _SMOOTH_FROM
  axes.plot(
    curve.steps,
    _smoothed(curve),
    label=curve.label,
    color=color,
    linestyle=style,
    marker=None if smooth else ".",
  )
  if smooth and faint:
    axes.plot(curve.steps, curve.values, color=color, alpha=0.2, linewidth=0.8, zorder=1)


def _smoothed(curve: Curve) -> np.ndarray:
  return _running_mean(curve.values) if len(curve.steps) > _SMOOTH_FROM else curve.values


def _running_mean(values: np.ndarray) -> np.ndarray:
  """Centered mean over a twentieth of the curve, of the values that are finite; its windows are shorter at the ends."""
  window = np.ones(2 * (len(values) // 40) + 1)
  finite = np.isfinite(values)
  total = np.convolve(np.where(finite, values, 0.0), window, mode="same")
  count = np.convolve(finite.astype(float), window, mode="same")
  return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
