"""What commands on a finished run share."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import tyro

from async_rl import models
from async_rl.recording import CheckpointError
from async_rl.runtime import Experiment
from async_rl.runtime import Parts
from experiments.configs import load_all


def load_experiment(run_dir: pathlib.Path) -> Experiment:
  """The experiment of a run folder, with the options it was run with.

  Raises:
    FileNotFoundError: if the folder holds no run.
    ValueError: if its config is not one of `experiments.configs`.
  """
  file = run_dir / "config.txt"
  if not file.exists():
    raise FileNotFoundError(f"{run_dir} holds no run: {file} is missing")
  options: dict[str, Any] = json.loads(file.read_text())
  name, configs = options.pop("config"), load_all()
  if name not in configs:
    raise ValueError(f"{file} is of config {name!r}, which is not one of {', '.join(configs)}.")
  lists = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
  return configs[name](**options | lists | {"run_dir": str(run_dir)})


def restore_policy(parts: Parts, run_dir: pathlib.Path, step: int | None) -> tuple[models.Params, int | None]:
  """Parameters of a run's checkpoint, by default the newest, and its step."""
  with contextlib.closing(parts.make_checkpointer(run_dir / "checkpoints")) as checkpoints:
    params = checkpoints.restore_params(parts.learner.abstract().params, step)
    for damage in checkpoints.skipped.values():
      print(f"damaged: {damage}", file=sys.stderr)
    return params, checkpoints.restored_step


def command(function: Callable[..., Any], name: str, description: str | None, arguments: list[str] | None) -> int:
  """Calls `function` with the arguments of the command line; returns the exit status."""
  try:
    tyro.cli(function, args=arguments, prog=f"python -m experiments.{name}", description=description)
  except (ValueError, CheckpointError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0
