"""Tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from async_rl.tasks._calculator import Calculator
from async_rl.tasks._countdown import Countdown
from async_rl.tasks._countdown import CountdownSteps
from async_rl.tasks._gsm8k import GSM8K
from async_rl.tasks._keywords import KeyWords
from async_rl.tasks._maths import Maths
from async_rl.tasks._reasoning_gym import ReasoningGym
from async_rl.tasks._summaries import Summaries
from async_rl.tasks._sums import Sums
from async_rl.tasks._task import Task
from async_rl.tasks._task import known

#: The tasks that `make` knows.
TASKS: Mapping[str, Callable[..., Task]] = {
  "calculator": Calculator,
  "countdown": Countdown,
  "countdown_steps": CountdownSteps,
  "gsm8k": GSM8K,
  "keywords": KeyWords,
  "maths": Maths,
  "reasoning_gym": ReasoningGym,
  "summaries": Summaries,
  "sums": Sums,
}


def make(name: str, **options: Any) -> Task:
  """Makes the task `name` of `TASKS` with its own options.

  Raises:
    ValueError: for an unknown task or option; it suggests the nearest name.

  >>> make("sums", numbers=4).name
  'sums4'
  """
  factory = TASKS[known("task", name, TASKS)]
  for option in options:
    known(f"option of task {name!r}", option, inspect.signature(factory).parameters)
  return factory(**options)
