"""What tests of whole runs share."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from async_rl import recording
from async_rl import runtime
from async_rl import tasks
from async_rl.runtime import _session


def params_of(summary, experiment):
  """The final state and the host's, read back from the checkpoint."""
  return restore(summary.folder.checkpoints, experiment)


def restore(folder, experiment):
  """The state and the host's part of the newest checkpoint in a folder."""
  learner = experiment.make_learner(experiment.make_meshes().learner)
  with contextlib.closing(experiment.make_checkpointer(folder)) as checkpoints:
    state, (host,) = checkpoints.restore(learner.abstract())
  return jax.device_get(state), host


def with_options(experiment, **values):
  """The experiment with some options replaced by name."""
  return dataclasses.replace(experiment, options=runtime.override(experiment.options, **values))


@functools.cache
def first_values(model, seed):
  """The parameters that a model draws by a seed, on the host; a program of its own for each call would take seconds."""
  return jax.device_get(jax.jit(model.init)(jax.random.key(seed)))


@contextlib.contextmanager
def stage_inputs(experiment):
  """What a stage of the experiment is given."""
  with tasks.RewardPool(experiment.task, workers=0) as rewards:
    yield experiment.make_stage_inputs(rewards)


def run(experiment):
  summary = runtime.train(experiment)
  return summary, *params_of(summary, experiment)


def rows(summary):
  """Metrics of the steps, without those of evaluations."""
  return [r for r in recording.read_metrics(summary.folder.metrics) if "reward/mean" in r]


def assert_identical(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@contextlib.contextmanager
def killed_at(version):
  """A run in here dies before the step from this version."""
  learn = _session.Session.step

  def dies(self, groups):
    if self.version == version:
      raise KeyboardInterrupt
    learn(self, groups)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_session.Session, "step", dies)
    with pytest.raises(KeyboardInterrupt):
      yield
