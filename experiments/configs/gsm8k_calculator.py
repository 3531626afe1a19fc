"""GSM8K with a calculator that the model may call, several turns to a completion, trained asynchronously.

The supervised start turns the calculations that GSM8K's solutions annotate into calls; without it there are none.

Command: python -m experiments.train gsm8k_calculator --gsm8k-folder DIR
Hardware and time: one GPU. Only tried on a CPU for a few steps, so there is no result to expect yet.
"""

from __future__ import annotations

import dataclasses

from async_rl import sampling
from async_rl import tasks
from experiments.configs import gsm8k


@dataclasses.dataclass(frozen=True)
class Config(gsm8k.Config):
  """GSM8K word problems with a calculator, SmolLM2-135M-Instruct or other --weights. One GPU."""

  name = "gsm8k_calculator"

  run_dir: str = "runs/gsm8k_calculator"
  max_prompt_tokens: int = 384
  max_completion_tokens: int = 448
  #: Most turns of the model in a completion; all but the last may call the calculator, and the prompt says so.
  max_turns: int = 5

  def task(self) -> tasks.Calculator:  # type: ignore[override]
    return tasks.Calculator(tasks.GSM8K(self.gsm8k_folder, answer="marked", chat=self.chat), self.max_turns - 1)

  def sampler_config(self) -> sampling.SamplerConfig:
    # Every answer means one more prefill, of a whole conversation.
    return dataclasses.replace(super().sampler_config(), prefill_tokens=8192)


SMOKE = gsm8k.SMOKE | dict(max_turns=3)
