"""Where a learner keeps things: the training state and the batches of a model on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import Protocol

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


class Model(Protocol):
  """An architecture whose parameters can be trained, such as `models.Policy`."""

  def init(self, key: Array) -> models.Params:
    """Returns random parameters."""

  def abstract(self) -> models.Params:
    """Returns the shapes and dtypes of `init`."""


class PlacedModel:
  """A model on a learner mesh with its optimizer; the base of the learners.

  With adapters (`Policy.lora`) gradient, optimizer state and norms are of the adapters alone, and so is all that
  stabilizers see; the other parameters pass through untouched. A critic is trained by the same optimizer.

  Attributes:
    optimizer: the optimizer, which takes any extra arguments.
    shape: the static batch shape.
    mesh: the learner mesh.
    batch_shardings: the shardings of a batch: rows over (data, fsdp), the loss plane on every device.
    state_shardings: the shardings of the training state.

  Args:
    model: the model, with its activations on the mesh.
    optimizer: an optax transformation, stabilizers included.
    shape: the static batch shape.
    mesh: the learner mesh, with axes ("data", "fsdp", "tensor").

  Raises:
    ValueError: if the mesh does not divide the rows of a micro-batch.
  """

  #: The learning rate of the critic, in multiples of the model's.
  _critic_rate = 1.0

  def __init__(self, model: Model, optimizer: optax.GradientTransformation, shape: BatchShape, mesh: Mesh):
    self._model = model
    self.optimizer = optax.with_extra_args_support(optimizer)
    self.shape = shape
    self.mesh = mesh
    self._row_devices = models.row_parts(mesh)
    check_multiple("rows", shape.rows, self._row_devices, "the learner mesh's data times fsdp")
    self._replicated: Any = NamedSharding(mesh, PartitionSpec())
    self._planes = LossPlanes(mesh)
    by_row = NamedSharding(mesh, PartitionSpec(None, models.ROWS))
    self.batch_shardings = Batch(by_row, by_row, by_row, *[self._replicated] * (len(Batch._fields) - 3))
    self.state_shardings = self._shardings()
    self._init = jax.jit(lambda key: self._fresh(self._model.init(key)), out_shardings=self.state_shardings)
    self._init_from = jax.jit(self._completed, out_shardings=self.state_shardings)

  def _shardings(self) -> TrainState:
    """Parameters by the rules; whatever mirrors them in the optimizer's state likewise; the rest replicated."""
    state = jax.eval_shape(self._fresh, self._model.abstract())
    params, critic = (models.param_shardings(tree, self.mesh) for tree in (state.params, state.critic))
    opt_state = optax.tree_map_params(
      self.optimizer,
      lambda _, sharding: sharding,
      state.opt_state,
      _split(params, critic)[0],
      transform_non_params=lambda _: self._replicated,
    )
    return TrainState(params, opt_state, self._replicated, critic)

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
    """Returns a fresh state of parameters in the dtypes of the model; `key` is for those that may be missing."""
    return self._fresh(jax.tree.map(lambda x, like: x.astype(like.dtype), params, self._model.abstract()))

  def abstract(self) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda key: self._fresh(self._model.init(key)), jax.random.key(0))
    return models.with_shardings(shapes, self.state_shardings)

  def _fresh(self, params: models.Params) -> TrainState:
    critic = self._new_critic()
    return TrainState(params, self.optimizer.init(_split(params, critic)[0]), jnp.zeros([], jnp.int32), critic)

  def _new_critic(self) -> models.Params | None:
    """Returns the first parameters of what is trained beside the model; none."""
    return None

  def put(self, batch: Batch) -> Batch:
    """The batch on the learner mesh: rows split over (data, fsdp), the loss plane on every device."""
    if not self.mesh.is_multi_process:
      return jax.device_put(batch, self.batch_shardings)
    # Every process has the same batch; `device_put` would compare them all over the network.
    return jax.tree.map(_place_shards, batch, self.batch_shardings)

  def _apply(self, state: TrainState, grads: models.Params, **extra_args: Any) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after a step along `grads`, the same parameters if that is not finite, and its metrics."""
    trainable, frozen = split_state(state)
    updates, opt_state = self.optimizer.update(grads, state.opt_state, trainable, **extra_args)
    updates = updates | {part: optax.tree.scale(self._critic_rate, updates[part]) for part in state.critic or {}}
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
    critic = None if state.critic is None else {part: trainable.pop(part) for part in state.critic}
    return TrainState({**frozen, **trainable}, opt_state, optax.safe_increment(state.version), critic), metrics


def all_params(state: TrainState) -> models.Params:
  """Returns the parameters of a state, or what else it has in their place, with the critic's among them."""
  return {**state.params, **(state.critic or {})}


def split_state(state: TrainState) -> tuple[models.Params, models.Params]:
  """Splits the parameters of a state, the critic's among them, into (trainable, frozen)."""
  return _split(state.params, state.critic)


def _split(params: models.Params, critic: models.Params | None) -> tuple[models.Params, models.Params]:
  trainable, frozen = models.split_trainable(params)
  return {**trainable, **(critic or {})}, frozen


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


class LossPlanes:
  """Loss planes of their own for the parts of the mesh's data axis, [P, B, C], each on its part's devices.

  The loss of a sequence needs what the rows of one part hold of it. Entered in that part's own plane, this stays there
  until the last micro-batch: between the parts, which may be TPU slices, nothing is exchanged in every micro-batch.

  Args:
    mesh: the learner mesh.
  """

  def __init__(self, mesh: Mesh):
    self._parts = mesh.shape["data"]
    self._row_devices = models.row_parts(mesh)
    self._sharding = NamedSharding(mesh, PartitionSpec("data"))

  def start(self, planes: Any) -> Any:
    """Returns a tree of zeros [P, B, C] for a tree of [B, C], and zeros [P] for scalars."""
    return jax.tree.map(lambda x: self._place(jnp.zeros((self._parts, *x.shape), x.dtype)), planes)

  def mask(self, mask: Array, batch: Batch) -> Array:
    """Splits the mask of a micro-batch, bool [B, C], by the part that has the token; bool [P, B, C]."""
    return self._place(mask[None] & (batch.index[None] // self._size(batch) == self._numbers()))

  def scored(self, mask: Array, batch: Batch) -> models.Scored:
    """Returns which tokens of a micro-batch to score for a mask of them, bool [B, C]."""
    size = batch.tokens[0].size
    index = jnp.where(mask, batch.index, size)
    needed = jnp.zeros(size, bool).at[index].set(True, mode="drop").reshape(self._row_devices, -1)
    # Counted where every device has all: not of `needed`, which is split.
    counts = jnp.zeros(self._row_devices, jnp.int32).at[index // needed.shape[1]].add(1, mode="drop")
    return models.Scored(jnp.argsort(~needed, axis=1, stable=True), jnp.max(counts))

  def enter(self, values: Array, batch: Batch) -> Array:
    """Returns [R, T] of one micro-batch as [P, B, C]; entries outside of `mask` are meaningless."""
    if self._parts == 1:
      return to_loss_plane(values, batch)[None]
    size = self._size(batch)
    index = jnp.clip(batch.index[None] - size * self._numbers(), 0, size - 1)
    found = jnp.take_along_axis(values.reshape(self._parts, size), index.reshape(self._parts, -1), axis=1)
    return self._place(found.reshape(index.shape))

  def total(self, planes: Any) -> Any:
    """Returns the sum over the parts, of booleans whether any is true."""
    return jax.tree.map(lambda x: jnp.any(x, axis=0) if x.dtype == bool else jnp.sum(x, axis=0), planes)

  def _size(self, batch: Batch) -> int:
    """The tokens of a part's rows."""
    return batch.tokens[0].size // self._parts

  def _numbers(self) -> Array:
    return jnp.arange(self._parts, dtype=jnp.int32)[:, None, None]

  def _place(self, planes: Array) -> Array:
    return planes if self._parts == 1 else jax.lax.with_sharding_constraint(planes, self._sharding)


def collect(score: Callable[..., Any], batch: Batch, start: Any, planes: LossPlanes) -> Any:
  """Returns the per-token results of all micro-batches in the loss plane.

  Args:
    score: (tokens, segments, positions), int32 [R, T] each, and *scored*, `models.Scored`, to a tree of [R, T].
    batch: the batch.
    start: a tree of the same structure, [B, C] each: the entries of tokens that are not trained.
    planes: the planes of the learner's mesh.
  """

  def body(m, collected):
    rows, mask = micro_batch(batch, m)
    own, new = planes.mask(mask, batch), score(*rows, scored=planes.scored(mask, batch))
    return jax.tree.map(lambda old, x: jnp.where(own, planes.enter(x, batch), old), collected, new)

  collected = planes.total(jax.lax.fori_loop(0, batch.used, body, planes.start(start)))
  return jax.tree.map(lambda x, old: jnp.where(batch.mask, x, old), collected, start)
