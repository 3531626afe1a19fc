"""Runs of PPO with a value head: they learn, resume bit for bit, and leave the head out of all that is not training."""

import functools

import jax
import numpy as np
import pytest
from runtime_helpers import assert_identical
from runtime_helpers import killed_at
from runtime_helpers import params_of
from runtime_helpers import rows
from runtime_helpers import stage_inputs
from tiny import tiny

from async_rl import learning
from async_rl import recording
from async_rl import runtime

pytestmark = pytest.mark.usefixtures("two_devices")

PPO = learning.objective("ppo_clip", advantages="gae", aggregate="token_mean")


@pytest.fixture(scope="module")
def make(tmp_path_factory):
  """Makes experiments at a lag of two; the names of their folders tell them apart."""
  options = dict(steps=24, learning_rate=3e-2, objective=PPO)
  folder = tmp_path_factory.mktemp("runs")
  return lambda name, **given: tiny(run_dir=str(folder / name), **options | given)


@pytest.fixture(scope="module")
def whole(make, two_devices):
  """The run that is not interrupted."""
  experiment = make("whole")
  summary = runtime.train(experiment)
  return summary, params_of(summary, experiment)[0]


def test_it_learns_at_a_lag_and_so_do_the_values(whole):
  found = rows(whole[0])
  reward, value, loss = ([r[name] for r in found] for name in ("reward/mean", "value/mean", "value/loss"))
  assert max(r["staleness/max"] for r in found) == 2
  assert np.mean(reward[-8:]) > np.mean(reward[:8]) + 0.1
  assert np.mean(loss[-8:]) < np.mean(loss[:8]) / 2
  assert value[0] == 0.0
  assert np.mean(value[-8:]) == pytest.approx(np.mean(reward[-8:]), abs=0.1)


def test_killed_and_resumed_is_as_if_nothing_had_happened(make, whole):
  again = functools.partial(make, "killed", checkpoint_every=2)
  with killed_at(5):
    runtime.train(again())
  never = lambda stage: pytest.fail("the folder has all that it needs")
  experiment = again(start=never)
  state, _ = params_of(runtime.train(experiment), experiment)
  assert state.critic is not None
  assert_identical(state, whole[1])


def test_other_runs_start_from_its_policy_without_the_head(make, whole):
  """With a value head of their own, which is new, or with another objective."""
  source = str(whole[0].folder.path)
  for name, given in (("critic", {}), ("none", {"objective": learning.objective("reinforce", advantages="reinforce")})):
    experiment = make(name, init_from=source, steps=1, **given)
    with stage_inputs(experiment) as stage:
      state = stage.learner.init(jax.random.key(0), experiment.first_stage(stage))
    assert_identical(jax.device_get(state.params), whole[1].params)
    assert (state.critic is None) == (name == "none")
    assert not any(x.any() for x in jax.tree.leaves(state.critic))


def test_a_checkpoint_without_the_head_is_refused(make, whole):
  with pytest.raises(recording.CheckpointError, match="of another model or optimizer .*value_head"):
    params_of(whole[0], make("whole", objective=learning.objective("reinforce", advantages="reinforce")))
