"""Checks of arguments, shared by every folder that takes numbers which may be traced."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from async_rl._suggestions import find_nearest


def check_number(
  name: str,
  value: Any,
  *,
  at_least: Any = None,
  above: Any = None,
  at_most: Any = None,
  below: Any = None,
  finite: bool = True,
  whole: bool = False,
  remedy: str = "",
) -> None:
  """Raises a ValueError unless *value* is one number within the bounds.

  Python, numpy and jax numbers are checked alike. Traced values are not known yet and pass, and so does a bound that is
  traced: `optax.inject_hyperparams`, `vmap` and `jit` hand such values to a constructor.

  Args:
    name: the argument's name.
    value: the argument's value.
    at_least: the smallest allowed value.
    above: a bound that the value must exceed.
    at_most: the largest allowed value.
    below: a bound that the value must stay under.
    finite: whether infinities are refused. NaN always is.
    whole: whether the value must be an integer.
    remedy: a clause for the end of the message.
  """
  if isinstance(value, jax.core.Tracer):
    return
  wanted = "an integer" if whole else "a number"
  number = np.asarray(value)
  holds = number.ndim == 0 and _is_real(number.dtype, whole)
  if holds:
    holds = not np.isnan(number) and not (finite and np.isinf(number))
    value = number.item()
  bounds = (
    ("at least", at_least, lambda x, bound: x >= bound),
    ("above", above, lambda x, bound: x > bound),
    ("at most", at_most, lambda x, bound: x <= bound),
    ("below", below, lambda x, bound: x < bound),
  )
  clauses = []
  for words, bound, compare in bounds:
    if bound is not None and not isinstance(bound, jax.core.Tracer):
      bound = np.asarray(bound).item()
      clauses.append(f"{words} {bound}")
      holds = holds and compare(value, bound)
  if not holds:
    wanted = " ".join([wanted, " and ".join(clauses)]).rstrip()
    raise ValueError(f"*{name}* must be {wanted}, got {name}={value!r}{'; ' if remedy else ''}{remedy}.")


def check_multiple(name: str, value: int, of: int, meaning: str) -> None:
  """Raises a ValueError unless *value* is a multiple of *of*, which *meaning* describes."""
  if value % of:
    nearest = -(-value // of) * of
    raise ValueError(
      f"*{name}* must be a multiple of {of}, {meaning}, got {name}={value}; the next is {name}={nearest}."
    )


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
  """Raises a ValueError unless *value* is one of *choices*; it suggests the nearest one."""
  if value not in choices:
    nearest = find_nearest(str(value), choices)
    remedy = f"; did you mean {nearest!r}?" if nearest else "."
    raise ValueError(f"*{name}* must be one of {', '.join(map(repr, choices))}, got {name}={value!r}{remedy}")


def _is_real(dtype: np.dtype, whole: bool) -> bool:
  """Whether values of *dtype* are real numbers, or integers where *whole*; bfloat16 and its kind are real."""
  return jax.numpy.issubdtype(dtype, jax.numpy.integer if whole else jax.numpy.number) and dtype.kind != "c"
