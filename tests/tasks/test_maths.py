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
