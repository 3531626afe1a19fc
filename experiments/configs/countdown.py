"""reasoning-gym's countdown with SmolLM2-135M-Instruct or other --weights, trained asynchronously.

Command: python -m experiments.train countdown    # needs the extras weights and reasoning
Hardware and time: one GPU. Only tried on a CPU for a few steps, so there is no result to expect yet.
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
  #: Least and most numbers of a problem.
  numbers: tuple[int, int] = (3, 4)
  #: Problems of the training split, generated at every start, 100 to 200 a second.
  problems: int = 8192
  correction: Correction = Correction()
  adam: Adam = Adam(learning_rate=1e-5)
  pretrained: Pretrained = Pretrained()
  training: runtime.Training = runtime.Training(groups=32, samples=16)
  rollout: runtime.Rollout = runtime.Rollout(max_prompt_tokens=320, max_completion_tokens=256, slots=512)
  schedule: runtime.Schedule = runtime.Schedule(max_lag=2)
  devices: runtime.Devices = runtime.Devices(rows=16, row_tokens=1024, reward_workers=8)
  length: runtime.Length = runtime.Length(steps=200)
  output: runtime.Output = runtime.Output(run_dir="runs/countdown", eval_every=50, eval_prompts=256)

  def __post_init__(self):
    check_number("problems", self.problems, whole=True, at_least=1)
    if not 1 <= self.numbers[0] <= self.numbers[1]:
      raise ValueError(f"*numbers* must be two ascending numbers from 1 on, got numbers={self.numbers}.")


def build(options: Options) -> runtime.Experiment:
  least, most = options.numbers
  weights = options.pretrained
  return runtime.Experiment(
    name="countdown",
    options=options,
    task=tasks.ReasoningGym("countdown", options={"min_numbers": least, "max_numbers": most}, train=options.problems),
    tokenizer=weights.tokenizer(),
    policy=weights.policy(),
    start=weights.load,
    objective=options.correction.build(),
    optimizer=optax.chain(
      optax.clip_by_global_norm(1.0),
      options.adam.adamw(10, options.length.steps, mu_dtype=weights.first_moment_dtype, weight_decay=0.1),
      stabilizers.scale_by_ess(power=0.5, on_policy_ratio=0.7),
    ),
  )


SMOKE = dict(
  steps=3, groups=2, samples=2, slots=4, max_completion_tokens=32, length_buckets=1, rows=2,
  row_tokens=288, eval_prompts=0, reward_workers=0, checkpoint_every=1, dtype="float32", max_lag=1, problems=64,
)  # fmt: skip
