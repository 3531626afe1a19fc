"""Reports: the curves of one run, or of several side by side, and a table of the values that runs ended with."""

from __future__ import annotations

import io
import math
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl._buckets import check_access
from async_rl._paths import Path
from async_rl._paths import as_path
from async_rl.recording._metrics import read_metrics
from async_rl.recording._plots import COMPARED
from async_rl.recording._plots import PANELS
from async_rl.recording._plots import Rows
from async_rl.recording._plots import draw
from async_rl.recording._plots import make_curve
from async_rl.recording._plots import make_curves
from async_rl.recording._run_folder import RunFolder
from async_rl.recording._run_folder import describe_missing_run

#: The columns of the table of final values: heading, metric, format.
_FINAL = (
  ("reward", "reward/mean", "{:.3f}"),
  ("accuracy", "eval/accuracy", "{:.3f}"),
  ("lag", "staleness/mean", "{:.1f}"),
  ("ESS", "ess/sequence", "{:.2f}"),
  ("entropy", "entropy", "{:.3f}"),
  ("KL", "kl/behavior", "{:.2g}"),
  ("tokens/s", "throughput/generated", "{:,.0f}"),
  ("s/step", "time/step", "{:.3g}"),
)


def write_report(folder: RunFolder) -> Path:
  """Draws the curves of a run to report.png in its folder, and returns its path; without metrics it says so there."""
  return _write_picture(folder.path.name, list(read_metrics(folder.metrics)), folder.report)


def report_run(folder: str | Path, output: str | Path | None = None) -> Path:
  """Draws the curves of a run, which may still be going on, and returns the path of the picture.

  Args:
    folder: the folder of the run.
    output: the path of the picture; its suffix, .png if there is none, determines the format. `None` is report.png in
      the folder.

  Raises:
    FileNotFoundError: if the folder holds no run, or its run has no metrics yet.
    ValueError: if a line of the metrics is damaged; the message names it.
  """
  path = _absolute(folder)
  return _write_picture(path.name, _read_run(path), _picture(output or path / "report.png"))


def compare_runs(folders: Sequence[str | Path], output: str | Path) -> Path:
  """Draws the curves of several runs into one picture and returns its path.

  Args:
    folders: the folders of the runs; their names become the legend.
    output: the path of the picture; its suffix, .png if there is none, determines the format.

  Raises:
    FileNotFoundError, ValueError: as `report_run` does.
  """
  runs = _read_by_label(folders)
  panels = []
  for panel in COMPARED:
    label, metric = next(iter(panel.metrics.items()))
    title = f"{panel.title}: {label}" if len(panel.metrics) > 1 else panel.title
    panels.append((panel._replace(title=title), [make_curve(name, metric, rows) for name, rows in runs.items()]))
  figure = draw(panels)
  # Not `get_legend_handles_labels`, which leaves out names that begin with an underscore.
  handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
  shown = [name for name in runs if name in handles]
  legend = figure.legend([handles[name] for name in shown], shown, loc="outside upper center", ncols=4, frameon=False)
  for text in legend.get_texts():
    text.set_parse_math(False)  # a $ in a name is a $
  return _save(figure, _picture(output))


def tabulate_final_values(folders: Sequence[str | Path]) -> str:
  """Returns a table of the values that runs ended with: means over the last twentieth of their steps.

  Accuracy is the last one that was measured; rates and times are means over the run, since generation ends before it.
  A dash stands for a value that was not measured.

  Args:
    folders: the folders of the runs.

  Raises:
    FileNotFoundError, ValueError: as `report_run` does.
  """
  table = [["run", "steps", *(heading for heading, _, _ in _FINAL)]]
  for label, rows in _read_by_label(folders).items():
    table.append([label, str(rows[-1]["step"]), *(_final_value(rows, metric, form) for _, metric, form in _FINAL)])
  widths = [max(map(len, column)) for column in zip(*table)]
  lines = []
  for name, *values in table:
    cells = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
    lines.append("  ".join([name.ljust(widths[0]), *cells]))
  return "\n".join(lines)


def _final_value(rows: Rows, metric: str, form: str) -> str:
  values = make_curve(metric, metric, rows).values
  weights = np.ones_like(values)
  if metric.startswith("throughput/"):
    weights = make_curve("", "time/step", [row for row in rows if metric in row]).values
  elif metric.startswith("eval/"):
    weights[:-1] = 0.0
  elif not metric.startswith("time/"):
    weights[: len(values) - math.ceil(len(values) / 20)] = 0.0
  counted = np.isfinite(values) & (weights > 0) if len(weights) == len(values) else np.zeros(len(values), bool)
  return form.format(np.average(values[counted], weights=weights[counted])) if counted.any() else "-"


def _absolute(folder: str | Path) -> Path:
  path = as_path(folder)
  return pathlib.Path(os.path.abspath(path)) if isinstance(path, pathlib.Path) else path


def _read_by_label(folders: Sequence[str | Path]) -> dict[str, Rows]:
  """Returns the rows of runs by the folders' names, or by as much of their paths as tells them apart."""
  paths = [_absolute(folder) for folder in folders]
  if len(set(paths)) < len(paths):
    raise ValueError(f"the same run is given twice among {', '.join(map(str, folders))}: give each run once")
  labels = [path.name for path in paths]
  if len(set(labels)) < len(labels):
    on_disk = all(isinstance(path, pathlib.Path) for path in paths)
    labels = [os.path.relpath(path, os.path.commonpath(paths)) if on_disk else str(path) for path in paths]
  return {label: _read_run(path) for label, path in zip(labels, paths, strict=True)}


def _read_run(path: Path) -> Rows:
  """Returns the rows of a run, of which there is at least one."""
  check_access(path)
  file = path / "metrics.jsonl"
  if not file.exists():
    raise FileNotFoundError(describe_missing_run(path, file.name))
  try:
    rows = list(read_metrics(file))
  except ValueError as error:
    raise ValueError(f"{error}; delete the line, or resume the run, which drops it") from error
  if not rows:
    raise FileNotFoundError(f"{path} has no metrics yet: {file.name} holds no complete line")
  return rows


def _picture(output: str | Path) -> Path:
  """Returns the path of a picture, which gets the suffix .png if it has none."""
  path = as_path(output, "output")
  if path.is_dir():
    raise IsADirectoryError(f"*output* must be a file, got output={str(output)!r}, which is a folder.")
  return path if path.suffix else path.with_suffix(".png")


def _write_picture(title: str, rows: Rows, output: Path) -> Path:
  figure = draw([(panel, make_curves(panel, rows)) for panel in PANELS])
  figure.suptitle(title if rows else f"{title}: no metrics yet", fontweight="bold", parse_math=False)
  for axes in figure.axes:
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
      many = len(labels) > 3
      axes.legend(
        loc="upper center" if many else "best",
        ncols=3 if many else 1,
        fontsize="small",
        columnspacing=1.0,
        handlelength=1.5,
        framealpha=0.7,
        edgecolor="none",
      )
  return _save(figure, output)


def _save(figure: Any, output: Path) -> Path:
  """Writes a picture and returns its path; characters of a run's name that the font lacks become boxes."""
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Glyph .* missing from")
    if isinstance(output, pathlib.Path):
      figure.savefig(output)
    else:
      content = io.BytesIO()
      figure.savefig(content, format=output.suffix.removeprefix(".") or None)
      output.write_bytes(content.getvalue())
  return output
