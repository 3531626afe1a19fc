"""Writes a run's policy as a Hugging Face folder: `python -m experiments.export RUN_DIR FOLDER [--like HF_FOLDER]`.

Adapters are merged into the weights, so that `transformers` and every inference engine load the folder as it is.
"""

from __future__ import annotations

import sys
from typing import Annotated
from typing import Literal

import tyro

from async_rl import models
from async_rl._buckets import copy_to_disk
from async_rl._buckets import written_on_disk
from async_rl._paths import as_path
from experiments._runs import RunDir
from experiments._runs import command
from experiments._runs import load_experiment
from experiments._runs import restore_policy


def export(
  run_dir: RunDir,
  folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
  /,
  like: str | None = None,
  dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
  step: int | None = None,
  config: str | None = None,
) -> None:
  """Writes a checkpoint as config.json and safetensors.

  Args:
    run_dir: the folder of the run, on a disk or gs://bucket/folder.
    folder: the folder to write, which must not exist; also gs://bucket/folder.
    like: the Hugging Face folder that training started from, whose tokenizer and config.json are copied.
    dtype: the dtype to store; in 16 bits, small contributions of adapters to large weights are lost.
    step: the step of the checkpoint; by default the newest.
    config: the path of the run's config file, if it was moved.
  """
  target = as_path(folder, "folder")
  source = None if like is None else copy_to_disk(as_path(like, "like"))
  experiment = load_experiment(run_dir, config)
  policy = experiment.policy
  params, step = restore_policy(experiment, experiment.make_learner(experiment.make_meshes().learner), step)
  if policy.lora is not None:
    params = models.merge_adapters(policy.lora, params)
  with written_on_disk(target) as local:
    models.save_hf(local, policy.config, params, dtype=dtype, like=source, tokenizer=experiment.tokenizer)
  print(f"{target} holds step {step} of {run_dir}")


def main(arguments: list[str] | None = None) -> int:
  return command(export, "export", __doc__, arguments)


if __name__ == "__main__":
  sys.exit(main())
