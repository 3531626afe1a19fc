"""Numbers in free text: the answers of mathematical word problems, however a model writes them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

#: Characters of a text's end in which a final answer is looked for.
WINDOW = 2000

_VULGAR = {
  "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
  "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip

_SIMPLIFICATIONS: list[tuple[re.Pattern[str], Any]] = [
  (re.compile(r"[\u2010-\u2015\u2212\ufe63\uff0d]"), "-"),  # hyphens, dashes and the minus sign
  (re.compile("[" + "".join(_VULGAR) + "]"), lambda match: " " + _VULGAR[match.group()]),
  (re.compile(r"(?<=[0-9])(?:[\u00a0\u2009\u202f]|\\[,!;]|\{,\}|\\,)(?=[0-9]{3})"), ","),  # other thousands separators
  (re.compile(r"\\d?frac\s*\{\s*([0-9]{1,50})\s*\}\s*\{\s*([0-9]{1,50})\s*\}"), r" \1/\2"),
  (re.compile(r"\\d?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
  (re.compile(r"-\s+(?=[0-9]+/)"), "-"),  # the minus of -\frac
  (re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}"), r" \1"),
  (re.compile(r"\\[$%]|\\[!,;: ]"), lambda match: match.group()[1] if match.group()[1] in "$%" else " "),
]

_NUMBER = re.compile(
  r"""
  (?<![0-9A-Za-z]) (?<![0-9][.,/:^])                      # not the tail of a word or of another number
  (?: (?<![0-9A-Za-z)\]}]) (?P<sign>[-+]) )?              # in "7-3" the minus is an operator
  (?: [$€£¥₹] \s? (?P<inner_sign>-)? )?
  (?: (?P<whole>[0-9]{1,50}) [ ] (?= [0-9]{1,50}/[1-9] ) )?                    # 1 1/2
  (?P<number> [0-9]{1,3}(?:,[0-9]{3}){1,15}(?:\.[0-9]{1,50})? | [0-9]{1,50}(?:\.[0-9]{1,50})? | (?<!\.)\.[0-9]{1,50} )
  (?: / (?P<denominator>[0-9]{1,50}) )?
  (?: [eE] (?P<e>[-+]?[0-9]{1,3})
    | \s* (?:[x×*·]|\\times|\\cdot) \s* 10 \s* \^ \s* \{? \s* (?P<ten>[-+]?[0-9]{1,3}) \}? )?
  (?! [0-9] | [.,/:^][0-9] | \s*\^ )                      # not the head of another number, date, time or power
  """,
  re.VERBOSE,
)


def numbers(text: str) -> list[Fraction]:
  """All numbers in `text`, in order, exactly.

  It reads thousands separators, currency, signs (the Unicode ones as well), decimals, fractions, mixed numbers and
  scientific notation; it leaves out what is no plain number, such as dates and version numbers.

  >>> numbers("It costs $1,234.50, that is −1/2 of 2.5×10^3.")
  [Fraction(2469, 2), Fraction(-1, 2), Fraction(2500, 1)]
  """
  for pattern, replacement in _SIMPLIFICATIONS:
    text = pattern.sub(replacement, text)
  found = (_value(match) for match in _NUMBER.finditer(text))
  return [value for value in found if value is not None]


def _value(match: re.Match[str]) -> Fraction | None:
  value = Fraction(match["number"].replace(",", ""))
  if match["denominator"]:
    if not int(match["denominator"]):
      return None
    value /= int(match["denominator"])
  value += int(match["whole"] or 0)
  value *= Fraction(10) ** int(match["e"] or match["ten"] or 0)
  return -value if "-" in (match["sign"], match["inner_sign"]) else value


def final_answer(text: str, marked: bool = False) -> Fraction | None:
  r"""The number that a solution gives as its answer, or None.

  Args:
    text: a solution.
    marked: whether the answer must follow `####` or stand in `\boxed{}`; otherwise, if neither occurs, it is the last
      number of the text.

  >>> final_answer("8 * 9 = 72\n#### 72 clips.")
  Fraction(72, 1)
  """
  text = text[-WINDOW:]
  _, marker, rest = text.rpartition("####")
  if marker:
    candidates = numbers(rest.split("\n")[0])[:1]
  elif (inside := boxed(text)) is not None:
    candidates = numbers(inside)[:1]
  else:
    candidates = [] if marked else numbers(text)[-1:]
  return candidates[0] if candidates else None


def boxed(text: str) -> str | None:
  r"""What stands in the last `\boxed{}` of `text`, braces balanced; None if there is none or it never closes."""
  start = text.rfind("\\boxed{")
  if start < 0:
    return None
  start += len("\\boxed{")
  depth = 1
  for end in range(start, len(text)):
    depth += (text[end] == "{") - (text[end] == "}")
    if not depth:
      return text[start:end]
  return None
