"""What commands on a finished run share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
from async_rl.runtime import override
from experiments import configs

#: The argument that names the folder of a run.
RunDir = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]


def load_experiment(run_dir: str | os.PathLike[str], config: str | None = None, **options: Any) -> Experiment:
  """Returns the experiment of a run folder, with the options it was run with, fitted to the devices that are here.

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
  values["lag"] = "fixed"  # a schedule is needed to train alone, and may be gone
  values["generation_hosts"] = 0  # every host of a command on a finished run does the same
  return _fit_devices(found.experiment(found.options(**values | {"run_dir": str(folder)} | options)))


def _fit_devices(experiment: Experiment) -> Experiment:
  """Returns the experiment with meshes that can be had here, where there may be fewer devices than the run had.

  The run's own split of the devices stays where it can be had. Otherwise all devices have both roles, and the axes of
  the meshes get the largest sizes that divide both the run's own, so that arrays are split as evenly, and the devices.
  Rows of a micro-batch, in which nothing is trained here, are rounded up to what the learner mesh divides.
  """
  devices = experiment.options.devices
  try:
    experiment.make_meshes()
  except ValueError:
    shared = 0 if experiment.options.schedule.max_lag else None  # asynchronous runs without lag refuse 0
    whole = {"generation_devices": shared, "fsdp": 1, "tensor": 1, "generation_tensor": 1}
    meshes = _replace(experiment, **whole).make_meshes()
    tensor = math.gcd(meshes.learner.size, devices.tensor)
    fsdp = math.gcd(meshes.learner.size // tensor, devices.fsdp)
    generation_tensor = math.gcd(meshes.generation.size, devices.generation_tensor or devices.tensor)
    sizes = whole | {"fsdp": fsdp, "tensor": tensor, "generation_tensor": generation_tensor}
    experiment = _replace(experiment, **sizes)
  parts = models.row_parts(experiment.make_meshes().learner)
  return _replace(experiment, rows=-(-devices.rows // parts) * parts)


def _replace(experiment: Experiment, **options: int | None) -> Experiment:
  return dataclasses.replace(experiment, options=override(experiment.options, **options))


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
