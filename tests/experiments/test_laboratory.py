"""The laboratory: lags that change from update to update, and those of a recorded schedule."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reproductions import laboratory

SIZES = {"groups": 2, "samples": 4, "steps": 8, "probe_every": 2, "probe_prompts": 8}


@pytest.fixture(scope="module")
def lab():
  return laboratory.Laboratory(4, **SIZES)


def test_a_lag_for_every_update_is_the_lag_of_that_update(lab):
  steps = lab.toy.steps
  late = np.where(np.arange(steps) < steps // 2, 0, 3)
  runs = [laboratory.method("token_tis", lag=lag, rate=1e-2) for lag in (0, 3, [3] * steps, late)]
  curves = lab(runs)
  assert all(np.isfinite(values).all() and values.shape == (4, 4) for values in curves.values())
  fresh, stale, every, later = curves["ratio"]
  np.testing.assert_array_equal(fresh, 1.0)  # of weights to themselves
  np.testing.assert_allclose(stale, every, rtol=1e-5)
  np.testing.assert_array_equal(later[:2], 1.0)
  assert later[-1] > 1.001
  assert stale[1] > 1.001


def test_more_runs_than_the_program_has(lab):
  runs = [laboratory.method("topr", "both", seed=seed, lag=1, rate=1e-2) for seed in (0, 1, 0, 1, 0)]
  rewards = lab(runs)["norm"]
  np.testing.assert_allclose(rewards[0], rewards[4], rtol=1e-5)  # products may be summed otherwise beside other runs
  assert rewards[0].tolist() != rewards[1].tolist()


def test_a_sweep_begins_the_toy_where_the_laboratory_does(lab):
  words = laboratory.WordTraining(lab.toy, 4)
  weights, updates, accuracy = jax.jit(words.warm_start)(jax.random.key(1), words.problems, words.problems)
  np.testing.assert_allclose(weights, lab._init(jnp.array([1]))[0], rtol=1e-5, atol=1e-6)
  assert updates == lab.toy.warm_updates
  assert 1.5 / lab.toy.letters < accuracy < 0.7


def test_a_lag_above_the_longest_is_refused(lab):
  with pytest.raises(ValueError, match="must be 0 to max_lag=64, got lags of 0 to 65"):
    lab([laboratory.method("topr", lag=lag, rate=1e-2) for lag in (0, [65] * lab.toy.steps)])


def test_lags_of_a_schedule(tmp_path):
  events = [["weights", 0], ["submit", 0], ["submit", 1], ["chunk"], ["train", 0, [1]], ["weights", 1], ["submit", 2]]
  events += [["train", 1, [2, 0]]]
  path = tmp_path / "schedule.jsonl"
  path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
  assert laboratory.lags_of_schedule(path) == [[0], [0, 1]]
