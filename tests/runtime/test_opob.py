"""A run with exact OPOB, sequence ratios and leading weights: the best combination of the lag sweep."""

import dataclasses

import numpy as np
import optax
from tiny import Tiny

from async_rl import learning
from async_rl import recording
from async_rl import runtime
from async_rl import stabilizers


@dataclasses.dataclass(frozen=True)
class Recipe(Tiny):
  """Like the example in lag_sweep.md."""

  def optimizer(self):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.learning_rate, b1=0.97))
    return stabilizers.lead_by_momentum(inner, self.lag_bound)

  def objective(self):
    return learning.objective("proximal_rloo", advantages="opob", low=0.5, high=1.0)


def test_the_recipe_learns_at_a_lag(tmp_path):
  summary = runtime.train(Recipe(run_dir=str(tmp_path / "run"), steps=40, samples=4, slots=16, learning_rate=3e-2))
  rows = [r for r in recording.read_metrics(summary.folder.metrics) if "reward/mean" in r]
  rewards = [r["reward/mean"] for r in rows]
  assert max(r["staleness/max"] for r in rows) == 2
  assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1
