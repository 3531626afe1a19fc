"""What commands on a finished run share."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated
from typing import Any

import tyro

from async_rl import learning
from async_rl import models
from async_rl._buckets import check_access
from async_rl._paths import Path
from async_rl._paths import as_path
from async_rl.recording import CheckpointError
from async_rl.runtime import Experiment
from async_rl.runtime import HostError
from experiments import configs

#: The argument that names the folder of a run.
RunDir = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]


def load_experiment(run_dir: str | os.PathLike[str], config: str | None = None, **options: Any) -> Experiment:
  """Returns the experiment of a run folder, with the options it was run with.

  Args:
    run_dir: the folder of the run.
    config: the name of the config or the path of its file; `None` takes what the folder names.
    **options: options that replace those of the run.

  Raises:
    FileNotFoundError: if the folder holds no run.
    ValueError: if its config is not found, or has other options now.
  """
  folder = as_path(run_dir, "run_dir")
  check_access(folder, checkpoints=True)
  file = folder / "config.txt"
  if not file.exists():
    raise FileNotFoundError(f"{folder} holds no run: {file} is missing")
  recorded = _read_config(file)
  name = config or recorded["config"]
  try:
    found = configs.load(name)
  except ValueError as error:
    if config:
      raise
    raise ValueError(f"{file} is of config {name!r}, but {error}; give the path of its file with --config.") from error
  values = {key: tuple(value) if isinstance(value, list) else value for key, value in recorded.items()}
  del values["config"]
  values["generation_hosts"] = 0  # every host of a command on a finished run does the same
  return found.experiment(found.options(**values | {"run_dir": str(folder)} | options))


def _read_config(file: Path) -> dict[str, Any]:
  try:
    recorded = json.loads(file.read_text())
  except ValueError:
    recorded = None
  if not isinstance(recorded, dict) or not isinstance(recorded.get("config"), str):
    raise ValueError(f"{file} is damaged: rerun the command that trained the run, which writes it again.")
  return recorded


def restore_policy(
  experiment: Experiment, learner: learning.Learner, step: int | None
) -> tuple[models.Params, int | None]:
  """Restores the parameters of a checkpoint, by default the newest, onto the learner mesh; returns its step, too."""
  folder = as_path(experiment.options.output.run_dir) / "checkpoints"
  with contextlib.closing(experiment.make_checkpointer(folder, read_only=True)) as checkpoints:
    params = checkpoints.restore_params(learner.abstract().params, step)
    for damage in checkpoints.skipped.values():
      print(f"damaged: {damage}", file=sys.stderr)
    return params, checkpoints.restored_step


def command(function: Callable[..., Any], name: str, description: str | None, arguments: list[str] | None) -> int:
  """Calls `function` with the arguments of the command line; returns the exit status."""
  try:
    tyro.cli(function, args=arguments, prog=f"python -m experiments.{name}", description=description)
  except (ValueError, ImportError, CheckpointError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except HostError as error:
    print(f"error: {error}", file=sys.stderr)
    return error.status
  return 0
