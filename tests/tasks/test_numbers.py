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

LAST_NUMBER = [
  # commas and other separators
  ("1,234", "1234"),
  ("1,000,000 people", "1000000"),
  ("1,234.50", "2469/2"),
  ("1{,}234", "1234"),
  (r"1\,234", "1234"),
  ("1\u202f234", "1234"),
  # currency
  ("$18", "18"),
  ("$1,234.50", "2469/2"),
  ("-$5", "-5"),
  ("$-5", "-5"),
  ("€ 5", "5"),
  (r"\$18", "18"),
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
  # fractions
  ("3/4", "3/4"),
  ("-3/4", "-3/4"),
  ("1 1/2", "3/2"),
  ("2½", "5/2"),
  ("½", "1/2"),
  (r"\frac{3}{4}", "3/4"),
  (r"-\frac{3}{4}", "-3/4"),
  (r"\dfrac34", "3/4"),
  # scientific notation
  ("1e3", "1000"),
  ("2.5E-3", "1/400"),
  ("1.2×10^3", "1200"),
  (r"1.2 \times 10^{3}", "1200"),
  ("6 * 10^2", "600"),
]
NO_NUMBER = ["", "none", "x2", "3:30", "1/2/2020", "12.5.3", "1,23", "1/0", "2^10", "１８", "٣"]


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
    ("####\n72", True, None),
    ("#### unknown", True, None),
    ("the answer is 72", True, None),
    ("the answer is 72", False, 72),
    (r"so \boxed{72}, after 3 steps", True, 72),
    (r"so \boxed{\text{about } 72 \text{ clips}}", True, 72),
    (r"first \boxed{1}, then \boxed{\frac{1}{2}} of 5", True, Fraction(1, 2)),
    (r"\boxed{72", True, None),
    (r"\boxed{}", False, None),
    ("72 and then" + " words" * 1000, False, None),
  ],
)
def test_final_answer(text, marked, value):
  assert final_answer(text, marked) == value


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


@pytest.mark.parametrize(
  "text",
  [piece * 50_000 for piece in ("9", "1,", "1e", "1/", "1 ", "1 1/", "- ", "$", r"\frac{1", r"\boxed{", r"\text{")],
)
def test_hostile_text_takes_no_time(text):
  start = time.process_time()
  final_answer(text)
  assert time.process_time() - start < 0.5
