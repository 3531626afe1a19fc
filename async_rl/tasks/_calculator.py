"""A multi-turn task: word problems with a calculator that the model may call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from async_rl.tasks._arithmetic import evaluate
from async_rl.tasks._arithmetic import show
from async_rl.tasks._gsm8k import GSM8K
from async_rl.tasks._task import Prompts
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Calculator:
  """The problems of GSM8K with a calculator.

  The model calls it by ending a turn with `<calc>12 * (3 + 4)</calc>`; the tool's turn is `<result>84</result>` or
  `<result>error: division by zero</result>`. A turn without a call is the last one and is judged like a solution of
  the problem; so is the turn after `max_calls` results, even if it holds a call.

  Attributes:
    problems: the task that asks and judges.
    max_calls: the maximum number of results in one conversation.
  """

  problems: GSM8K = dataclasses.field(default_factory=lambda: GSM8K(answer="marked"))
  max_calls: int = 4

  def __post_init__(self):
    if self.max_calls < 1:
      raise ValueError(f"max_calls must be >= 1, got max_calls={self.max_calls}")

  @property
  def name(self) -> str:
    return "calculator"

  def prompts(self, split: str) -> Sequence[Prompt]:
    return Prompts(self.problems.prompts(split), lambda i, prompt: self.prompt(prompt))

  def prompt(self, problem: Prompt) -> Prompt:
    """Adds the explanation of the calculator to a problem."""
    explanation = (
      "You have a calculator: end your turn with, for example, <calc>12 * (3 + 4)</calc>, and you will be given the "
      f"result. You can use it {self.max_calls} times."
    )
    if isinstance(problem.text, str):
      return problem._replace(text=f"{problem.text}{explanation}\n")
    *before, last = problem.text
    return problem._replace(text=[*before, last | {"content": f"{last['content']}\n{explanation}"}])

  def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
    del prompt
    before, closing, after = turns[-1].rpartition("</calc>")
    _, opening, expression = before.rpartition("<calc>")
    if not (opening and closing) or after.strip() or len(turns) // 2 >= self.max_calls:
      return None
    try:
      result = show(evaluate(expression, powers=True)[0])
    except ValueError as error:
      result = f"error: {error}"
    return f"<result>{result}</result>"

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> list[str]:
    """Returns the reference solution; annotations such as `<<48/2=24>>` become calls where the calculator agrees."""
    del rng
    turns, end = [""], 0
    for annotation in re.finditer("<<([^<>]*)>>", prompt.answer):
      turns[-1] += prompt.answer[end : annotation.start()]
      end = annotation.end()
      expression, _, value = annotation[1].rpartition("=")
      call = f"{turns[-1]}<calc>{expression}</calc>"
      answer = self.respond(prompt, [*turns[:-1], call]) if _equal(expression, value) else None
      if answer is not None:
        turns[-1:] = [call, answer, ""]
    turns[-1] += prompt.answer[end:]
    return turns

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    return self.problems.reward(prompt, text, finish)

  def same_answer(self, prompt: Prompt, other: Prompt) -> bool:
    """Returns whether two solutions end in the same number."""
    return self.problems.same_answer(prompt, other)


def _equal(expression: str, value: str) -> bool:
  """Returns whether the calculator can read both, and shows the same for both."""
  try:
    return show(evaluate(expression, powers=True)[0]) == show(evaluate(value)[0])
  except ValueError:
    return False
