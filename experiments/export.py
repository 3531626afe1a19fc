"""Writes a run's policy as a Hugging Face folder: `python -m experiments.export RUN_DIR FOLDER [--like HF_FOLDER]`.

Adapters are merged into the weights, so that `transformers` and every inference engine load the folder as it is.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Literal

import tyro

from async_rl import models
from async_rl.runtime import Parts
from experiments._runs import command
from experiments._runs import load_experiment
from experiments._runs import restore_policy


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
  params, step = restore_policy(parts, run_dir, step)
  if parts.policy.lora is not None:
    params = models.merge_adapters(parts.policy.lora, params)
  models.save_hf(folder, parts.policy.config, params, dtype=dtype, like=like, tokenizer=parts.tokenizer)
  print(f"{folder} holds step {step} of {run_dir}")


def main(arguments: list[str] | None = None) -> int:
  return command(export, "export", __doc__, arguments)


if __name__ == "__main__":
  sys.exit(main())
