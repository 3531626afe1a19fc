"""A run with exact OPOB, sequence ratios and leading weights: the best combination of the lag sweep."""

import numpy as np
import optax
import pytest
from tiny import tiny

from async_rl import learning
from async_rl import recording
from async_rl import runtime
from async_rl import stabilizers

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.mark.slow
def test_the_recipe_learns_at_a_lag(tmp_path):
  """The same objects as in the example of lag_sweep.md."""
  experiment = tiny(
    run_dir=str(tmp_path / "run"),
    steps=40,
    samples=4,
    slots=16,
    optimizer=stabilizers.lead_by_momentum(
      optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-2, b1=0.97)), lag=2
    ),
    objective=learning.objective("proximal_rloo", advantages="opob", low=0.5, high=1.0),
  )
  summary = runtime.train(experiment)
  rows = [r for r in recording.read_metrics(summary.folder.metrics) if "reward/mean" in r]
  rewards = [r["reward/mean"] for r in rows]
  assert max(r["staleness/max"] for r in rows) == 2
  assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1
