"""Tables and the figure of `corrections`."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np


def _cell(value: float, digits: int = 2) -> str:
  if not np.isfinite(value):
    return "–"
  return f"{value:.0f}" if abs(value) >= 10 else f"{value:.{digits}f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
  lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tables(result: dict[str, Any]) -> str:
  """Markdown: the batches of each lag, then agreement with the on-policy gradient, then noise, size and tokens kept."""
  lags = list(result["lags"])
  columns = {
    "ESS sequence": "ess/sequence",
    "truncated at 8": "ess_truncated/sequence",
    "ESS token": "ess/token",
    "truncated at 2": "ess_truncated/token",
    "KL of a sequence": "kl",
    "largest log w": "largest_log_weight",
    "reward": "reward",
  }
  batches = _table(
    ["lag", *columns], [[k, *(_cell(result["lags"][k]["batches"][c]) for c in columns.values())] for k in lags]
  )
  return "\n".join(
    [
      batches,
      _by_method(result, ("direction", "cosine"), errors=True),
      _by_method(result, ("variance", "norm", "kept")),
    ]
  )


def _by_method(result: dict[str, Any], measures: tuple[str, ...], errors: bool = False) -> str:
  """A row for each method, a column for each measure and lag."""
  lags = result["lags"]

  def cell(name: str, measure: str, lag: str) -> str:
    found = lags[lag]["methods"][name]
    text = _cell(found.get(measure, np.nan))
    return f"{text} ± {_cell(found[f'{measure}_error'])}" if errors and text != "–" else text

  rows = [[name, *(cell(name, m, k) for m in measures for k in lags)] for name in next(iter(lags.values()))["methods"]]
  return _table(["method", *(f"{measure} {k}" for measure in measures for k in lags)], rows)


def plot(result: dict[str, Any], file: pathlib.Path) -> None:
  """Methods by rows, lags by colors: cosine of one batch, direction of the expected gradient, relative variance."""
  from matplotlib import colormaps
  from matplotlib.figure import Figure
  from matplotlib.ticker import NullFormatter
  from matplotlib.ticker import ScalarFormatter

  lags = list(result["lags"])
  names = list(result["lags"][lags[0]]["methods"])
  figure = Figure(figsize=(12, 0.28 * len(names) + 1.6), layout="constrained")
  axes = figure.subplots(1, 3, sharey=True)
  colors = colormaps["viridis"](np.linspace(0.0, 0.85, len(lags)))
  panels = (
    ("cosine", "Cosine of one batch's gradient\nto the on-policy gradient"),
    ("direction", "Cosine of the expected gradient\nto the on-policy gradient (bias)"),
    ("variance", "Variance of one batch's gradient,\nmultiples of the squared expectation"),
  )
  for axis, (key, title) in zip(axes, panels, strict=True):
    for i, (lag, color) in enumerate(zip(lags, colors, strict=True)):
      methods = result["lags"][lag]["methods"]
      y = np.arange(len(names)) + 0.16 * (i - (len(lags) - 1) / 2)
      values = np.array([methods[name][key] for name in names])
      errors = np.array([methods[name].get(f"{key}_error", np.nan) for name in names])
      axis.errorbar(values, y, xerr=errors, fmt="o", markersize=4, color=color, label=f"lag {lag}")
    axis.set_title(title, fontsize=10)
    axis.grid(axis="both", linewidth=0.3)
    axis.axhline(sum(not name.startswith("baseline") for name in names) - 0.5, color="gray", linewidth=0.8)
  axes[0].set_yticks(range(len(names)), names, fontsize=8)
  axes[0].set_ylim(len(names) - 0.4, -0.6)
  axes[1].set_xlim(-0.3, 1.3)
  axes[1].axvline(1.0, color="gray", linewidth=0.8)
  axes[2].set_xscale("symlog", linthresh=1.0)
  axes[2].xaxis.set_major_formatter(ScalarFormatter())
  axes[2].xaxis.set_minor_formatter(NullFormatter())
  axes[2].set_xticks([3, 10, 30, 100])
  axes[2].legend(fontsize=8, loc="best")
  figure.savefig(file, dpi=110)
