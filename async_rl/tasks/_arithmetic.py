"""Exact arithmetic on text that a model wrote. No `eval`: a small parser with bounds on everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

#: Bounds within which any input is evaluated in well under a millisecond.
MAX_CHARS = 400
MAX_DEPTH = 40
MAX_BITS = 1024

_TOKEN = re.compile(r"\s*(?:([0-9]{1,30}(?:\.[0-9]{1,30})?)(?![0-9.])|(\*\*|[-+*/^()\[\]]))")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_CLOSING = {"(": ")", "[": "]"}
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 4}
_UNARY_BINDING = 3


def evaluate(text: str, powers: bool = False) -> tuple[Fraction, list[Fraction]]:
  """Evaluates an expression of numbers, `+ - * / ( ) [ ]` and, if allowed, powers (`^` or `**`, right-associative).

  Args:
    text: the expression; the signs ×, ÷ and − are understood, too.
    powers: whether powers are allowed.

  Returns:
    The exact value, and the numbers as they were written, in order.

  Raises:
    ValueError: for anything else, a division by zero, or an expression or value beyond the bounds.

  >>> evaluate("(25 - 3) / 4")
  (Fraction(11, 2), [Fraction(25, 1), Fraction(3, 1), Fraction(4, 1)])
  """
  parser = _Parser(text, powers)
  value = parser.expression(0, 0)
  if parser.next is not None:
    raise ValueError(f"unexpected {str(parser.next)!r}")
  return value, parser.numbers


class _Parser:
  """Precedence climbing over the tokens; `next` is the token not yet consumed, None at the end."""

  def __init__(self, text: str, powers: bool):
    if len(text) > MAX_CHARS:
      raise ValueError(f"the expression has {len(text)} characters, more than {MAX_CHARS}")
    self._tokens = _tokens(text.translate(_SPELLINGS).rstrip())
    self._powers = powers
    self.numbers: list[Fraction] = []
    self._advance()

  def _advance(self) -> None:
    self.next = next(self._tokens, None)
    if self.next == "^" and not self._powers:
      raise ValueError("powers are not allowed")

  def expression(self, binding: int, depth: int) -> Fraction:
    """Parses operators that bind more tightly than `binding`."""
    if depth > MAX_DEPTH:
      raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    value = self._operand(depth + 1)
    while isinstance(self.next, str) and _BINDING.get(self.next, 0) > binding:
      operator = self.next
      self._advance()
      right = self.expression(_BINDING[operator] - (operator == "^"), depth + 1)
      value = _bounded(_apply(operator, value, right))
    return value

  def _operand(self, depth: int) -> Fraction:
    token = self.next
    self._advance()
    if isinstance(token, Fraction):
      self.numbers.append(token)
      return token
    if token in _CLOSING:
      value = self.expression(0, depth)
      if self.next != _CLOSING[token]:
        raise ValueError(f"{token!r} is not closed")
      self._advance()
      return value
    if token in ("+", "-"):
      value = self.expression(_UNARY_BINDING, depth)
      return -value if token == "-" else value
    raise ValueError("the expression is incomplete" if token is None else f"unexpected {token!r}")


def _tokens(text: str) -> Iterator[Fraction | str]:
  position = 0
  while position < len(text):
    match = _TOKEN.match(text, position)
    if not match:
      raise ValueError(f"cannot read {text[position : position + 20]!r}")
    number, operator = match.groups()
    yield Fraction(number) if number else operator.replace("**", "^")
    position = match.end()


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
  match operator:
    case "+":
      return left + right
    case "-":
      return left - right
    case "*":
      return left * right
    case "/":
      if not right:
        raise ValueError("division by zero")
      return left / right
  if right.denominator != 1:
    raise ValueError("the exponent must be an integer")
  if not left and right < 0:
    raise ValueError("division by zero")
  if _bits(left) * abs(right) > MAX_BITS:
    raise ValueError("the value is too large")
  return left ** int(right)


def _bounded(value: Fraction) -> Fraction:
  if _bits(value) > MAX_BITS:
    raise ValueError("the value is too large")
  return value


def _bits(value: Fraction) -> int:
  return max(value.numerator.bit_length(), value.denominator.bit_length())


def show(value: Fraction) -> str:
  """Writes a value as a calculator would: exactly if it has at most 10 decimals, otherwise with 10 significant digits.

  >>> show(Fraction(5, 4)), show(Fraction(2, 3)), show(Fraction(6))
  ('1.25', '0.6666666667', '6')
  """
  if value.denominator == 1:
    return str(value.numerator)
  scaled = value * 10**10
  if scaled.denominator == 1:
    whole, part = divmod(abs(scaled.numerator), 10**10)
    return f"{'-' * (value < 0)}{whole}.{part:010d}".rstrip("0")
  return f"{float(value):.10g}"
