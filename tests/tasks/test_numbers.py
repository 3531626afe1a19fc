"""Numbers and final answers in free text."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl.tasks._numbers import boxed
from async_rl.tasks._numbers import final_answer
from async_rl.tasks._numbers import numbers
from async_rl.tasks._numbers import plain_number

LAST_NUMBER = [
  # commas and other separators
  ("1,234", "1234"),
  ("1,000,000 people", "1000000"),
  ("1,234.50", "2469/2"),
  ("1{,}234", "1234"),
  (r"1\,234", "1234"),
  ("1_000", "1000"),
  ("18 000", "18000"),
  ("1 234 567.5", "2469135/2"),
  ("1'234", "1234"),
  ("1’234", "1234"),
  ("1\u202f234", "1234"),
  # currency
  ("$18", "18"),
  ("$1,234.50", "2469/2"),
  ("-$5", "-5"),
  ("$-5", "-5"),
  ("€ 5", "5"),
  (r"\$18", "18"),
  ("$18 000", "18000"),
  ("¥1,000", "1000"),
  ("$18$", "18"),
  # units and words around
  ("18 dollars", "18"),
  ("5kg", "5"),
  ("50%", "50"),
  (r"50\%", "50"),
  ("(18)", "18"),
  ("**18**", "18"),
  (r"\text{18 cm}", "18"),
  ("costs 3 apples or 4 pears", "4"),
  ("3 million", "3000000"),
  ("2.5 Thousand", "2500"),
  ("4 hundred thousand", "400000"),
  ("72 m2", "72"),
  ("5 m²", "5"),
  ("_18_", "18"),
  # other digits
  ("１８", "18"),
  ("１，２３４．５", "2469/2"),
  ("－１８", "-18"),
  # full stops
  ("18.", "18"),
  ("is...18...", "18"),
  ("18.0", "18"),
  (".5", "1/2"),
  ("so it is 7.5.", "15/2"),
  # minus
  ("-5", "-5"),
  ("−5", "-5"),
  ("–5", "-5"),
  ("= -7", "-7"),
  ("10-3", "3"),
  ("10 - 3", "3"),
  ("+7", "7"),
  ("﹣7", "-7"),
  ("is—7", "7"),
  ("-0", "0"),
  ("007", "7"),
  # fractions
  ("3/4", "3/4"),
  ("-3/4", "-3/4"),
  ("1 1/2", "3/2"),
  ("2½", "5/2"),
  ("2 ½", "5/2"),
  ("½", "1/2"),
  (r"\frac{3}{4}", "3/4"),
  (r"-\frac{3}{4}", "-3/4"),
  (r"\dfrac34", "3/4"),
  (r"\tfrac{3}{4}", "3/4"),
  # scientific notation
  ("1e3", "1000"),
  ("2.5E-3", "1/400"),
  ("1.2×10^3", "1200"),
  (r"1.2 \times 10^{3}", "1200"),
  ("6 * 10^2", "600"),
  ("1e999", str(10**999)),
]
NO_NUMBER = [
  "", "none", "x2", "3:30", "1/2/2020", "12.5.3", "1,23", "1/0", "2^10", "٣", "3٣",
  "NaN", "inf", "-∞", "∞", "½/0", "null", "true", "#", "$", "-", ".",
  "1e9999999", "1e-9999999", "1.2×10^99999", r"1.2 \times 10^{99999}", "9" * 51,
  "1_0000", "1_00", "1,0000", "1,00,000", "1.000.000", "1'00", "18 000/3", "1 3/3", "1 0/3",
  "5k", "72K", "1.5M", "2B", "4bn",
  "2²", "2³", "10⁻³", "x^2", "x^{2}", "x_1", "x_{12}", "π/2", "2π", r"2\pi", "√16", r"\sqrt{16}", r"2\sqrt{3}",
  r"\frac{x}{2}", r"\frac{1.5}{2}", r"\frac{\sqrt{2}}{2}", r"3\frac{a}{2}",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), LAST_NUMBER)
def test_number(text, value):
  assert numbers(text)[-1] == Fraction(value)
  assert numbers(f"The answer is {text}")[-1] == Fraction(value)


@pytest.mark.parametrize("text", NO_NUMBER)
def test_what_is_no_plain_number(text):
  assert numbers(text) == []


@pytest.mark.parametrize(
  ("text", "marked", "value"),
  [
    ("8 * 9 = 72\n#### 72", True, 72),
    ("#### 71\nno, wait\n#### $72.00 in all (8 of 9)\nIt took 3 steps.", True, 72),
    ("####\n72", True, 72),
    ("#### - 72", True, -72),
    ("#### -(72)", True, -72),
    ("#### 8 - 80 = - $72", True, -72),
    ("#### -(8 * 9)", True, None),
    ("#### 72m", True, 72),
    ("####\r\n\r\n72\r\nDone.", True, 72),
    ("####\n$1,234.", True, 1234),
    ("####\nIt took 3 steps.", True, None),
    ("####", True, None),
    ("#### unknown", True, None),
    ("#### unknown\n72", True, None),
    ("#### seventy-two", True, None),
    ("#### ７２", True, 72),
    ("#### 1_000", True, 1000),
    ("#### 18 000", True, 18000),
    ("#### 18 000 dollars", True, 18000),
    ("#### 5 100 200 30", True, 5),
    ("#### 18 / 2 = 9", True, 9),
    ("#### 9 = 18 / 2", True, 9),
    ("#### x = 9 = nine", True, 9),
    ("#### 18 / 2", True, None),
    ("#### 6 * 12", True, None),
    (r"#### 6 \times 12", True, None),
    ("#### 6 x 12", True, None),
    ("#### 5-7", True, None),
    ("#### $5 - $7", True, None),
    ("#### 6 * (1 + 11)", True, None),
    ("#### 2 and 1/2", True, None),
    ("#### 72-hour days", True, 72),
    ("#### 72 (8 * 9)", True, 72),
    ("#### 72 or 73", True, 72),
    ("#### 1e9999999", True, None),
    ("#### 1e9999999 clips, or 3", True, 3),
    ("#### 100%", True, 100),
    (r"#### $\frac{1}{2}$", True, Fraction(1, 2)),
    ("#### 2 dozen = 24", True, 24),
    ("#### NaN", True, None),
    (r"\boxed{18 / 2 = 9}", True, 9),
    (r"\boxed{\frac{\pi}{2}}", True, None),
    (r"\boxed{(1+2)/3}", True, None),
    ("the answer is 72", True, None),
    ("the answer is 72", False, 72),
    (r"so \boxed{72}, after 3 steps", True, 72),
    (r"so \boxed{\text{about } 72 \text{ clips}}", True, 72),
    (r"first \boxed{1}, then \boxed{\frac{1}{2}} of 5", True, Fraction(1, 2)),
    (r"\boxed{72", True, None),
    (r"\boxed{}", False, None),
    ("72 and then" + " words" * 1000, False, None),
    ("72" + "." * 1998, False, 72),
    ("72" + "." * 1999, False, 2),
  ],
)
def test_final_answer(text, marked, value):
  assert final_answer(text, marked) == value


@pytest.mark.parametrize(
  ("text", "value"),
  [("72", 72), (" -7.5 ", Fraction(-15, 2)), ("$1,234.", 1234), ("$72$", 72), ("50%", 50), ("18 000", 18000)]
  + [(text, None) for text in ("", "72 apples", "seventy-two", "1 2", "72 = 72", "8 * 9", "[72]", "1e9999999")],
)
def test_plain_number(text, value):
  assert plain_number(text) == value


def test_boxed_balances_braces():
  assert boxed(r"\boxed{a{b}{c{d}}}}") == "a{b}{c{d}}"
  assert boxed(r"\boxed{" + "{" * 5000) is None
  assert boxed("nothing") is None


FORMATS = [
  str,
  "{:,}".format,
  "${:,}".format,
  "{} apples.".format,
  r"\boxed{{{}}}".format,
  "#### {}".format,
  lambda n: f"{n}.00",
  lambda n: f"{2 * n}/2" if n >= 0 else f"−{-2 * n}/2",
  lambda n: rf"\frac{{{3 * n}}}{{3}}" if n >= 0 else rf"-\frac{{{-3 * n}}}{{3}}",
  lambda n: f"{n}e0",
  lambda n: f"{n}×10^0",
]


@settings(deadline=None)
@given(n=st.integers(-(10**12), 10**12), form=st.sampled_from(FORMATS), prefix=st.text("ab 12=+.\n", max_size=20))
def test_every_way_of_writing_a_number_gives_that_number_and_no_other(n, form, prefix):
  assert final_answer(f"{prefix}\nThe answer is {form(n)}") == n


@settings(deadline=None, max_examples=300)
@given(text=st.one_of(st.text(max_size=300), st.text("0123456789.,/-^{}()$ e\\×½\n#", max_size=300)))
def test_any_text_is_survived(text):
  assert isinstance(final_answer(text), Fraction | None)
  assert final_answer(text, marked=True) in (None, final_answer(text))


PIECES = ["9", "1,", "1e", "1/", "1 ", "1 1/", "- ", "$", "123 ", "1 million ", "= 1 "]
PIECES += [r"\frac{1", r"\frac{{}", r"\sqrt{", r"\boxed{", r"\text{"]


@pytest.mark.parametrize(
  "text",
  [piece * 50_000 for piece in PIECES],
)
def test_hostile_text_takes_no_time(text):
  start = time.process_time()
  final_answer(text)
  assert time.process_time() - start < 0.5
