"""Names of tasks, the import rule, the calculator, summaries and statistics."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl import tasks
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Prompt

REQUIRED = {"reasoning_gym": {"generator": "chain_sum"}, "maths": {"folder": "."}, "summaries": {"folder": "."}}


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_every_task_is_made_by_name_and_travels_to_workers(name):
  task = tasks.make(name, **REQUIRED.get(name, {}))
  assert task.name
  assert pickle.loads(pickle.dumps(task)) == task
  assert len(pickle.dumps(task)) < 1000


def test_misspelt_names_get_the_nearest():
  with pytest.raises(ValueError, match="unknown task 'gms8k': did you mean 'gsm8k'"):
    tasks.make("gms8k")
  with pytest.raises(ValueError, match="unknown option of task 'sums' 'number': did you mean 'numbers'"):
    tasks.make("sums", number=3)
  with pytest.raises(ValueError, match="choose one of calculator, "):
    tasks.make("zzz")


def test_importing_the_tasks_is_light():
  heavy = {"jax", "flax", "tensorflow_datasets", "reasoning_gym", "sympy", "math_verify", "tokenizers", "tensorflow"}
  code = f"import sys, async_rl.tasks; print(sorted({heavy!r} & set(sys.modules)))"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# The calculator.

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


@settings(deadline=None)
@given(st.text(max_size=50), st.text("0123456789+-*/^() .", max_size=50))
def test_calculator_survives_any_turn(text, expression):
  for turn in (text, f"<calc>{text}</calc>", f"{text}<calc>{expression}</calc>"):
    result = CALCULATOR.respond(calculator_prompt(), (turn,))
    assert result is None or len(result) < 500


# Summaries.


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
  folder = tmp_path_factory.mktemp("posts")
  row = {"subreddit": "pets", "title": "My cat", "post": " She sleeps all day. ", "summary": "The cat sat down."}
  (folder / "train.jsonl").write_text(json.dumps(row))
  pair = {"prompt": "p", "chosen": "good", "rejected": "bad"}
  (folder / "test_preferences.jsonl").write_text(json.dumps(pair))
  return folder


def test_summaries(posts):
  task = tasks.Summaries(posts)
  prompt = task.prompts("train")[0]
  assert prompt.text == "SUBREDDIT: r/pets\n\nTITLE: My cat\n\nPOST: She sleeps all day.\n\nTL;DR:"
  assert task.reward(prompt, task.solution(prompt, np.random.default_rng(0)), STOP) == 1.0
  assert task.reward(prompt, "the cat SAT", STOP) == pytest.approx(6 / 7)
  assert task.reward(prompt, "the cat sat", LENGTH) == -1.0
  assert task.reward(prompt, "", STOP) == 0.0
  assert task.preferences("test") == [tasks.Preference("p", "good", "bad")]
  with pytest.raises(ValueError, match="either folder or dataset"):
    tasks.Summaries()


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_rouge_agrees_with_a_plain_recursion(a, b):
  def longest(i, j):
    if not i or not j:
      return 0
    if a[i - 1] == b[j - 1]:
      return 1 + longest(i - 1, j - 1)
    return max(longest(i - 1, j), longest(i, j - 1))

  expected = 2 * longest(len(a), len(b)) / (len(a) + len(b)) if a and b else 0.0
  assert tasks.rouge_l(" ".join(a), " ".join(b)) == pytest.approx(expected)


# Statistics.


def test_usable_prompts_are_short_enough_distinct_and_numbered_anew():
  texts = ["a b", "a b c d", "a b", [{"role": "user", "content": "a"}], "c"]
  prompts = [Prompt(i, text, i) for i, text in enumerate(texts)]
  kept, report = tasks.usable(prompts, lambda text: text.split() if isinstance(text, str) else ["a"], max_tokens=3)
  assert [(p.id, p.answer) for p in kept] == [(0, 0), (1, 3), (2, 4)]
  counts = {"kept": 3, "too_long": 1, "repeated": 1}
  assert report == counts | {f"tokens_{k}": v for k, v in tasks.quantiles([2, 1, 1]).items()}
  with pytest.raises(ValueError, match="5 of 5 are longer than 0 tokens"):
    tasks.usable([Prompt(i, str(i), 0) for i in range(5)], str.split, max_tokens=0)


def test_difficulty():
  difficulty = tasks.Difficulty()
  assert difficulty.report() == {"prompts": 0.0}
  difficulty.add(7, [1.0, 0.0], [10, 20])
  difficulty.add(7, [1.0, 1.0], [30, 40])
  difficulty.add(8, [0.0, 0.0], [5, 5])
  report = difficulty.report()
  assert (report["prompts"], report["reward_mean"], report["reward_min"], report["reward_max"]) == (2, 0.375, 0, 0.75)
  assert (report["length_max"], report["length_p50"]) == (25, 15)
