"""Statistics of how difficult prompts are."""

from async_rl import tasks


def test_difficulty():
  difficulty = tasks.Difficulty()
  assert difficulty.report() == {"prompts": 0.0}
  difficulty.add(7, [1.0, 0.0], [10, 20])
  difficulty.add(7, [1.0, 1.0], [30, 40])
  difficulty.add(8, [0.0, 0.0], [5, 5])
  report = difficulty.report()
  assert (report["prompts"], report["reward_mean"], report["reward_min"], report["reward_max"]) == (2, 0.375, 0, 0.75)
  assert (report["length_max"], report["length_p50"]) == (25, 15)
