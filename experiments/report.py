"""Draws the curves of runs: `python -m experiments.report RUN_DIR [RUN_DIR ...] [--output FILE]`.

One run is drawn into its own report.png, as at the end of training; it may still be going on. Several are drawn into
one picture, one curve per run. Either way the values that the runs ended with are printed as a table.
"""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from async_rl.recording import compare_runs
from async_rl.recording import report_run
from async_rl.recording import tabulate_final_values
from experiments._runs import command


def report(
  runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR ...")],
  /,
  output: str | None = None,
) -> None:
  """Draws the curves of runs, and prints their final values and the path of the picture.

  Args:
    runs: the folders of the runs, on a disk or gs://bucket/folder.
    output: the picture, whose suffix (.png if there is none) determines the format; by default report.png in the folder
      of a single run, and comparison.png here for several.

  Raises:
    FileNotFoundError: if a folder holds no run, or its run has no metrics yet.
    ValueError: if no run is given or one is given twice, or the metrics of one are damaged.
  """
  if not runs:
    raise ValueError("give the folder of a run, or of several to compare them.")
  print(tabulate_final_values(runs))
  print(
    "(means over the last twentieth of the steps; accuracy: the last evaluation; tokens/s, s/step: means over the run)"
  )
  if len(runs) == 1:
    print(f"Plots: {report_run(runs[0], output)}")
  else:
    print(f"Plots: {compare_runs(runs, output or 'comparison.png')}")


def main(arguments: list[str] | None = None) -> int:
  return command(report, "report", __doc__, arguments)


if __name__ == "__main__":
  sys.exit(main())
