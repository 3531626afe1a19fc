"""Asynchronous RLHF on made-up summaries: supervised, reward model and reinforcement learning from scratch.

Command: python -m experiments.train keywords --method online_dpo    # or ipo, rloo, proximal_rloo, best_of_n
Hardware and time: two CPU cores, minutes.
Result: true reward of held-out samples .64 after the supervised stage, about .9 after 128 updates if their samples are
  at most a few updates old (experiments/reproductions/async_rlhf.md).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax

from async_rl import models
from async_rl import tasks
from experiments.configs._rlhf import RLHFExperiment


@dataclasses.dataclass(frozen=True)
class Config(RLHFExperiment):
  """RLHF on made-up summaries, a 0.1M-parameter transformer from scratch. CPU, minutes."""

  name = "keywords"

  run_dir: str = "runs/keywords"
  stages: str = "runs/keywords_stages"
  steps: int = 192
  max_lag: int = 1
  groups: int = 16
  max_prompt_tokens: int = 16
  max_completion_tokens: int = 10
  slots: int = 64
  decode_chunk: int = 5
  on_update: Literal["keep", "recompute"] = "recompute"  # weights move fast here, and prompts are short
  rows: int = 32
  reward_workers: int = 0
  eval_every: int = 64
  eval_prompts: int = 256
  checkpoint_every: int = 100

  #: Learning rate of Adam.
  learning_rate: float = 1e-3

  def task(self) -> tasks.KeyWords:
    return tasks.KeyWords()

  def tokenizer(self) -> models.Tokenizer:
    return models.SentencePieceTokenizer(models.train_sentencepiece([tasks.KeyWords.corpus]))

  def policy(self) -> models.Policy:
    config = models.ModelConfig(
      vocab_size=64, d_model=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, d_ff=256
    )
    return models.Policy(config, dtype="float32")

  def optimizer(self) -> optax.GradientTransformation:
    rate = optax.linear_schedule(0.0, self.learning_rate, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))


SMOKE = dict(
  steps=12, groups=4, slots=16, rows=8, eval_prompts=8, checkpoint_every=1, supervised_steps=2, reward_model_steps=2
)
