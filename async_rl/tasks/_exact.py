"""Exact values of SymPy expressions, to check a comparison that was made numerically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

#: The most bits of a number that is computed; expressions beyond are compared by their form.
MAX_BITS = 1 << 20
#: Difference, relative to the greater one, at which two irrational values are different numbers.
TOLERANCE = 1e-3


class TooLarge(Exception):
  """A value needs more than `MAX_BITS` bits."""


def agree(expected: Sequence[Any], found: Sequence[Any]) -> bool:
  """Returns whether exact arithmetic lets two parsed answers be equal.

  Args:
    expected: the reference as math-verify parses it: expressions of SymPy, and the text that they were read from.
    found: the answer, likewise.

  Returns:
    False if every reading of the one differs from every reading of the other; True also where nothing is known.
  """
  pairs = [(a, b) for a in expected for b in found if not isinstance(a, str) and not isinstance(b, str)]
  return not pairs or any(_may_be_equal(_right_side(a), _right_side(b)) for a, b in pairs)


def _right_side(expression: Any) -> Any:
  """Returns the 5 of `x = 5`."""
  from sympy import Equality

  return expression.rhs if isinstance(expression, Equality) and expression.lhs.is_Symbol else expression


def _may_be_equal(a: Any, b: Any) -> bool:
  if a == b:
    return True
  parts_a, parts_b = _parts(a), _parts(b)
  if parts_a is not None and parts_b is not None:
    return len(parts_a) == len(parts_b) and all(map(_may_be_equal, parts_a, parts_b))
  try:
    value_a, value_b = exact_value(a), exact_value(b)
  except TooLarge:
    return False  # their forms differ
  if value_a is not None and value_b is not None:
    return value_a == value_b
  return _close(a, b)


def _parts(expression: Any) -> Sequence[Any] | None:
  """Returns the entries of a collection, in an order of their values; None for everything else."""
  from sympy import FiniteSet
  from sympy import Interval
  from sympy import MatrixBase
  from sympy import Tuple

  if isinstance(expression, FiniteSet):
    return sorted(expression.args, key=_order)
  if isinstance(expression, Tuple | MatrixBase):
    return list(expression)
  return [expression.start, expression.end] if isinstance(expression, Interval) else None


def _order(expression: Any) -> tuple[int, Any]:
  try:
    value = exact_value(expression)
  except TooLarge:
    value = None
  return (1, str(expression)) if value is None else (0, value)


def _close(a: Any, b: Any) -> bool:
  """Returns whether two real numbers are close relative to their size; True if they are no real numbers."""
  from sympy import N

  if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
    return True
  x, y = N(a, 20), N(b, 20)
  if not (x.is_Float or x.is_Rational) or not (y.is_Float or y.is_Rational):
    return True
  return bool(abs(x - y) <= TOLERANCE * max(abs(x), abs(y)))


def exact_value(expression: Any) -> Fraction | None:
  """Returns the value of an expression of rational numbers with `+ - * / ^ !`; None for everything else.

  Decimals have the value that is written.

  Raises:
    TooLarge: if an intermediate value would need more than `MAX_BITS` bits.
  """
  import sympy

  if isinstance(expression, sympy.Rational):
    return Fraction(int(expression.p), int(expression.q)) if expression.q else None
  if isinstance(expression, sympy.Float):
    return Fraction(str(expression)) if expression.is_finite else None
  if isinstance(expression, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.UnevaluatedExpr):
    values = [exact_value(argument) for argument in expression.args]
    if any(value is None for value in values):
      return None
    return _combined(expression, values)
  return None


def _combined(expression: Any, values: list[Any]) -> Fraction | None:
  import sympy

  if isinstance(expression, sympy.UnevaluatedExpr):
    return values[0]
  if isinstance(expression, sympy.factorial):
    return _factorial(values[0])
  if isinstance(expression, sympy.Pow):
    return _power(*values)
  total = values[0]
  for value in values[1:]:
    total = _bounded(total + value if isinstance(expression, sympy.Add) else total * value)
  return total


def _factorial(value: Fraction) -> Fraction | None:
  if value.denominator != 1 or value < 0:
    return None
  if value * value.numerator.bit_length() > MAX_BITS:
    raise TooLarge
  return Fraction(math.factorial(int(value)))


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
  if exponent.denominator != 1 or (not base and exponent < 0):
    return None
  if _bits(base) * abs(exponent) > MAX_BITS:
    raise TooLarge
  return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
  if _bits(value) > MAX_BITS:
    raise TooLarge
  return value


def _bits(value: Fraction) -> int:
  return max(value.numerator.bit_length(), value.denominator.bit_length())
