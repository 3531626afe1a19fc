"""GSM8K with pretrained weights: supervised fine-tuning, then asynchronous RL.

Command: python -m experiments.train gsm8k --gsm8k-folder DIR
Hardware and time: one H100, 8 minutes for 350 supervised and 266 RL steps; two CPU cores for a look.
Result: SmolLM2-135M from .017 to .071 by supervision, to .103 by RL (greedy, test); experiments/reproductions/gsm8k.md.
"""

from __future__ import annotations

import dataclasses

from async_rl import tasks
from experiments.configs._pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Config(Pretrained):
  """GSM8K word problems, SmolLM2-135M-Instruct or other --weights. One GPU."""

  name = "gsm8k"

  run_dir: str = "runs/gsm8k"
  steps: int = 266
  supervised_steps: int = 350
  eval_prompts: int = 1319
  #: Folder with the original train.jsonl and test.jsonl; `None`: TFDS `gsm8k`, downloaded if need be.
  gsm8k_folder: str | None = None
  #: Ask in a conversation, for instruct models, or in plain text.
  chat: bool = True

  def task(self) -> tasks.GSM8K:
    return tasks.GSM8K(folder=self.gsm8k_folder, chat=self.chat)


SMOKE = dict(
  steps=3, groups=2, samples=2, slots=4, max_prompt_tokens=192, max_completion_tokens=32, rows=2, row_tokens=224,
  eval_prompts=2, reward_workers=0, checkpoint_every=1, dtype="float32", max_lag=1, supervised_steps=0,
)  # fmt: skip
