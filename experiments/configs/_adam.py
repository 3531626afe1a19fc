"""Adam and its learning rate, as the configs share them."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from async_rl._validation import check_number


@dataclasses.dataclass(frozen=True)
class Adam:
  """Adam, whose learning rate rises from 0 in the first steps of a run."""

  #: Learning rate of Adam.
  learning_rate: float
  #: Adam's decay of the first moment: the share of the momentum that a step keeps.
  b1: float = 0.9
  #: Steps over which the learning rate falls to 0, its rise included; None: it stays.
  decay_steps: int | None = None

  def __post_init__(self):
    check_number("learning_rate", self.learning_rate, above=0)
    check_number("b1", self.b1, at_least=0, below=1)
    if self.decay_steps is not None:
      check_number("decay_steps", self.decay_steps, whole=True, at_least=1, remedy="leave it out for a rate that stays")

  def adamw(self, warmup: int, steps: int, **options: Any) -> optax.GradientTransformation:
    """Returns AdamW with this learning rate.

    Args:
      warmup: the steps of its rise.
      steps: those of the run.
      options: more arguments of `optax.adamw`.

    Raises:
      ValueError: if the learning rate falls to 0 before the run ends, or has no step to fall in.
    """
    schedule = optax.linear_schedule(0.0, self.learning_rate, warmup)
    if self.decay_steps is not None:
      if self.decay_steps <= warmup or self.decay_steps < steps:
        raise ValueError(
          f"*decay_steps* must be at least steps={steps} and above the {warmup} in which the learning rate rises, got "
          f"decay_steps={self.decay_steps}: from there on it is 0; raise it, or leave it out for a rate that stays."
        )
      fall = optax.linear_schedule(self.learning_rate, 0.0, self.decay_steps - warmup)
      schedule = optax.join_schedules([schedule, fall], [warmup])
    return optax.adamw(schedule, self.b1, **options)
