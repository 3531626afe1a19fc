"""Which prompts are usable, and statistics of their difficulty."""

import pytest

from async_rl import tasks
from async_rl.types import Prompt


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
