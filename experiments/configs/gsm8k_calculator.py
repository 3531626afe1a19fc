"""GSM8K with a calculator that the model may call, several turns to a completion, trained asynchronously.

The supervised start turns the calculations that GSM8K's solutions annotate into calls; without it there are none.

Command: python -m experiments.train gsm8k_calculator --gsm8k-folder DIR
Hardware and time: one GPU. Only tried on a CPU for a few steps, so there is no result to expect yet.
"""

from __future__ import annotations

import dataclasses

from async_rl import tasks
from async_rl.runtime import Experiment
from async_rl.runtime import override
from experiments.configs import gsm8k

# All turns but the last may call the calculator. Every answer means one more prefill, of a whole conversation.
DEFAULTS = override(
  gsm8k.Options(),
  run_dir="runs/gsm8k_calculator", max_prompt_tokens=384, max_completion_tokens=448, max_turns=5, prefill_tokens=8192,
)  # fmt: skip


def build(options: gsm8k.Options) -> Experiment:
  problems = tasks.GSM8K(options.gsm8k_folder, answer="marked", chat=options.chat)
  task = tasks.Calculator(problems, options.rollout.max_turns - 1)
  return dataclasses.replace(gsm8k.build(options), name="gsm8k_calculator", task=task)


SMOKE = gsm8k.SMOKE | dict(max_turns=3)
