"""Weights of the learner, whose devices may be of several processes, on devices of this one."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl.rollout._mesh import replicated
from async_rl.rollout._weight_store import WeightStore


class LocalSampler:
  """Gives a sampler the learner's weights whenever asked to, in contrast to the steady flow through a run's store.

  Attributes:
    sampler: the sampler.

  Args:
    sampler: the sampler, on devices of this process.
    learner: the learner.
  """

  def __init__(self, sampler: sampling.Sampler, learner: learning.Learner):
    self.sampler = sampler
    self._learner = learner
    self._pushes = 0

  def set_weights(self, params: models.Params, version: int) -> None:
    """Gives the sampler the learner's parameters of this version; all processes must do so together."""
    if self._learner.mesh.is_multi_process:
      self._store.publish(self._pushes, params)
      _, params = self._store.latest(at_least=self._pushes)
      self._pushes += 1
    self.sampler.set_weights(params, version)

  @functools.cached_property
  def _store(self) -> WeightStore:
    return WeightStore(self._learner.policy, self.sampler.weight_shardings, self._learner.mesh)


def copy_to_one_device(params: models.Params, mesh: Mesh) -> models.Params:
  """Returns parameters whole on a device of this process; all processes must call it together.

  Args:
    params: the parameters, on the learner mesh.
    mesh: the learner mesh, of which every device holds them whole for a moment.
  """
  whole = jax.jit(_identity, out_shardings=replicated(mesh))(params)
  return jax.tree.map(_first_shard, whole)


def _identity(params: models.Params) -> models.Params:
  return params


def _first_shard(x: jax.Array) -> jax.Array:
  return x.addressable_data(0)
