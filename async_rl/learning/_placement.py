"""Where a learner keeps things: the training state and the batches of a model on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models
from async_rl._validation import check_multiple
from async_rl.learning._batch import BatchShape
from async_rl.types import Batch
from async_rl.types import TrainState

Array = jax.Array


class PlacedModel:
  """A model on a learner mesh with its optimizer; the base of the learners.

  With adapters (`Policy.lora`) gradient, optimizer state and norms are of the adapters alone, and so is all that
  stabilizers see; the other parameters pass through untouched.

  Attributes:
    policy: the model, on the mesh.
    optimizer: the optimizer, which takes any extra arguments.
    shape: the static batch shape.
    mesh: the learner mesh.
    batch_shardings: the shardings of a batch: rows over (data, fsdp), the loss plane on every device.
    state_shardings: the shardings of the training state.

  Args:
    policy: the model.
    optimizer: an optax transformation, stabilizers included.
    shape: the static batch shape.
    mesh: the learner mesh, with axes ("data", "fsdp", "tensor").

  Raises:
    ValueError: if the mesh does not divide the rows of a micro-batch.
  """

  def __init__(self, policy: models.Policy, optimizer: optax.GradientTransformation, shape: BatchShape, mesh: Mesh):
    self.policy = dataclasses.replace(policy, mesh=mesh)
    self.optimizer = optax.with_extra_args_support(optimizer)
    self.shape = shape
    self.mesh = mesh
    self._row_devices = models.row_parts(mesh)
    check_multiple("rows", shape.rows, self._row_devices, "the learner mesh's data times fsdp")
    self._replicated: Any = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec(None, models.ROWS))
    self.batch_shardings = Batch(by_row, by_row, by_row, *[self._replicated] * (len(Batch._fields) - 3))
    self.state_shardings = self._shardings()
    self._init = jax.jit(lambda key: self._fresh(self.policy.init(key)), out_shardings=self.state_shardings)
    self._init_from = jax.jit(self._completed, out_shardings=self.state_shardings)

  def _shardings(self) -> TrainState:
    """Parameters by the rules; whatever mirrors them in the optimizer's state likewise; the rest replicated."""
    params = self.policy.abstract()
    param_shardings = models.param_shardings(params, self.mesh)
    opt_state = optax.tree_map_params(
      self.optimizer,
      lambda _, sharding: sharding,
      jax.eval_shape(self.optimizer.init, models.split_trainable(params)[0]),
      models.split_trainable(param_shardings)[0],
      transform_non_params=lambda _: self._replicated,
    )
    return TrainState(param_shardings, opt_state, self._replicated)

  def init(self, key: Array, params: models.Params | None = None) -> TrainState:
    """A fresh state, made on the mesh in its shardings.

    Args:
      key: of what is random: all parameters, or the adapters that `params` lack.
      params: to start from, in any dtype and on any devices; they are copied.
    """
    if params is None:
      return self._init(key)
    shardings = self.state_shardings.params
    placed = jax.device_put(params, {part: s for part, s in shardings.items() if part != "adapters" or part in params})
    return self._init_from(key, placed)

  def _completed(self, key: Array, params: models.Params) -> TrainState:
    """Returns a fresh state of parameters, with new adapters where these are missing, in the dtypes of the policy."""
    if self.policy.lora is not None and "adapters" not in params:
      params = params | {"adapters": models.init_adapters(self.policy.lora, params, key)}
    return self._fresh(jax.tree.map(lambda x, like: x.astype(like.dtype), params, self.policy.abstract()))

  def abstract(self) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda key: self._fresh(self.policy.init(key)), jax.random.key(0))
    return models.with_shardings(shapes, self.state_shardings)

  def _fresh(self, params: models.Params) -> TrainState:
    return TrainState(params, self.optimizer.init(models.split_trainable(params)[0]), jnp.zeros([], jnp.int32))

  def put(self, batch: Batch) -> Batch:
    """The batch on the learner mesh: rows split over (data, fsdp), the loss plane on every device."""
    if not self.mesh.is_multi_process:
      return jax.device_put(batch, self.batch_shardings)
    # Every process has the same batch; `device_put` would compare them all over the network.
    return jax.tree.map(_place_shards, batch, self.batch_shardings)

  def _apply(self, state: TrainState, grads: models.Params, **extra_args: Any) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after a step along `grads`, the same parameters if that is not finite, and its metrics."""
    trainable, frozen = models.split_trainable(state.params)
    updates, opt_state = self.optimizer.update(grads, state.opt_state, trainable, **extra_args)
    grad_norm, update_norm = optax.tree.norm(grads), optax.tree.norm(updates)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    new = (optax.apply_updates(trainable, updates), opt_state)
    old = (trainable, state.opt_state)
    trainable, opt_state = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
    metrics = {
      "grad/norm": grad_norm,
      "update/norm": jnp.where(finite, update_norm, 0.0),
      "update/skipped": jnp.where(finite, 0.0, 1.0),
    }
    return TrainState({**frozen, **trainable}, opt_state, optax.safe_increment(state.version)), metrics


def _place_shards(array: np.ndarray, sharding: NamedSharding) -> Array:
  """Places the shards of the local devices."""
  return jax.make_array_from_callback(np.shape(array), sharding, lambda index: array[index])


def micro_batch(batch: Batch, m: Array) -> tuple[tuple[Array, Array, Array], Array]:
  """Returns the rows of micro-batch `m` (tokens, segments, positions) and the loss-plane mask of its tokens."""
  rows = [jax.lax.dynamic_index_in_dim(x, m, keepdims=False) for x in (batch.tokens, batch.segments, batch.positions)]
  return (rows[0], rows[1], rows[2]), batch.mask & (batch.micro == m)[:, None]


def to_loss_plane(values: Array, batch: Batch) -> Array:
  """Returns [R, T] of one micro-batch as [B, C]; entries of other micro-batches' sequences are meaningless."""
  return jnp.take(values.reshape(-1), batch.index)


def collect(score: Callable[..., Any], batch: Batch, start: Any) -> Any:
  """Returns the per-token results of all micro-batches in the loss plane.

  Args:
    score: (tokens, segments, positions), int32 [R, T] each, to a tree of [R, T].
    batch: the batch.
    start: a tree of the same structure, [B, C] each: the entries of tokens that are not trained.
  """

  def body(m, collected):
    rows, mask = micro_batch(batch, m)
    return jax.tree.map(lambda old, x: jnp.where(mask, to_loss_plane(x, batch), old), collected, score(*rows))

  return jax.lax.fori_loop(0, batch.used, body, start)
