"""Names of tasks, and what importing them loads."""

import pickle
import subprocess
import sys

import pytest

from async_rl import tasks

REQUIRED = {"reasoning_gym": {"generator": "chain_sum"}, "maths": {"folder": "."}, "summaries": {"folder": "."}}


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
def test_every_task_is_made_by_name_and_travels_to_workers(name):
  if name == "reasoning_gym":
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
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
