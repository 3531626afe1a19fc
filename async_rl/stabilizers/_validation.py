"""Checks of constructor arguments."""

from collections.abc import Sequence
from typing import Any


def require(condition: Any, name: str, wanted: str, value: Any) -> None:
  """Raises a ValueError unless `condition` holds or cannot be known yet.

  Under `optax.inject_hyperparams` hyper-parameters are traced arrays; what is compared with them is too, and passes.

  Args:
    condition: bool, or a traced array.
    name: the argument's name.
    wanted: what it must be, e.g. "at least 0".
    value: its value.
  """
  if isinstance(condition, bool) and not condition:
    raise ValueError(f"{name} must be {wanted}, got {name}={value!r}")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
  """Raises a ValueError unless `value` is one of `choices`."""
  require(value in choices, name, "one of " + ", ".join(map(repr, choices)), value)
