"""Means with 95 % intervals over seeds, and their form in the pages' tables.

Every ± in the tables of these pages is half the width of a 95 % interval (Student's t), never a standard deviation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import special

NO_DIFFERENCE = "no difference"


class Interval(NamedTuple):
  """A mean with half the width of its interval, infinite for a single value.

  Attributes:
    mean: the mean.
    half: half the width.
    size: the number of values.
  """

  mean: float
  half: float
  size: int

  @property
  def holds_zero(self) -> bool:
    """Whether the interval holds 0, so that a difference is not shown."""
    return abs(self.mean) <= self.half


def interval(values: np.ndarray, comparisons: int = 1) -> Interval:
  """Returns the mean and 95 % interval (Student) of the values that are not NaN.

  Args:
    values: the values, one per seed, [S].
    comparisons: the number of intervals that hold jointly at 95 % (Bonferroni); 1 is the plain interval.
  """
  values = np.asarray(values, np.float64)
  values = values[~np.isnan(values)]
  size = len(values)
  if size < 2:
    return Interval(float(np.mean(values)), float("inf"), size)
  quantile = float(special.stdtrit(size - 1, 1.0 - 0.025 / comparisons))
  return Interval(float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / size**0.5, size)


def number(x: float, digits: int = 2) -> str:
  """Returns a number without the zero before its point.

  >>> number(0.25), number(-0.25), number(-1.5)
  ('.25', '−.25', '−1.50')
  """
  text = f"{x:.{digits}f}".replace("-", "−")
  return text.replace("0.", ".", 1) if text.lstrip("−").startswith("0.") else text


def measure(values: np.ndarray, digits: int = 2) -> str:
  """Returns mean ± half the 95 % interval as text; the mean alone for a single value."""
  got = interval(values)
  return number(got.mean, digits) + (f" ± {number(got.half, digits)}" if np.isfinite(got.half) else "")


def signed(got: Interval, digits: int = 3) -> str:
  """Returns a difference with its sign and interval as text."""
  sign = "−" if got.mean < 0 else "+"
  return f"{sign}{number(abs(got.mean), digits)} ± {number(got.half, digits)}"


def verdict(values: np.ndarray, comparisons: int, digits: int = 3) -> str:
  """Returns a mean difference as text that says what it shows.

  Args:
    values: the paired differences, one per seed, [S].
    comparisons: the number of comparisons that it is one of.

  Returns:
    The difference with its own 95 % interval: followed by `NO_DIFFERENCE` if that holds 0, in bold if not even the
    interval that holds for all comparisons jointly holds 0.
  """
  got = interval(values)
  text = signed(got, digits)
  if got.holds_zero:
    return f"{text} ({NO_DIFFERENCE})"
  return text if interval(values, comparisons).holds_zero else f"**{text}**"


def grid(header: list[str], rows: list[list[str]]) -> str:
  """Returns a table in Markdown."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)
