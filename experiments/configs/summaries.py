"""RLHF on summaries of forum posts (TL;DR, your jsonl files) with SmolLM2-135M-Instruct or other --weights.

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

from async_rl import runtime
from async_rl import tasks
from experiments.configs._adam import Adam
from experiments.configs._pretrained import Pretrained
from experiments.configs._rlhf import RLHF


@dataclasses.dataclass(frozen=True)
class Options:
  #: Folder with the posts and the comparisons.
  folder: str | None = None
  adam: Adam = Adam(learning_rate=3e-6)
  rlhf: RLHF = RLHF(stages="runs/summaries_stages", supervised_rate=5e-5, reward_model_rate=2e-5)
  pretrained: Pretrained = Pretrained()
  training: runtime.Training = runtime.Training(groups=128, samples=2, reference=True)
  rollout: runtime.Rollout = runtime.Rollout(max_prompt_tokens=512, max_completion_tokens=64, slots=512)
  schedule: runtime.Schedule = runtime.Schedule(max_lag=1)
  devices: runtime.Devices = runtime.Devices(rows=16, row_tokens=1024, reward_workers=8)
  length: runtime.Length = runtime.Length(steps=200)
  output: runtime.Output = runtime.Output(
    run_dir="runs/summaries", eval_every=50, eval_prompts=256, eval_temperature=None
  )


def build(options: Options) -> runtime.Experiment:
  weights = options.pretrained
  return runtime.Experiment(
    name="summaries",
    options=options,
    task=tasks.Summaries(options.folder),
    tokenizer=weights.tokenizer(),
    policy=weights.policy(),
    start=options.rlhf.start(weights.load, weights.weights),
    scorer=options.rlhf.scorer(weights.load, weights.weights),
    objective=options.rlhf.objective(),
    optimizer=optax.chain(
      optax.clip_by_global_norm(1.0),
      options.adam.adamw(10, options.length.steps, mu_dtype=weights.first_moment_dtype, weight_decay=0.0),
    ),
  )


SMOKE = dict(
  steps=6, groups=2, slots=4, max_prompt_tokens=64, max_completion_tokens=16, length_buckets=1, rows=2,
  row_tokens=160, eval_prompts=2, reward_workers=0, checkpoint_every=1, dtype="float32", max_lag=1, supervised_steps=1,
  reward_model_steps=1,
)  # fmt: skip
