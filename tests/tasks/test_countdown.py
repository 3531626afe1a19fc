"""Arithmetic on model output and both forms of countdown."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl import tasks
from async_rl.tasks._arithmetic import evaluate
from async_rl.tasks._arithmetic import show
from async_rl.tasks._countdown import Puzzle
from async_rl.types import LENGTH
from async_rl.types import STOP

PUZZLE = Puzzle((25, 3, 8, 4), 58, (25, (("*", 3, False), ("-", 25, False), ("+", 8, False))))
OPERATIONS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("1+2*3", 7),
    ("(1+2)*3", 9),
    ("7-3-2", 2),
    ("24/4/3", 2),
    ("8/(3-8/3)", 24),
    ("-3+5", 2),
    ("2--3", 5),
    ("2*-3", -6),
    ("-(2+3)", -5),
    ("1.5*2", 3),
    ("6 × 7 ÷ 2 − 1", 20),
    ("[1+2]*3", 9),
    ("[(1+2)*(3+4)]/7", 3),
    (" 5 ", 5),
  ],
)
def test_arithmetic(text, value):
  assert evaluate(text)[0] == value


@pytest.mark.parametrize(("text", "value"), [("2^10", 1024), ("2**3**2", 512), ("-2^2", -4), ("2^-1", Fraction(1, 2))])
def test_powers_only_if_allowed(text, value):
  assert evaluate(text, powers=True)[0] == value
  with pytest.raises(ValueError, match="powers"):
    evaluate(text)


HOSTILE = [
  "",
  "   ",
  "__import__('os').system('true')",
  "exit()",
  "().__class__",
  "lambda: 0",
  "[x for x in [1]]",
  "open('/etc/passwd')",
  "9**9**9**9",
  "9^9^9^9",
  "2^99999999999999999999",
  "(9^99)^99",
  "0^-1",
  "2^(1/2)",
  "1/0",
  "1/(2-2)",
  "(" * 10_000 + "1" + ")" * 10_000,
  "(" * 300 + "1",
  "-" * 390 + "1",
  "1" * 10_000,
  "9" * 31,
  "9999999*" * 48 + "9",
  "1+",
  "*1",
  "1 2",
  "(1",
  "1)",
  "()",
  "[2*3)*4",
  "(2*3]*4",
  "([2*3)]*4",
  "2*3]*4",
  "[]",
  "{2*3}*4",
  "1..2",
  "1.",
  "1,000",
  "1e5",
  "0x10",
  "1_000",
  "１",
  "∞",
  "nan",
  "1;2",
  "1//2",
  "1\x00",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("powers", [False, True])
def test_hostile_expressions_are_refused_at_once(text, powers):
  start = time.process_time()
  if powers or "^" not in text:
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own message)
      evaluate(text, powers)
  task = tasks.Countdown()
  assert task.reward(task.prompt(0, PUZZLE), f"<answer>{text}</answer>", STOP) == 0.0
  assert time.process_time() - start < 0.5


@st.composite
def expressions(draw, depth=3):
  """A random expression with its value (None after a division by zero) and its numbers, computed beside the parser."""
  if depth == 0 or draw(st.integers(0, 3)) == 0:
    number = draw(st.integers(0, 30))
    return str(number), Fraction(number), [number]
  left, a, used = draw(expressions(depth=depth - 1))
  right, b, also = draw(expressions(depth=depth - 1))
  operator = draw(st.sampled_from("+-*/"))
  value = None if a is None or b is None or (operator == "/" and not b) else OPERATIONS[operator](a, b)
  return f"({left}) {operator} ({right})", value, used + also


@settings(deadline=None, max_examples=300)
@given(expressions())
def test_evaluate_agrees_with_the_tree_it_was_written_from(expression):
  text, value, used = expression
  if value is None:
    with pytest.raises(ValueError, match="division by zero"):
      evaluate(text)
  else:
    assert evaluate(text) == (value, used)


@settings(deadline=None, max_examples=300)
@given(text=st.one_of(st.text(max_size=450), st.text("0123456789+-*/^()[] .", max_size=450)), powers=st.booleans())
def test_evaluate_survives_any_text(text, powers):
  try:
    value, used = evaluate(text, powers)
  except ValueError:
    return
  assert used
  assert value.numerator.bit_length() <= 1024


def test_show():
  for value, text in [
    ("5/4", "1.25"),
    ("-5/4", "-1.25"),
    ("2/3", "0.6666666667"),
    ("-6", "-6"),
    ("1/1024", "0.0009765625"),
  ]:
    assert show(Fraction(value)) == text
  assert show(Fraction(1, 3**600)).endswith("e-287")


@pytest.fixture(scope="module")
def solvable():
  return Puzzle((5, 3, 10, 2), 44, (10, (("*", 5, False), ("-", 3, False), ("-", 3, False))))


@pytest.mark.parametrize(
  ("text", "reward"),
  [
    ("<answer>5 * 10 - 3 * 2</answer>", 1.0),
    ("thinking 1 + 1 ... <answer>(5*10)-(3*2)</answer> done", 1.0),
    ("<answer>[5*10]-(3*2)</answer>", 1.0),
    ("<answer>[5*10)-(3*2]</answer>", 0.0),
    ("<answer>[5*10)-3*2</answer>", 0.0),
    ("<answer>５*10-3*2</answer>", 0.0),
    ("<answer>1</answer> no: <answer>10 × 5 − 2 × 3</answer>", 1.0),
    ("<answer>5 * 10 - 3 * 2", 0.0),
    ("5 * 10 - 3 * 2", 0.0),
    ("<answer>5 * 10 - 3 - 3</answer>", 0.1),  # 3 reused, 2 missing
    ("<answer>5 * 10 - 6</answer>", 0.1),  # a number that was not given
    ("<answer>44</answer>", 0.1),
    ("<answer>5 * 10 - 3 * 2 + 2 - 2</answer>", 0.1),
    ("<answer>5 * 10 - 3 + 2</answer>", 0.1),  # wrong value
    ("<answer>5 * 10 - 3 * 2 = 44</answer>", 0.0),  # not an expression
    ("<answer>51 0 - 3 * 2</answer>", 0.0),
    ("<answer></answer>", 0.0),
    ("</answer><answer>", 0.0),
  ],
)
def test_countdown_verdicts(solvable, text, reward):
  task = tasks.Countdown(format_reward=0.1)
  assert task.reward(task.prompt(0, solvable), text, LENGTH) == reward


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_countdown_has_no_false_positive(data):
  text, value, used = data.draw(expressions())
  numbers = data.draw(st.permutations(used)) if data.draw(st.booleans()) else data.draw(st.lists(st.integers(1, 30)))
  target = int(value) if value is not None and data.draw(st.booleans()) else data.draw(st.integers(1, 30))
  task = tasks.Countdown()
  puzzle = Puzzle(tuple(numbers), target, (0, ()))
  expected = value is not None and value == target and sorted(used) == sorted(numbers)
  assert task.reward(task.prompt(0, puzzle), f"<answer>{text}</answer>", STOP) == float(expected)


@pytest.mark.parametrize("kind", [tasks.Countdown, tasks.CountdownSteps])
def test_data_sets(tmp_path_factory, kind):
  task = kind(numbers=4, train=300, test=100, data_dir=str(tmp_path_factory.getbasetemp() / "countdown"))
  train, test = task.prompts("train"), task.prompts("test")
  assert (len(train), len(test)) == (300, 100)
  keys = {(*sorted(p.answer.numbers), p.answer.target) for split in (train, test) for p in split}
  assert len(keys) == 400
  rng = np.random.default_rng(0)
  assert all(task.reward(p, task.solution(p, rng), STOP) == 1.0 for split in (train, test) for p in split)
  assert {operator for p in train for operator, _, _ in p.answer.chain[1]} == set("+-*/")
  assert all(max(p.answer.numbers) <= task.largest_number and p.answer.target <= task.largest_value for p in train)
  assert len({task.solution(train[0], rng) for _ in range(50)}) > 1 or not set("+*") & set(str(train[0].answer.chain))


def test_steps_have_a_closed_vocabulary_and_the_stated_length(tmp_path_factory):
  task = tasks.CountdownSteps(
    numbers=4, train=300, test=100, data_dir=str(tmp_path_factory.getbasetemp() / "countdown")
  )
  rng = np.random.default_rng(0)
  for prompt in task.prompts("test"):
    solution = task.solution(prompt, rng)
    assert len(solution.split()) + 1 == 18  # and the end token
    assert set(prompt.text.split()) | set(solution.split()) <= set(task.corpus.split())


STEPS = [
  ("7 * 12 = 84 ; 84 - 20 = 64 ; 64 + 3 = 67", STOP, 1.0),
  ("12 * 7 = 84 ; 20 - 3 = 17 ; 84 - 17 = 67", STOP, 1.0),  # any tree of steps, not only a chain
  ("7 * 12 = 84 ; 84 - 20 = 64 ; 64 + 3 = 67", LENGTH, 0.0),
  ("7 * 12 = 84 ; 84 - 20 = 64 ; 64 + 3 = 68", STOP, 0.0),
  ("7 * 12 = 83 ; 83 - 20 = 63 ; 64 + 3 = 67", STOP, 0.0),
  ("7 * 12 = 84 ; 84 - 20 = 64", STOP, 0.0),
  ("20 * 3 = 60 ; 60 + 7 = 67", STOP, 0.0),  # one number is missing
  ("7 * 12 = 84 ; 84 - 20 = 64 ; 64 + 3 = 67 ; 67 + 0 = 67", STOP, 0.0),
  ("7 + 7 = 14 ; 12 + 20 = 32 ; 64 + 3 = 67", STOP, 0.0),  # reused
  ("64 + 3 = 67 ; 64 + 3 = 67 ; 64 + 3 = 67", STOP, 0.0),
  ("7 * 12 = 84 ; 84 - 20 = 64 ; 64 + 3 = 67 ;", STOP, 0.0),
  ("20 / 3 = 6 ; 7 * 12 = 84 ; 84 - 17 = 67", STOP, 0.0),  # not exact
  ("20 / 0 = 0 ; 7 * 12 = 84 ; 84 - 17 = 67", STOP, 0.0),
  ("99999999999 - 1 = 2 ; 1 + 1 = 2 ; 64 + 3 = 67", STOP, 0.0),
  ("", STOP, 0.0),
  (" ; " * 10_000, STOP, 0.0),
]


@pytest.mark.parametrize(("text", "finish", "reward"), STEPS)
def test_steps_verdicts(text, finish, reward):
  task = tasks.CountdownSteps(numbers=4)
  assert task.reward(task.prompt(0, Puzzle((3, 7, 12, 20), 67, (0, ()))), text, finish) == reward


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_steps_have_no_false_positive(data):
  """A solution with one word exchanged is rewarded only if a plain replay of its steps ends at the target."""
  task = tasks.CountdownSteps(numbers=4)
  words = ["7", "*", "12", "=", "84", ";", "84", "-", "20", "=", "64", ";", "64", "+", "3", "=", "67"]
  for _ in range(data.draw(st.integers(1, 2))):
    words[data.draw(st.integers(0, len(words) - 1))] = data.draw(st.sampled_from(task.corpus.split()))
  reward = task.reward(task.prompt(0, Puzzle((3, 7, 12, 20), 67, (0, ()))), " ".join(words), STOP)
  assert reward == float(_replay(" ".join(words), [3, 7, 12, 20], 67))


def _replay(text, left, target):
  value = None
  for step in text.split(" ; "):
    try:
      first, operator, second, equals, value = step.split()
      left.remove(int(first))
      left.remove(int(second))
      exact = OPERATIONS[operator](Fraction(first), Fraction(second)) == int(value)
    except (ValueError, KeyError, ZeroDivisionError):
      return False
    if not exact or equals != "=":
      return False
    left.append(int(value))
  return left == [target]


@pytest.mark.parametrize(
  "options", [{"numbers": 1}, {"numbers": 7}, {"largest_number": 5}, {"largest_value": 50}, {"test": 0}, {"numbers": 2}]
)
def test_bad_options(options):
  with pytest.raises(ValueError, match=r"must be .* got"):
    tasks.Countdown(**options)


def test_the_defaults_of_the_small_form():
  words = tasks.CountdownSteps().corpus.split()
  assert words == [*map(str, range(100)), *"+-*/", "=", ";", ":"]
  assert tasks.CountdownSteps().largest_number == 20


def test_bounds_are_inclusive():
  """100 pairs of numbers up to 10 allow 12 puzzles."""
  small = dict(numbers=2, largest_number=10, largest_value=10)
  tasks.Countdown(**small, train=11, test=1)
  with pytest.raises(ValueError, match="together at most 12 .* got train=11, test=2"):
    tasks.Countdown(**small, train=11, test=2)
  for numbers in (2, 6):
    assert tasks.Countdown(numbers=numbers, train=1, test=1).numbers == numbers
  assert tasks.Countdown(largest_number=99, largest_value=99).largest_value == 99
  assert tasks.Countdown(largest_value=9999).largest_value == 9999


def test_values_on_the_way_use_the_whole_range_and_no_more(tmp_path):
  task = tasks.CountdownSteps(numbers=3, largest_number=12, largest_value=12, train=120, test=8, data_dir=str(tmp_path))
  rng, values = np.random.default_rng(0), set()
  for prompt in task.prompts("train"):
    values |= {int(step.split(" = ")[1]) for step in task.solution(prompt, rng).split(" ; ")}
  assert (min(values), max(values)) == (1, 12)
