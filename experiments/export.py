"""Writes a run's policy as a Hugging Face folder: `python -m experiments.export RUN_DIR FOLDER [--like HF_FOLDER]`.

Adapters are merged into the weights, so that `transformers` and every inference engine load the folder as it is.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Literal

import tyro

from async_rl import models
from async_rl.runtime import CheckpointError
from async_rl.runtime import Parts
from experiments.evaluate import load_experiment


def export(
  run_dir: tyro.conf.Positional[pathlib.Path],
  folder: tyro.conf.Positional[pathlib.Path],
  /,
  like: pathlib.Path | None = None,
  dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
  step: int | None = None,
) -> None:
  """Writes a checkpoint as config.json and safetensors.

  Args:
    run_dir: folder of the run.
    folder: to write; must not exist.
    like: the Hugging Face folder that training started from, whose tokenizer and config.json are taken over.
    dtype: to store; in 16 bits, what adapters add is lost where it is small beside the weight.
    step: which checkpoint; by default the newest.
  """
  parts = Parts(load_experiment(run_dir))
  checkpoints = parts.make_checkpointer(run_dir / "checkpoints")
  params = checkpoints.restore_params(parts.learner.abstract().params, step)
  if parts.policy.lora is not None:
    params = models.merge_adapters(parts.policy.lora, params)
  models.save_hf(folder, parts.policy.config, params, dtype=dtype, like=like)
  print(f"{folder} holds step {checkpoints.latest_step if step is None else step} of {run_dir}")


def main(arguments: list[str] | None = None) -> int:
  try:
    tyro.cli(export, args=arguments, prog="python -m experiments.export", description=__doc__)
  except (ValueError, CheckpointError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
