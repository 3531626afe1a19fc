"""reasoning-gym's countdown with pretrained weights, trained asynchronously.

Command: python -m experiments.train countdown    # needs the extras weights and reasoning
Hardware and time: one GPU. Only tried on a CPU for a few steps, so there is no result to expect yet.
"""

from __future__ import annotations

import dataclasses

from async_rl import tasks
from experiments.configs._pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Config(Pretrained):
  """reasoning-gym's countdown, SmolLM2-135M-Instruct or other --weights. One GPU."""

  name = "countdown"

  run_dir: str = "runs/countdown"
  #: Least and most numbers of a problem.
  numbers: tuple[int, int] = (3, 4)

  def task(self) -> tasks.ReasoningGym:
    least, most = self.numbers
    return tasks.ReasoningGym("countdown", options={"min_numbers": least, "max_numbers": most})


SMOKE = dict(
  steps=3, groups=2, samples=2, slots=4, max_completion_tokens=32, rows=2, row_tokens=288,
  eval_prompts=0, reward_workers=0, checkpoint_every=1, dtype="float32", max_lag=1,
)  # fmt: skip
