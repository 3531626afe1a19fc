"""GSM8K word problems with SmolLM2-135M-Instruct or other --weights: supervised fine-tuning, then asynchronous RL.

Command: python -m experiments.train gsm8k --gsm8k-folder DIR
Hardware and time: one H100, 8 minutes for 350 supervised and 266 RL steps; two CPU cores for a look.
Result: SmolLM2-135M from .017 to .067 by supervision, to .085 after 210 RL steps (greedy, test, one run); with sequence
  TIS and GAC from .071 to .103 after 266. experiments/reproductions/gsm8k.md.
"""

from __future__ import annotations

import dataclasses

import optax

from async_rl import runtime
from async_rl import stabilizers
from async_rl import tasks
from async_rl._validation import check_number
from experiments.configs._adam import Adam
from experiments.configs._correction import Correction
from experiments.configs._pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Options:
  #: Folder with the original train.jsonl and test.jsonl; None: TFDS `gsm8k`, downloaded if need be.
  gsm8k_folder: str | None = None
  #: Ask in a conversation, for instruct models, or in plain text.
  chat: bool = True
  #: Steps of supervised training on reference solutions (64 each) before reinforcement learning; 0: none.
  supervised_steps: int = 350
  #: Learning rate of supervised training.
  supervised_rate: float = 1e-4
  correction: Correction = Correction()
  adam: Adam = Adam(learning_rate=1e-5)
  #: Exponent of the effective-sample-size scaling of the learning rate.
  ess_power: float = 0.5
  #: Effective sample size, as a share of the batch, that counts as on-policy: bfloat16 alone brings it to 0.7 here.
  on_policy_ratio: float = 0.7
  pretrained: Pretrained = Pretrained()
  training: runtime.Training = runtime.Training(groups=32, samples=16)
  rollout: runtime.Rollout = runtime.Rollout(max_prompt_tokens=320, max_completion_tokens=256, slots=512)
  schedule: runtime.Schedule = runtime.Schedule(max_lag=2)
  devices: runtime.Devices = runtime.Devices(rows=16, row_tokens=1024, reward_workers=8)
  length: runtime.Length = runtime.Length(steps=266)
  output: runtime.Output = runtime.Output(run_dir="runs/gsm8k", eval_every=50, eval_prompts=1319)

  def __post_init__(self):
    check_number("supervised_steps", self.supervised_steps, whole=True, at_least=0)
    check_number("supervised_rate", self.supervised_rate, above=0)
    check_number("ess_power", self.ess_power, at_least=0)


def build(options: Options) -> runtime.Experiment:
  weights = options.pretrained
  return runtime.Experiment(
    name="gsm8k",
    options=options,
    task=tasks.GSM8K(folder=options.gsm8k_folder, chat=options.chat),
    tokenizer=weights.tokenizer(),
    policy=weights.policy(),
    start=runtime.SupervisedStage(options.supervised_steps, options.supervised_rate, start=weights.load),
    objective=options.correction.build(),
    optimizer=optax.chain(
      optax.clip_by_global_norm(1.0),
      options.adam.adamw(10, options.length.steps, mu_dtype=weights.first_moment_dtype, weight_decay=0.1),
      stabilizers.scale_by_ess(options.ess_power, options.on_policy_ratio),
    ),
  )


SMOKE = dict(
  steps=3, groups=2, samples=2, slots=4, max_prompt_tokens=192, max_completion_tokens=32, length_buckets=1,
  rows=2, row_tokens=224, eval_prompts=2, reward_workers=0, checkpoint_every=1, dtype="float32", max_lag=1,
  supervised_steps=0,
)  # fmt: skip
