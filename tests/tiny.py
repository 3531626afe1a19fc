"""The smallest experiment that has every part: sums of two numbers, one layer, seconds on a CPU."""

import dataclasses
import pathlib

import optax

from async_rl import models
from async_rl import stabilizers
from async_rl import tasks
from async_rl.runtime import Experiment


@dataclasses.dataclass(frozen=True)
class Tiny(Experiment):
  """Options for seconds-long runs; rewards are computed in process."""

  name = "tiny"

  steps: int = 6
  mode: str = "simulated"
  max_lag: int = 2
  groups: int = 4
  samples: int = 2
  max_prompt_tokens: int = 8
  max_completion_tokens: int = 16
  slots: int = 8
  decode_chunk: int = 4
  rows: int = 8
  reward_workers: int = 0
  eval_prompts: int = 0
  checkpoint_every: int = 0
  train_prompts: int = 64
  learning_rate: float = 1e-2

  def task(self):
    folder = pathlib.Path(self.run_dir).parent / "data"
    return DigitSums(numbers=2, train=self.train_prompts, test=8, data_dir=str(folder))

  def tokenizer(self):
    return models.SentencePieceTokenizer(models.train_sentencepiece([self.task().corpus]))

  def policy(self):
    config = models.ModelConfig(
      vocab_size=24, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32
    )
    return models.Policy(config, dtype="float32")

  def sampler_config(self):
    return dataclasses.replace(super().sampler_config(), length_buckets=1)

  def optimizer(self):
    return stabilizers.control_alignment(
      optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.learning_rate), stabilizers.scale_by_ess())
    )


@dataclasses.dataclass(frozen=True)
class DigitSums(tasks.Sums):
  """Rewards the share of digits, so that a random policy already has something to learn."""

  def reward(self, prompt, text, finish):
    return sum(c.isdigit() for c in text) / 16
