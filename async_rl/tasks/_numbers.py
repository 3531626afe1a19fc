"""Numbers in free text: the answers of mathematical word problems, however a model writes them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

#: The number of characters, at the end of a text, that are searched for a final answer.
WINDOW = 2000

_VULGAR = {
  "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
  "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip


def _mixed(match: re.Match[str]) -> str:
  """Returns a mixed number as it is, and `_OTHER` if its fraction is improper."""
  return match.group() if 0 < int(match[1]) < int(match[2]) else _OTHER


_FULL_WIDTH = str.maketrans(
  {chr(code): chr(code - 0xFEE0) for code in (*range(0xFF10, 0xFF1A), *map(ord, "＄％＋，－．／＝"))}
)
_BRACED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
#: Takes the place of an expression that is no plain number, and spoils the number that it belongs to.
_OTHER = "□"

#: Separators of thousands. Single spaces are some, too, unless the number before or after says otherwise.
_SEPARATOR = r"(?:[\u00a0\u2009\u202f_'\u2019]|\\[,!;]|\{,\})"
_GROUPED = re.compile(rf"(?<![0-9.,/:^_'])[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?![0-9_'])")
_SPACED = re.compile(
  r"(?<![0-9.,/:^_])(?<![0-9][ ])[0-9]{1,3}(?:[ ][0-9]{3}){1,15}(?![0-9/:^_]|[.,][0-9]{3}\b|[ ][0-9])"
)

_SIMPLIFICATIONS: list[tuple[re.Pattern[str], Any]] = [
  (re.compile(r"[\u2010-\u2015\u2212\ufe63]"), "-"),  # hyphens, dashes and the minus sign
  (re.compile(r"(?i)\b(?:minus|negative)\s+(?=[$€£¥₹]?[0-9.])"), "-"),
  (re.compile("[ ]?([" + "".join(_VULGAR) + "])"), lambda match: " " + _VULGAR[match[1]]),
  (re.compile(rf"(?<=[0-9]){_SEPARATOR}(?=[0-9]{{3}})"), ","),
  (_SPACED, lambda match: match.group().replace(" ", ",")),
  (re.compile(r"\\[dtc]?frac\s*\{\s*([0-9]{1,50})\s*\}\s*\{\s*([0-9]{1,50})\s*\}"), r" \1/\2"),
  (re.compile(r"\\[dtc]?frac\s*([0-9])\s*([0-9])"), r" \1/\2"),
  (re.compile(rf"\\[dtc]?frac\s*{_BRACED}\s*{_BRACED}"), f" {_OTHER} "),
  (
    re.compile(rf"\\sqrt\s*(?:\[[^\]]*\]\s*)?(?:{_BRACED}|[0-9])|[√∛]\s*[0-9.]*|\\pi\b|π|\bpi\b|\\infty|∞"),
    f" {_OTHER} ",
  ),
  (re.compile(r"(?<![0-9.,/])[0-9]{1,50} ([0-9]{1,50})/([0-9]{1,50})"), _mixed),
  (re.compile(r"-\s+(?=[0-9]+/)"), "-"),  # the minus of -\frac
  (re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}"), r" \1"),
  (re.compile(r"\\[$%]|\\[!,;: ]"), lambda match: match.group()[1] if match.group()[1] in "$%" else " "),
]

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_NUMBER = re.compile(
  rf"""
  (?<![\dA-Za-z]) (?<!\d[.,/:^_']) (?<![/^]) (?<!\^[{{(]) (?<!\^[-+]) (?<![A-Za-z]_) (?<!_{{) (?<!\d[eE][-+])
  # (above: not the tail of a word or of another number, nor an exponent or an index)
  (?: (?<![0-9A-Za-z)\]}}]) (?P<sign>[-+]) )?              # in "7-3" the minus is an operator
  (?: [$€£¥₹] \s? (?P<inner_sign>-)? )?
  (?: (?P<whole>[0-9]{{1,50}}) [ ] (?= [0-9]{{1,50}}/[1-9] ) )?                    # 1 1/2
  (?P<number> [0-9]{{1,3}}(?:,[0-9]{{3}}){{1,15}}(?:\.[0-9]{{1,50}})?
    | [0-9]{{1,50}}(?:\.[0-9]{{1,50}})?
    | (?<!\.)\.[0-9]{{1,50}} )
  (?: / (?P<denominator>[0-9]{{1,50}}) )?
  (?: [eE] (?P<e>[-+]?[0-9]{{1,3}})
    | \s* (?:[x×*·]|\\times|\\cdot) \s* 10 \s* \^ \s* \{{? \s* (?P<ten>[-+]?[0-9]{{1,3}}) \}}? )?
  (?P<scale> (?: \s (?i:{"|".join(_SCALES)}) \b )* )
  (?! \d | [.,/:^_'][0-9] | \s*\^ )                       # not the head of another number, date, time or power
  (?! [eE][-+]?\d | \s*(?:[x×*·]|\\times|\\cdot)\s*10\s*\^ | (?:[kKMB]|bn)\b )
  (?! [⁰¹²³⁴-⁹⁻] | \s*{_OTHER} )
  """,
  re.VERBOSE,
)
#: The minus of an answer that a space or a parenthesis parts from its number.
_PARTED_MINUS = re.compile(r"^\s*-\s*\(?\s*(?=[$€£¥₹]?\s?\.?[0-9])")
#: What follows a number that is the first operand of an expression.
_OPERATION = re.compile(
  r"\s* (?: [-+*/×·÷^xX] | \\times | \\cdot | \\div | (?:and|&)(?=\s*[0-9]+/) ) \s* [-+$€£¥₹(]* \s* [0-9.(]", re.VERBOSE
)


def numbers(text: str) -> list[Fraction]:
  """Returns all numbers in `text`, in order, exactly.

  Thousands separators, currency, signs (the Unicode ones as well), full-width digits, decimals, fractions, mixed
  numbers, scientific notation and words such as `million` are read. Everything that is no plain number is left out, for
  example dates, version numbers, powers and roots.

  >>> numbers("It costs $1,234.50, that is −1/2 of 2.5×10^3.")
  [Fraction(2469, 2), Fraction(-1, 2), Fraction(2500, 1)]
  """
  found = (_value(match) for match in _NUMBER.finditer(_simplified(text)))
  return [value for value in found if value is not None]


def _simplified(text: str) -> str:
  text = text.translate(_FULL_WIDTH)
  for pattern, replacement in _SIMPLIFICATIONS:
    text = pattern.sub(replacement, text)
  return text


def _value(match: re.Match[str]) -> Fraction | None:
  value = Fraction(match["number"].replace(",", ""))
  if match["denominator"]:
    if not int(match["denominator"]):
      return None
    value /= int(match["denominator"])
  value += int(match["whole"] or 0)
  value *= Fraction(10) ** int(match["e"] or match["ten"] or 0)
  value *= 10 ** sum(_SCALES[word.lower()] for word in match["scale"].split())
  return -value if "-" in (match["sign"], match["inner_sign"]) else value


def simplify_digits(text: str) -> str:
  """Returns `text` with ASCII digits, and without separators (other than commas) between the thousands of a number."""
  text = text.translate(_FULL_WIDTH)
  for pattern in (_GROUPED, _SPACED):
    text = pattern.sub(lambda match: re.sub(r"\D", "", match.group()), text)
  return text


def plain_number(text: str) -> Fraction | None:
  """Returns the value of a text that is one number, apart from a currency sign, `%` or a full stop; else None.

  >>> plain_number("$1,234."), plain_number("12 apples")
  (Fraction(1234, 1), None)
  """
  match = _NUMBER.fullmatch(_simplified(text).strip().strip("$").removesuffix(".").removesuffix("%").strip())
  return _value(match) if match else None


def stated_number(text: str) -> Fraction | None:
  """Returns the number that a short answer states, units and words around it or not; None if that is not clear.

  It is the first number, or that after the last equals sign; an expression that is yet to be computed is no number.

  >>> stated_number("18 / 2 = 9 apples"), stated_number("18 / 2")
  (Fraction(9, 1), None)
  """
  for side in reversed(_simplified(text).split("=")):
    side = _PARTED_MINUS.sub("-", side)
    match = _NUMBER.search(side)
    if match and not _OPERATION.match(side, match.end()):
      return _value(match)
  return None


def final_answer(text: str, marked: bool = False) -> Fraction | None:
  r"""Returns the number that a solution gives as its answer, or None.

  Args:
    text: a solution.
    marked: whether the answer must follow `####`, on its line or alone on the next one, or stand in `\boxed{}`;
      otherwise, if neither occurs, it is the last number of the text.

  >>> final_answer("8 * 9 = 72\n#### 72 clips.")
  Fraction(72, 1)
  """
  text = text[-WINDOW:]
  _, marker, rest = text.rpartition("####")
  if marker:
    line, _, following = rest.partition("\n")
    return stated_number(line) if line.strip() else plain_number(following.strip().split("\n")[0])
  inside = boxed(text)
  if inside is not None:
    return stated_number(inside)
  found = [] if marked else numbers(text)
  return found[-1] if found else None


def boxed(text: str) -> str | None:
  r"""Returns the content of the last `\boxed{}` of `text`, braces balanced; None without one that closes."""
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
