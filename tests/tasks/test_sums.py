"""The scratchpad sums and their TFDS data set."""

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


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return str(tmp_path_factory.mktemp("tfds"))


@pytest.fixture(scope="module")
def task(data_dir):
  return tasks.Sums(numbers=3, train=300, test=100, data_dir=data_dir)


def test_prompts_have_stable_ids_and_random_access(task):
  train = task.prompts("train")
  assert len(train) == 300
  assert [p.id for p in train[10:13]] == [10, 11, 12]
  assert train[7] == train[np.int64(7)] == task.prompts("train")[7]
  assert train[-1].id == 299
  assert train[7].text == "+".join(map(str, train[7].answer)) + "="
  with pytest.raises(IndexError):
    train[300]


def test_splits_share_no_problem_even_reordered(task):
  keys = [tuple(sorted(p.answer)) for split in ("train", "test") for p in task.prompts(split)]
  assert len(set(keys)) == len(keys) == 400


def test_data_is_array_record_served_without_tensorflow(task, tmp_path):
  code = (
    "import sys; from async_rl import tasks\n"
    f"task = tasks.Sums(numbers=3, train=300, test=100, data_dir={str(tmp_path)!r})\n"
    "print(task.prompts('train')[5].text)\n"
    "assert not {'tensorflow', 'jax', 'torch'} & set(sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == task.prompts("train")[5].text
  assert len(list(tmp_path.rglob("*.array_record-*"))) == 2


def test_another_process_may_write_the_data_set_once_this_one_has_looked(task, tmp_path, monkeypatch):
  import tensorflow_datasets as tfds

  mine = tasks.Sums(numbers=3, train=300, test=100, data_dir=str(tmp_path))
  is_prepared = tfds.core.DatasetBuilder.is_prepared

  def after_another(builder):
    monkeypatch.undo()
    tasks.Sums(numbers=3, train=300, test=100, data_dir=str(tmp_path)).prompts("train")
    return is_prepared(builder)

  monkeypatch.setattr(tfds.core.DatasetBuilder, "is_prepared", after_another)
  assert list(mine.prompts("train")[:5]) == list(task.prompts("train")[:5])


def test_another_process_may_write_the_data_set_while_this_one_does(task, tmp_path, monkeypatch):
  mine = tasks.Sums(numbers=3, train=300, test=100, data_dir=str(tmp_path))
  generate = tasks.Sums._generate

  def after_another(self):
    monkeypatch.undo()
    tasks.Sums(numbers=3, train=300, test=100, data_dir=str(tmp_path)).prompts("train")
    return generate(self)

  monkeypatch.setattr(tasks.Sums, "_generate", after_another)
  assert list(mine.prompts("train")[:5]) == list(task.prompts("train")[:5])


def test_another_seed_is_another_data_set(task, data_dir):
  other = tasks.Sums(numbers=3, train=300, test=100, seed=1, data_dir=data_dir)
  assert [p.text for p in other.prompts("test")] != [p.text for p in task.prompts("test")]


@pytest.mark.parametrize(("numbers", "tokens"), [(2, 11), (3, 22), (4, 33)])
def test_solution_length(numbers, tokens):
  task = tasks.Sums(numbers=numbers, train=100, test=100)
  prompt = task.prompt(0, range(10, 10 + numbers))
  solution = task.solution(prompt, np.random.default_rng(0))
  assert len(solution) + 1 == tokens  # and the end token
  assert set(prompt.text + solution) <= set(task.corpus)


def test_solutions_vary_in_order_and_all_are_right(task):
  prompt = task.prompt(0, (12, 34, 56))
  rng = np.random.default_rng(0)
  solutions = {task.solution(prompt, rng) for _ in range(100)}
  assert len(solutions) == 6
  assert "34+012=046;56+046=102" in solutions
  assert all(task.reward(prompt, s, STOP) == 1.0 for s in solutions)


VERDICTS = [
  ("34+012=046;56+046=102", STOP, 1.0),
  ("34+012=047;56+047=102", STOP, 1.0),  # only the form and the total count
  ("34+012=046;56+046=102", LENGTH, 0.0),
  ("34+012=046;56+046=103", STOP, 0.0),
  ("34+012=046;56+046=102;", STOP, 0.0),
  ("34+012=046;56+046=102\n", STOP, 0.0),
  ("34+12=46;56+46=102", STOP, 0.0),
  ("56+046=102", STOP, 0.0),
  ("102", STOP, 0.0),
  ("", STOP, 0.0),
  ("३४+012=046;56+046=102", STOP, 0.0),  # digits of another script
]


@pytest.mark.parametrize(("text", "finish", "reward"), VERDICTS)
def test_verdicts(task, text, finish, reward):
  assert task.reward(Prompt(0, "12+34+56=", (12, 34, 56)), text, finish) == reward


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("0123456789+=;", min_size=15, max_size=23)))
def test_no_false_positive(text):
  task = tasks.Sums(numbers=3)
  reward = task.reward(Prompt(0, "12+34+56=", (12, 34, 56)), text, STOP)
  assert reward == float(len(text) == 21 and text.endswith("=102") and text[2] + text[6] + text[10] == "+=;")


@pytest.mark.parametrize("options", [{"numbers": 1}, {"numbers": 11}, {"numbers": 2, "train": 2000}, {"test": 0}])
def test_bad_options(options):
  with pytest.raises(ValueError, match=r"must be .* got"):
    tasks.Sums(**options)
