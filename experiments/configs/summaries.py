"""Asynchronous RLHF on summaries of forum posts (TL;DR), from pretrained weights.

Command: python -m experiments.train summaries --folder DIR --method online_dpo
  DIR holds train.jsonl and test.jsonl (`post`, `summary`, optionally `title`, `subreddit`), and the comparisons
  train_preferences.jsonl and test_preferences.jsonl (`prompt`, ending in "TL;DR:" as the posts do, `chosen`,
  `rejected`). No data set comes with this. The first run makes the supervised and the reward-model stage and keeps them
  in --stages; other methods, lags and learning rates then start from there.
Hardware and time: one GPU. Only tried with small random weights on a CPU, so there is no result to expect yet.
"""

from __future__ import annotations

import dataclasses

import optax

from async_rl import models
from async_rl import tasks
from async_rl.runtime import Parts
from experiments.configs._pretrained import Pretrained
from experiments.configs._pretrained import load_pretrained
from experiments.configs._rlhf import RLHFExperiment


@dataclasses.dataclass(frozen=True)
class Config(RLHFExperiment, Pretrained):
  """RLHF on summaries of forum posts (your jsonl files), SmolLM2-135M-Instruct or other --weights. One GPU."""

  name = "summaries"

  run_dir: str = "runs/summaries"
  stages: str = "runs/summaries_stages"
  max_lag: int = 1
  groups: int = 128
  max_prompt_tokens: int = 512
  max_completion_tokens: int = 64
  supervised_steps: int = 500
  supervised_rate: float = 5e-5
  reward_model_steps: int = 500
  reward_model_rate: float = 2e-5
  learning_rate: float = 3e-6
  #: Folder with the posts and the comparisons.
  folder: str | None = None

  def task(self) -> tasks.Summaries:
    return tasks.Summaries(self.folder)

  def optimizer(self) -> optax.GradientTransformation:
    rate = optax.linear_schedule(0.0, self.learning_rate, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

  def pretrained(self, parts: Parts) -> models.Params:
    return load_pretrained(self.weights, parts)


SMOKE = dict(
  steps=12, groups=2, slots=4, max_prompt_tokens=64, max_completion_tokens=16, rows=2, row_tokens=160,
  eval_prompts=2, reward_workers=0, checkpoint_every=1, dtype="float32", max_lag=1, supervised_steps=1,
  reward_model_steps=1,
)  # fmt: skip
