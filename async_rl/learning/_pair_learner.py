"""One jitted optimizer step of a reward model over a packed batch of pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from async_rl import losses
from async_rl import models
from async_rl.learning._batch import BatchShape
from async_rl.learning._loss_scale import pull_back
from async_rl.learning._placement import PlacedModel
from async_rl.learning._placement import collect
from async_rl.learning._placement import micro_batch
from async_rl.learning._placement import to_loss_plane
from async_rl.types import Batch
from async_rl.types import TrainState

Array = jax.Array


class PairLearner(PlacedModel):
  """Trains a reward model on groups of two texts of which the one with the higher reward is preferred.

  The loss is -log sigmoid(value of the preferred text - value of the other), averaged over the pairs. The value of a
  text is that of the one token in its mask, normally the last. All texts are valued first: the gradient is then a known
  coefficient of each text times the gradient of its value, so the two of a pair may be in different micro-batches.

  Args:
    model: the reward model.
    optimizer: an optax transformation.
    shape: the static batch shape.
    mesh: the learner mesh, with axes ("data", "fsdp", "tensor").

  Raises:
    ValueError: if the mesh does not divide the rows of a micro-batch.

  References:
    Bradley and Terry, Rank Analysis of Incomplete Block Designs, 1952
  """

  def __init__(self, model: models.RewardModel, optimizer: optax.GradientTransformation, shape: BatchShape, mesh: Mesh):
    model = model.with_mesh(mesh)
    super().__init__(model, optimizer, shape, mesh)
    self._values = model.values
    self._dtype = model.policy.dtype
    self._step = jax.jit(self._train, donate_argnums=0, out_shardings=(self.state_shardings, self._replicated))

  def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step; `state` is donated. The metrics stay on the device, float32 [] each.

    They are `loss`, `accuracy` (the share of the pairs whose preferred text has the higher value), `grad/norm`,
    `update/norm` and `update/skipped`.
    """
    return self._step(state, batch)

  def _train(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    zeros = jnp.zeros(batch.mask.shape, jnp.float32)
    values = jnp.sum(
      collect(lambda *rows, scored: self._values(state.params, *rows), batch, zeros, self._planes), axis=1
    )
    pairs = losses.preference_pairs(batch.rewards, batch.groups, batch.rewards.shape[0])
    count = jnp.sum(pairs.valid, dtype=jnp.float32)

    def mean_loss(values):
      per_pair = jax.nn.softplus(values[pairs.worst] - values[pairs.best])
      return losses.divide_or_zero(jnp.sum(jnp.where(pairs.valid, per_pair, 0.0)), count)

    loss, coefficients = jax.value_and_grad(mean_loss)(values)
    state, applied = self._apply(state, self._gradient(state.params, batch, coefficients))
    right = jnp.sum(pairs.valid & (values[pairs.best] > values[pairs.worst]), dtype=jnp.float32)
    return state, {"loss": loss, "accuracy": losses.divide_or_zero(right, count), **applied}

  def _gradient(self, params: models.Params, batch: Batch, coefficients: Array) -> models.Params:
    """Sum over the texts of coefficient times the gradient of the value."""
    trainable, frozen = models.split_trainable(params)

    def body(m, total):
      rows, mask = micro_batch(batch, m)

      def values_of(trainable):
        return to_loss_plane(self._values({**frozen, **trainable}, *rows), batch)

      _, pull = jax.vjp(values_of, trainable)
      (g,) = pull_back(pull, jnp.where(mask, coefficients[:, None], 0.0), self._dtype)
      return jax.tree.map(jnp.add, total, g)

    return jax.lax.fori_loop(0, batch.used, body, jax.tree.map(jnp.zeros_like, trainable))
