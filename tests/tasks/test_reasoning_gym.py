"""The adapter of reasoning-gym: all generators, and verifiers that evaluate answers."""

import ast
import inspect
import textwrap

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl import tasks
from async_rl.tasks import _reasoning_gym
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Prompt

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
DATASETS = reasoning_gym.factory.DATASETS
GENERATORS = sorted(set(DATASETS) - {"composite"})  # it combines others and needs to be told which


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a library leaves its data file open
@pytest.mark.parametrize("generator", GENERATORS)
def test_every_generator(generator):
  task = tasks.ReasoningGym(generator, train=4, test=2)
  train, test = task.prompts("train"), task.prompts("test")
  assert (len(train), len(test)) == (4, 2)
  prompt = train[3]
  assert prompt == task.prompts("train")[3]
  assert prompt.id == 3
  assert task.reward(prompt, "no answer", STOP) == 0.0
  oracle = prompt.answer["answer"]
  for answer in ("no idea", "nan", "inf", "[]", "1e999", ""):
    assert 0.0 <= task.reward(prompt, f"<answer>{answer}</answer>", STOP) < 0.99
  if oracle is not None:  # some verifiers need none
    assert task.reward(prompt, f"So: <answer>{oracle}</answer>", STOP) == 1.0


def test_splits_come_from_different_seeds():
  task = tasks.ReasoningGym("chain_sum", train=20, test=20, options={"min_digits": 4, "max_digits": 4})
  train, test = ([p.answer["question"] for p in task.prompts(split)] for split in ("train", "test"))
  assert not set(train) & set(test)
  shifted = tasks.ReasoningGym("chain_sum", train=20, seed=20, options=task.options)
  assert [p.answer["question"] for p in shifted.prompts("train")] == test


def test_whole_answers_and_plain_prompts():
  task = tasks.ReasoningGym("chain_sum", answer="whole", chat=False)
  prompt = task.prompts("train")[0]
  assert prompt.text == prompt.answer["question"] + "\n"
  assert task.reward(prompt, prompt.answer["answer"], STOP) == 1.0
  assert task.reward(prompt, prompt.answer["answer"], LENGTH) == 0.0
  tagged = tasks.ReasoningGym("chain_sum").prompts("train")[0].text
  assert tagged[0]["content"].endswith("Give your final answer between <answer> and </answer>.")


def _evaluates(dataset):
  """Whether the verifier of a data set calls something that evaluates text, in its own source."""
  calls = {"eval", "exec", "parse_expr", "sympify"}
  tree = ast.parse(textwrap.dedent(inspect.getsource(dataset.score_answer)))
  called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  names = [getattr(node.func, "id", getattr(node.func, "attr", None)) for node in called]
  return any(name in calls and "entry" not in ast.unparse(node) for name, node in zip(names, called))


def test_every_verifier_that_evaluates_answers_is_guarded():
  dangerous = {name for name, (dataset, _) in DATASETS.items() if _evaluates(dataset)}
  assert dangerous >= {"countdown", "n_queens"}, "the check finds what is known to evaluate"
  # logic has a parser of its own, which only shares the name
  assert dangerous - {"propositional_logic"} <= set(_reasoning_gym._GUARDS)


ATTACKS = [
  "__import__('pathlib').Path('attacked').touch()",
  "[__import__('pathlib').Path('attacked').touch()]",
  "open('attacked', 'w')",
  "(lambda: open('attacked', 'w'))()",
  "print",
  "exit()",
  "x.__class__.__init__.__globals__",
  "sympify('open(1)')",
  "S('1')",
  "N(pi, 9999999)",
  "9**9**9**9",
  "x**9999999",
  "factorial(99999)",
  "[0]*9999999999",
  "[" * 5000 + "]" * 5000,
]


@pytest.mark.parametrize("generator", sorted(_reasoning_gym._GUARDS))
def test_nothing_that_a_model_writes_is_executed(generator, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  task = tasks.ReasoningGym(generator)
  prompt = task.prompts("train")[0]
  for attack in ATTACKS:
    assert task.reward(prompt, f"<answer>{attack}</answer>", STOP) < 0.5
  assert not list(tmp_path.iterdir())


def test_the_attack_works_on_the_bare_verifier(tmp_path, monkeypatch):
  """Otherwise the test above would show nothing."""
  monkeypatch.chdir(tmp_path)
  dataset = reasoning_gym.create_dataset("countdown", size=1, seed=0)
  dataset.score_answer(ATTACKS[0], dataset[0])
  assert (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
  ("guard", "good"),
  [
    ("_literal", "[['1', 2], [3, 4]]"),
    ("_literal", "0 1\n1 0"),
    ("_literal", "_ Q _ _"),
    ("_literal", "ABCDE"),
    ("_arithmetic", "(5 + 3) * 2"),
    ("_formula", "3*x**2/4 + exp(2*x) - log(x) + C"),
    ("_formula", "x^12 + 5*x^(-1)"),
    ("_formula", "sqrt(x)*sin(3.5*x) + asin(y)/(1 - z**(1/2))"),
    ("_formula", "-8*x**9*y - 112*x*y**2"),
  ],
)
def test_guards_let_good_answers_pass(guard, good):
  assert getattr(_reasoning_gym, guard)(good)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(_reasoning_gym._GUARDS)), st.text("0123456789+-*/^()[]xyC ,'\"._\n", max_size=30))
def test_any_answer_is_survived(generator, text):
  task = tasks.ReasoningGym(generator)
  prompt = PROMPTS.setdefault(generator, task.prompts("train")[0])
  assert 0.0 <= task.reward(prompt, f"<answer>{text}</answer>", STOP) <= 1.0


@pytest.mark.parametrize(
  ("generator", "oracle", "answer", "reward"),
  [
    ("game_of_life_halting", "False", "True", 0.0),
    ("game_of_life_halting", "False", "false", 1.0),
    ("coin_flip", "0.3125", "0", 0.0),
    ("coin_flip", "0.3125", "0.31251", 1.0),
    ("coin_flip", "0.0001", "0", 0.0),
    ("coin_flip", "0.3125", "5/16", 1.0),
    ("coin_flip", "0.3125", "one third", 0.0),
    ("complex_arithmetic", "48.0 + 36.0i", "nan", 0.0),
  ],
)
def test_verifiers_that_give_full_marks_to_wrong_answers_are_replaced(generator, oracle, answer, reward):
  prompt = Prompt(0, "?", {"question": "?", "answer": oracle, "metadata": {"result": (48.0, 36.0)}})
  assert tasks.ReasoningGym(generator).reward(prompt, f"<answer>{answer}</answer>", STOP) == reward


PROMPTS: dict[str, Prompt] = {}


def test_names_are_checked():
  with pytest.raises(ValueError, match="unknown generator 'cuontdown': did you mean 'countdown'"):
    tasks.ReasoningGym("cuontdown")
  with pytest.raises(ValueError, match="did you mean 'min_numbers'"):
    tasks.ReasoningGym("countdown", options={"min_number": 3})
  with pytest.raises(ValueError, match="did you mean 'whole'"):
    tasks.ReasoningGym("countdown", answer="hole")


def test_in_a_worker():
  task = tasks.ReasoningGym("countdown", options={"min_numbers": 3, "max_numbers": 3})
  prompt = task.prompts("test")[0]
  with tasks.RewardPool(task, workers=1) as pool:
    assert pool.submit(prompt, f"<answer>{prompt.answer['answer']}</answer>", STOP).result(timeout=120).value == 1.0
