"""A run with exact OPOB, sequence ratios and leading weights: the best combination of the lag sweep."""

import dataclasses

import numpy as np
import optax
from tiny import Tiny

from async_rl import losses
from async_rl import recording
from async_rl import runtime
from async_rl import stabilizers


@dataclasses.dataclass(frozen=True)
class Recipe(Tiny):
  """Like the example in lag_sweep.md."""

  exact_norms: bool = True

  def optimizer(self):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.learning_rate, b1=0.97))
    return stabilizers.lead_by_momentum(inner, self.lag_bound)

  def loss(self, x):
    return losses.proximal_rloo(x.logprobs, x.behavior, x.advantages, x.mask, low=0.5, high=1.0)

  def advantages(self, x):
    weights = dict(log_weights=x.log_weights, squared_norms=x.squared_norms)
    return losses.opob_advantages(x.rewards, x.groups, self.groups, **weights)


def test_the_recipe_learns_at_a_lag(tmp_path):
  summary = runtime.train(Recipe(run_dir=str(tmp_path / "run"), steps=40, samples=4, slots=16, learning_rate=3e-2))
  rows = [r for r in recording.read_metrics(summary.folder.metrics) if "reward/mean" in r]
  rewards = [r["reward/mean"] for r in rows]
  assert max(r["staleness/max"] for r in rows) == 2
  assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1
