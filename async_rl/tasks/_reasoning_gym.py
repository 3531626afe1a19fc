"""Every generator of reasoning-gym as a task (Stojanovski et al., REASONING GYM, 2025, arXiv 2505.24760)."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pickle
import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from async_rl.tasks._arithmetic import evaluate
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._task import question
from async_rl.types import STOP
from async_rl.types import Prompt

#: Answers longer than this are wrong unread.
MAX_ANSWER_CHARS = 10_000


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
  """The problems of one generator, judged by its own verifier (0 to 1, with partial credit where it gives some).

  Problems are made when they are read, from (seed, index). Train and test use different seeds of the generator; a
  generator with few possible problems can still repeat itself.

  Some verifiers of reasoning-gym hand the answer to Python's `eval`, directly or through SymPy. Their answers are
  checked first (see `_GUARDS`), so that nothing a model writes is ever executed. Two give full marks to wrong answers
  and are replaced (see `_REPLACED`).

  Attributes:
    generator: the name of a generator of `reasoning_gym`, such as "countdown".
    options: the options of the generator.
    train: the number of problems in the training split.
    test: the number of problems in the test split.
    seed: the seed of the generator.
    answer: the place of a completion's answer: "tagged" takes the last `<answer>...</answer>`; "whole" takes the whole
      completion, which must have ended.
    instruction: the text that follows the question; None says how to tag the answer, if it is to be tagged.
    chat: whether prompts are conversations, for instruct models, or plain text.
  """

  generator: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  train: int = 8192
  test: int = 512
  seed: int = 0
  answer: str = "tagged"
  instruction: str | None = None
  chat: bool = True

  def __post_init__(self):
    try:
      from reasoning_gym.factory import DATASETS
    except ImportError as e:
      raise ImportError("This task needs the package reasoning-gym: `pip install reasoning-gym`.") from e

    known("answer", self.answer, ("tagged", "whole"))
    config = DATASETS[known("generator", self.generator, DATASETS)][1]
    names = {field.name for field in dataclasses.fields(config)} - {"seed", "size"}
    for option in self.options:
      known(f"option of generator {self.generator!r}", option, names)

  @property
  def name(self) -> str:
    return self.generator

  def warm_up(self) -> None:
    self._verifier()

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, ("train", "test"))
    import reasoning_gym

    # The generators draw item i from seed + i: the ranges of the two splits must not overlap.
    first, size = (0, self.train) if split == "train" else (self.train, self.test)
    entries = reasoning_gym.create_dataset(self.generator, **self.options, seed=self.seed + first, size=size)
    return Prompts(entries, self.prompt)

  def prompt(self, id: int, entry: dict[str, Any]) -> Prompt:
    """Returns the prompt of one entry of a generator; the entry becomes the prompt's `answer`."""
    instruction = self.instruction
    if instruction is None:
      instruction = "Give your final answer between <answer> and </answer>." if self.answer == "tagged" else ""
    return question(id, entry["question"], instruction, self.chat, entry)

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    answer = _tagged(text) if self.answer == "tagged" else text if finish == STOP else None
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
      return 0.0
    if answer == prompt.answer["answer"]:
      return 1.0
    if _NOT_FINITE.search(answer) or not _GUARDS.get(self.generator, _anything)(answer):
      return 0.0
    judge = _REPLACED.get(self.generator) or self._verifier().score_answer
    try:
      return float(judge(answer, prompt.answer))
    except Exception:  # the verifiers were written for well-formed answers and raise on others
      return 0.0

  def same_answer(self, prompt: Prompt, other: Prompt) -> bool:
    """Returns True: the verifier judges by the puzzle, whose recorded answer may be one of several."""
    del prompt, other
    return True

  def _verifier(self) -> Any:
    return _verifier(self.generator, pickle.dumps(dict(self.options)))


@functools.lru_cache(maxsize=128)
def _verifier(generator: str, options: bytes) -> Any:
  """Makes a data set that only judges: judging needs the generator's options, not its problems."""
  import reasoning_gym

  return reasoning_gym.create_dataset(generator, **pickle.loads(options), seed=0, size=1)


def _tagged(text: str) -> str | None:
  before, closing, _ = text.rpartition("</answer>")
  _, opening, answer = before.rpartition("<answer>")
  return answer.strip() if opening and closing else None


#: A distance to NaN is no distance: verifiers that turn distances into rewards are fooled by it.
_NOT_FINITE = re.compile(r"\b(?:nan|inf|infinity)j?\b", re.IGNORECASE)


def _anything(answer: str) -> bool:
  del answer
  return True


def _literal(answer: str) -> bool:
  """Returns whether evaluating `answer` does nothing: it is a literal, or has no sign that could call or index."""
  if re.fullmatch(r"[A-Za-z0-9_\s,;:|-]*", answer):
    return True
  try:
    ast.literal_eval(answer)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return False
  return True


def _arithmetic(answer: str) -> bool:
  """Returns whether `answer` is an expression of numbers, + - * / and parentheses."""
  try:
    evaluate(answer)
  except ValueError:
    return False
  return True


#: The words of a formula: single letters, apart from those that SymPy gives a meaning, and elementary functions.
_WORDS = r"[a-zABCDEFGHIJKLMPRTUVWXYZ]|pi|exp|log|ln|sqrt|Abs|a?(?:sin|cos|tan|sec|csc|cot)h?"
_FORMULA = re.compile(rf"(?:\s|[-+*/^()=]|(?<![0-9.])[0-9]{{1,20}}(?:\.[0-9]{{1,20}})?(?![0-9.])|\b(?:{_WORDS})\b)*")
#: What may follow `^` or `**`: a small number, a letter, or a short parenthesis without powers, and no further power.
_EXPONENT = re.compile(
  r"\s*(?:[-+]?[0-9]{1,3}(?![0-9.])|[a-z]\b|\((?:[-+/\sa-z]|(?<![0-9])[0-9]{1,3}(?![0-9])){1,16}\))\s*(?!\*\*|\^)"
)


def _formula(answer: str) -> bool:
  """Returns whether `answer` is an elementary formula without huge powers."""
  return bool(_FORMULA.fullmatch(answer)) and all(
    _EXPONENT.match(answer, power.end()) for power in re.finditer(r"\*\*|\^", answer)
  )


#: Checks that an answer must pass before it reaches the verifiers of these generators, which evaluate it.
_GUARDS: Mapping[str, Callable[[str], bool]] = {
  "binary_matrix": _literal,
  "n_queens": _literal,
  "spiral_matrix": _literal,
  "string_insertion": _literal,
  "countdown": _arithmetic,
  "puzzle24": _arithmetic,
  "intermediate_integration": _formula,
  "polynomial_multiplication": _formula,
  "simple_integration": _formula,
}


def _same_word(answer: str, entry: Mapping[str, Any]) -> bool:
  return answer.lower() == entry["answer"].lower()


def _close_fraction(answer: str, entry: Mapping[str, Any]) -> bool:
  oracle = Fraction(entry["answer"])
  return abs(Fraction(answer) - oracle) <= min(Fraction(1, 10_000), abs(oracle) / 100)


#: Judges in place of verifiers that can be satisfied without solving the problem.
_REPLACED: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
  "game_of_life_halting": _same_word,  # compares truth values, and every text is true
  "coin_flip": _close_fraction,  # "0" begins like "0.25" and gets the full reward
}
