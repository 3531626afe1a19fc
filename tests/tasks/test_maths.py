"""Maths through math-verify."""

import json

import pytest

from async_rl import tasks
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Prompt

TASK = tasks.Maths("unused")

VERDICTS = [
  (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", 1.0),
  (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
  (r"\frac{1}{2}", r"so \boxed{1/2}.", 1.0),
  (r"\frac{1}{2}", r"\boxed{1/3} no \boxed{\dfrac12}", 1.0),
  (r"\frac{1}{2}", r"\boxed{1/3}", 0.0),
  (r"\frac{1}{2}", "1/2", 0.0),
  (r"\frac{1}{2}", r"\boxed{}", 0.0),
  (r"\frac{1}{2}", r"\boxed{1/2", 0.0),
  ("1234", r"\boxed{1{,}234}", 1.0),
  ("-5", r"\boxed{-5}", 1.0),
  ("-5", r"\boxed{5}", 0.0),
  (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
  ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
  (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
  ("(1, 2)", r"\boxed{(2, 1)}", 0.0),
  ("[0, 1)", r"\boxed{[0, 1)}", 1.0),
  ("5", r"\boxed{x = 5}", 1.0),
  ("30", r"\boxed{30^\circ}", 1.0),
  ("50", r"\boxed{50\%}", 1.0),
  ("5", r"\boxed{\text{unknown}}", 0.0),
  ("5", r"\boxed{\boxed{\boxed{", 0.0),
  # what is rational is compared exactly
  (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2004!}}", 1.0),
  (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", 0.0),
  ("1/2004!", r"\boxed{1/2006!}", 0.0),
  ("1/2004!", r"\boxed{\frac{1}{2004!}}", 1.0),
  ("2^{-99}", r"\boxed{2^{-98}}", 0.0),
  ("2^{-99}", r"\boxed{\frac{1}{2^{99}}}", 1.0),
  ("2^-99", r"\boxed{2^-98}", 0.0),
  ("2^-99", r"\boxed{2^{-99}}", 1.0),
  ("10^{-7}", r"\boxed{10^{-8}}", 0.0),
  ("10^{-7}", r"\boxed{0.0000001}", 1.0),
  ("0", r"\boxed{10^{-20}}", 0.0),
  (r"\frac{1}{3}", r"\boxed{0.333333}", 0.0),
  ("2^{1000}", r"\boxed{2^{1000}+1}", 0.0),
  ("100!", r"\boxed{100 \cdot 99!}", 1.0),
  ("100!", r"\boxed{100!+1}", 0.0),
  (r"\{2^{-98}, 1\}", r"\boxed{\{1, 2^{-98}\}}", 1.0),
  (r"\{2^{-98}, 1\}", r"\boxed{\{1, 2^{-99}\}}", 0.0),
  ("x = 2^{-98}", r"\boxed{2^{-99}}", 0.0),
  (r"\pi", r"\boxed{3.141593}", 1.0),
  (r"e^{-1000}", r"\boxed{e^{-1001}}", 0.0),
  (r"\frac{\sqrt{2}}{10^{30}}", r"\boxed{\frac{\sqrt{3}}{10^{30}}}", 0.0),
  # lists
  (r"1,3,5,\ldots,2n-1", r"\boxed{1,2,\ldots,n}", 0.0),
  ("1,2,…,n", r"\boxed{1,3,5,…,2n-1}", 0.0),
  ("1,2,…,n", r"\boxed{1, 2, \dots, n}", 1.0),
  (r"1, 3, \ldots, 2n-1", r"\boxed{1,3,...,n+n-1}", 1.0),
  (r"1, 3, \ldots, 2n-1", r"\boxed{1, 3, 2n-1}", 0.0),
  (r"1+2+\cdots+n", r"\boxed{1 + 2 + \cdots + n}", 1.0),
  (r"1+2+\cdots+n", r"\boxed{1+2+\cdots+m}", 0.0),
  ("1, 2, 3", r"\boxed{3}", 0.0),
  ("1, 2, 3", r"\boxed{1, 2}", 0.0),
  ("1, 2, 3", r"\boxed{1, 2, 3, 4}", 0.0),
  ("1, 2, 3", r"\boxed{1, 2, 3}", 1.0),
  # how numbers are written
  ("18000", r"\boxed{18 000}", 1.0),
  ("18000", r"\boxed{18_000}", 1.0),
  ("1", r"\boxed{1_00}", 0.0),
  ("0", r"\boxed{18 00}", 0.0),
  ("0", r"\boxed{18 000}", 0.0),
  ("18", r"\boxed{１８}", 1.0),
  ("-5", r"\boxed{−5}", 1.0),
  ("7/2", r"\boxed{3\frac12}", 1.0),
  ("7/2", r"\boxed{3 1/2}", 1.0),
  ("1e-20", r"\boxed{10^{-20}}", 1.0),
  ("1", r"\boxed{1e9999999}", 0.0),
  ("1/2", r"\boxed{50\%}", 1.0),
  ("50%", r"\boxed{0.5}", 1.0),
  (r"50\%", r"\boxed{50%}", 1.0),
  (r"50\%", r"\boxed{0.5\%}", 0.0),
  ("1", r"\boxed{nan}", 0.0),
  ("1", r"\boxed{\infty}", 0.0),
  ("1", r"\boxed{1/0}", 0.0),
  ("1", r"\boxed{ }", 0.0),
]


@pytest.mark.parametrize(("reference", "text", "reward"), VERDICTS)
def test_verdicts(reference, text, reward):
  prompt = Prompt(0, "?", reference)
  assert TASK.reward(prompt, text, STOP) == reward
  assert TASK.reward(prompt, text, LENGTH) == 0.0


def test_anywhere_if_asked_for():
  task = tasks.Maths("unused", answer="any")
  assert task.reward(Prompt(0, "?", "1/2"), "The answer is $0.5$.", STOP) == 1.0


def test_an_unreadable_reference_is_an_error():
  with pytest.raises(ValueError, match="cannot read the reference"):
    TASK.reward(Prompt(0, "?", ""), r"\boxed{1}", STOP)


def test_a_computation_without_end_is_cut_off():
  """Expanding this would take far longer than anyone waits."""
  prompt = Prompt(0, "?", r"(x+y+z+w)^{400}")
  hostile = r"\boxed{(x+y+z+w)^{399}(x+y+z+w+0)}"
  with tasks.RewardPool(TASK, workers=1, timeout_s=1.0) as pool:
    assert pool.submit(prompt, hostile, STOP).result(timeout=120).value in (0.0, 1.0)
    assert pool.submit(Prompt(0, "?", "1/2"), r"\boxed{0.5}", STOP).result(timeout=120).value == 1.0


def test_prompts_from_a_folder(tmp_path):
  rows = [{"question": "1+1?", "answer": 2}, {"question": "1/3?", "answer": r"\frac13"}]
  (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
  task = tasks.Maths(tmp_path, problem="question", chat=False, instruction="")
  assert list(task.prompts("train")) == [Prompt(0, "1+1?\n", "2"), Prompt(1, "1/3?\n", r"\frac13")]
  with pytest.raises(ValueError, match="problem"):
    tasks.Maths(tmp_path).prompts("train")
  (message,) = tasks.Maths(tmp_path, problem="question").prompts("train")[0].text
  assert message == {"role": "user", "content": "1+1?\nThink step by step, then give the answer in \\boxed{}."}


@pytest.mark.parametrize(
  ("answer", "message"),
  [
    ("true", "'answer' must be a text or a number, got True"),
    ('""', "'answer' must be a text that is not blank"),
    ('["1"]', "'answer' must be a text or a number"),
    ("null", r"missing: \['answer'\]"),
    ("NaN", "NaN is no JSON"),
  ],
)
def test_an_answer_of_no_use_is_refused_at_load(tmp_path, answer, message):
  (tmp_path / "train.jsonl").write_text(f'{{"problem": "a", "answer": 1}}\n{{"problem": "b", "answer": {answer}}}')
  with pytest.raises(ValueError, match=rf"train\.jsonl:2: .*{message}"):
    tasks.Maths(tmp_path).prompts("train")


def test_exact_values_are_bounded():
  """Values too large to compute are equal only if they are written alike."""
  for reference, text, reward in [("10^{10^{6}}", "10^{10^{6}}", 1.0), ("(10^6)!", "(10^6)!", 1.0)]:
    assert TASK.reward(Prompt(0, "?", reference), rf"\boxed{{{text}}}", STOP) == reward
