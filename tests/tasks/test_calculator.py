"""The calculator task."""

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl import tasks
from async_rl.types import STOP

PROBLEM = {"question": "A crate holds 12 jars. How many do 6 hold?", "answer": "6*12 = 72\n#### 72"}
CALCULATOR = tasks.Calculator(max_calls=2)


def calculator_prompt(**options):
  return tasks.Calculator(tasks.GSM8K(**options)).prompt(tasks.GSM8K(**options).prompt(0, PROBLEM))


@pytest.mark.parametrize(
  ("turn", "result"),
  [
    ("Let me see: <calc>6 * 12</calc>", "<result>72</result>"),
    ("<calc>2 ** 10 / 3</calc>\n", "<result>341.3333333</result>"),
    ("<calc>1</calc> and <calc>2 + 2</calc>", "<result>4</result>"),
    ("<calc>1 / 0</calc>", "<result>error: division by zero</result>"),
    ("<calc>9^9^9</calc>", "<result>error: the value is too large</result>"),
    ("<calc>__import__('os')</calc>", "<result>error: cannot read \"__import__('os')\"</result>"),
    ("<calc></calc>", "<result>error: the expression is incomplete</result>"),
    ("#### 72", None),
    ("<calc>6 * 12</calc> is 72. #### 72", None),
    ("<calc>6 * 12", None),
    ("6 * 12</calc>", None),
    ("", None),
  ],
)
def test_calculator_responds(turn, result):
  assert CALCULATOR.respond(calculator_prompt(), (turn,)) == result


def test_calculator_calls_are_bounded():
  call = "<calc>1 + 1</calc>"
  turns = (call,)
  for _ in range(2):
    turns = (*turns, CALCULATOR.respond(calculator_prompt(), turns), call)
  assert turns[1::2] == ("<result>2</result>",) * 2
  assert CALCULATOR.respond(calculator_prompt(), turns) is None


def test_calculator_prompt_and_reward():
  prompt = calculator_prompt()
  assert "<calc>" in prompt.text[0]["content"]
  assert PROBLEM["question"] in calculator_prompt(chat=False).text
  assert CALCULATOR.reward(prompt, "#### 72", STOP) == 1.0
  assert CALCULATOR.reward(prompt, "<calc>72</calc>", STOP) == 0.0
  with pytest.raises(ValueError, match="max_calls=0"):
    tasks.Calculator(max_calls=0)


@pytest.mark.parametrize(
  ("answer", "turns"),
  [
    ("6*12 = <<6*12=72>>72\n#### 72", ["6*12 = <calc>6*12</calc>", "<result>72</result>", "72\n#### 72"]),
    ("a third: <<1/3*100=33>>33, half: <<.5*8=4>>4\n#### 4", ["a third: 33, half: 4\n#### 4"]),
    (
      "<<1+1=2>>2 <<2*3=6.0>>6 <<6+1=7>>7\n#### 7",  # two calls at most
      ["<calc>1+1</calc>", "<result>2</result>", "2 <calc>2*3</calc>", "<result>6</result>", "6 7\n#### 7"],
    ),
    ("<<0=0>>none <<=>><<x>>\n#### 0", ["<calc>0</calc>", "<result>0</result>", "none \n#### 0"]),
  ],
)
def test_annotations_of_solutions_become_calls_where_the_calculator_agrees(answer, turns):
  prompt = CALCULATOR.prompt(tasks.GSM8K().prompt(0, PROBLEM | {"answer": answer}))
  assert CALCULATOR.solution(prompt, np.random.default_rng(0)) == turns


def test_solutions_are_what_the_calculator_answers_and_earn_the_reward():
  task = tasks.Calculator(tasks.GSM8K(pathlib.Path(__file__).parents[1] / "data" / "gsm8k", answer="marked"))
  for prompt in task.prompts("train"):
    turns = task.solution(prompt, np.random.default_rng(0))
    assert len(turns) > 1
    for i in range(1, len(turns), 2):
      assert task.respond(prompt, turns[:i]) == turns[i]
    assert task.respond(prompt, turns) is None
    assert task.reward(prompt, turns[-1], STOP) == 1.0


@settings(deadline=None)
@given(st.text(max_size=50), st.text("0123456789+-*/^() .", max_size=50))
def test_calculator_survives_any_turn(text, expression):
  for turn in (text, f"<calc>{text}</calc>", f"{text}<calc>{expression}</calc>"):
    result = CALCULATOR.respond(calculator_prompt(), (turn,))
    assert result is None or len(result) < 500
