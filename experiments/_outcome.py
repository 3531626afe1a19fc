"""The last lines of a run: its outcome, its files, and commands to go on with."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from async_rl.runtime import Options
from async_rl.runtime import Summary

#: The environment variable with the command of a script that trains, in place of `python -m experiments.train CONFIG`.
COMMAND = "ASYNC_RL_TRAIN_COMMAND"


def describe_outcome(summary: Summary, options: Options, arguments: Sequence[str]) -> str:
  """Returns the last lines of a run.

  The commands are whole ones, for the folder in which the run was started. None proposes what the run already is or
  has, or what could not work: more steps after the data ended or the learning rate fell to 0, or a lag in the `sync`
  mode.

  Args:
    summary: how the run ended.
    options: the options of the run.
    arguments: its command line: the config and the options that were given.
  """
  folder, python = summary.folder, _python()
  run_dir = shlex.quote(str(folder.path))
  lines = [f"\nDone: {summary.version} optimizer steps" + (", the data ended" if summary.ended_early else "") + "."]
  if summary.accuracy is not None:
    lines.append(f"Held-out accuracy: {summary.accuracy_before:.3f} before, {summary.accuracy:.3f} after.")
  if options.output.picture:
    lines.append(f"Plots       {folder.report}")
  lines += [
    f"Metrics     {folder.metrics}",
    f"Checkpoint  {folder.checkpoints}",
    f"Evaluate    {python} -m experiments.evaluate {run_dir} --samples 8",
  ]
  if importlib.util.find_spec("tensorboard") is not None:
    lines.append(f"Watch       {python} -m tensorboard.main --logdir {shlex.quote(str(folder.tensorboard))}")
  steps = 2 * summary.version
  if not summary.ended_early and not options.schedule.replays and _has_rate(options, steps):
    lines.append(f"Go on       {_train(arguments, steps=steps)}")
    if summary.lag_bound:
      first = "step" if summary.lag_bound == 1 else f"{summary.lag_bound} steps"
      lines.append(f"            (the lag of the first {first} after this end is less than in a run planned longer)")
  lines += _other_run(summary, options, arguments)
  if options.devices.process_id is not None:
    lines.append("            (commands that train: in every process, with its number as I)")
  return "\n".join(lines)


def _other_run(summary: Summary, options: Options, arguments: Sequence[str]) -> list[str]:
  """Returns a line that proposes the same run at another lag, or to compare with it if there is one."""
  if options.schedule.replays:
    return []
  lag = 16 if summary.lag_bound < 16 else 4
  changes: dict[str, Any] = {"max_lag": lag}
  name = f"lag{lag}"
  if options.schedule.mode == "sync":
    changes = {"mode": "async"}
    name = "async"
  path = summary.folder.path
  first = path.with_name(re.sub(r"-(lag\d+|async)$", "", path.name))  # where such a line was followed before
  other = path.with_name(f"{first.name}-{name}") if first == path or not first.exists() else first
  if not other.exists():
    return [f"Try         {_train(arguments, **changes, run_dir=other)}"]
  if (other / "metrics.jsonl").exists():
    return [f"Compare     {_python()} -m experiments.report {shlex.quote(str(path))} {shlex.quote(str(other))}"]
  return []


def _has_rate(options: Options, steps: int) -> bool:
  """Returns whether the learning rate lasts for so many steps; one that falls is 0 in the end."""
  adam = getattr(options, "adam", None)
  return adam is None or adam.decay_steps is None or steps <= adam.decay_steps


def _train(arguments: Sequence[str], **changes: Any) -> str:
  """Returns the command of the run with some options changed, and without `--overwrite`, which would delete it.

  Where the run has several processes, the number of each is `I`.
  """
  config, *given = arguments
  if _without(given, {"--process-id"}) != given:
    changes = {"process_id": "I", **changes}
  options = {f"--{name.replace('_', '-')}": str(value) for name, value in changes.items()}
  kept = _without(given, {*options, "--overwrite", "--no-overwrite"})
  changed = [part for option in options.items() for part in option]
  command = os.environ.get(COMMAND) or f"{_python()} -m experiments.train {shlex.quote(config)}"
  return " ".join([command, *map(shlex.quote, [*kept, *changed])])


def _without(given: Sequence[str], names: set[str]) -> list[str]:
  """Returns command-line options without those of the given names, and without their values."""
  kept: list[str] = []
  dropped = False
  for part in given:
    if part.startswith("--"):
      dropped = part.partition("=")[0].replace("_", "-") in names
    if not dropped:
      kept.append(part)
  return kept


def _python() -> str:
  """Returns the interpreter as a command: by its name where the shell finds this one, otherwise by its path."""
  running = pathlib.Path(sys.executable)
  found = shutil.which("python")
  if found is not None and pathlib.Path(found).parent == running.parent:
    return "python"
  here = pathlib.Path.cwd()
  return shlex.quote(str(running.relative_to(here) if running.is_relative_to(here) else running))
