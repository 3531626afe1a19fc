"""Scoring with a copy of the parameters for each part of the data axis: gradients are summed once per step.

Parts of the data axis hold the same parameters and other rows. If all of them are scored with the same parameters, the
compiler sums the gradient over the parts in every micro-batch. The gradient of copies is one sum per part, which stays
on its devices until the last micro-batch. Frozen parameters are copied, too, or the compiler would look up embeddings
of one part's tokens in another one's table. Copies take no memory: a device holds its share of its own part's.

Over the fsdp axis, gradients are still summed and scattered in every micro-batch: to wait for the last one would take
the whole gradient on every device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models

Array = jax.Array

#: The name of the data axis as seen from within a copy, where rows are split over the other axes only.
_COPIES = "copies"


class CopiedScore:
  """Scores rows with copies of parameters, or with the parameters themselves where copies are of no use.

  That is on a data axis of one, and with cuDNN, whose attention JAX (0.10) cannot batch with a mask for all heads. With
  cuDNN layers are unrolled, too: in a loop over them, GPUs copy whatever the backward pass needs to and from arrays of
  all layers, in an eighth of the step's time. Compilation then takes 15 s in place of 5 s for 28 layers, and the layers
  are held twice, which adapters and parameters split over "fsdp" are there to avoid.

  Args:
    policy: the policy, on the learner mesh.
    shardings: the shardings of the parameters.
    temperature: the temperature of the softmax.
    chunk: the number of a device's tokens whose logits are formed at a time.
  """

  def __init__(self, policy: models.Policy, shardings: models.Params, temperature: float, chunk: int):
    assert policy.mesh is not None
    self._count = 1 if policy.attention_backend == "cudnn" else policy.mesh.shape["data"]
    self._unrolled = policy.attention_backend == "cudnn" and policy.lora is None and policy.mesh.shape["fsdp"] == 1
    self._dtype = policy.dtype
    self._shardings = shardings
    self._mesh = policy.mesh
    if self._count > 1:
      self._mesh = models.named_mesh(policy.mesh.devices, (_COPIES, *models.AXES[1:]))
    on_copy = dataclasses.replace(policy, mesh=self._mesh)
    self._score = functools.partial(models.score, on_copy, temperature=temperature, chunk=chunk)

  def copy(self, params: models.Params) -> models.Params:
    """Returns parameters, or some parts of them, with a leading axis of copies, each on its part of the data axis.

    Unrolled, layers are lists in the dtypes of their use.
    """
    if self._unrolled:
      # Cast once: the matrices' gradients are in the compute dtype in any case, and those of the table are not.
      layers = {part: tree for part, tree in params.items() if part == "layers"}
      return models.unstack_layers(params | models.as_used(layers, self._dtype))
    if self._count == 1:
      return params

    def copy(x: Array, sharding: NamedSharding) -> Array:
      copies = NamedSharding(self._mesh, PartitionSpec(_COPIES, *sharding.spec))
      return jax.lax.with_sharding_constraint(jnp.broadcast_to(x[None], (self._count, *x.shape)), copies)

    return jax.tree.map(copy, params, {part: self._shardings[part] for part in params})

  def __call__(self, copies: models.Params, rows: Sequence[Array], scored: models.Scored) -> models.TokenStats:
    """Returns `models.score` of rows, [R, T] each.

    Args:
      copies: the result of `copy`, for all parts.
      rows: the tokens, segments and positions, int32 [R, T] each, split over the data axis first.
      scored: the tokens to score of every device's rows.
    """
    if self._count == 1:
      return self._score(copies, *rows, scored=scored)

    def score(copy: models.Params, order: Array, *rows: Array) -> models.TokenStats:
      # With one number of all copies, a loop over the tokens to score needs no word of the others.
      return self._score(copy, *rows, scored=scored._replace(order=order))

    split = (x.reshape(self._count, -1, x.shape[1]) for x in (scored.order, *rows))
    stats = jax.vmap(score, spmd_axis_name=_COPIES)(copies, *split)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[2]), stats)

  def zeros(self, params: models.Params) -> models.Params:
    """Returns sums of no gradients of copies yet, float32."""
    copies = params if self._unrolled else self.copy(params)
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), copies)

  def add(self, sums: models.Params, grads: models.Params) -> models.Params:
    """Returns sums with the gradients of copies added, those of layers in place."""

    def put(total: Array, new: Array, layer: int) -> Array:
      return jax.lax.dynamic_update_index_in_dim(total, total[layer] + new, layer, 0)

    def add(total: Any, new: Any) -> Any:
      if not isinstance(new, list):
        return jax.tree.map(jnp.add, total, new)
      for layer, grads in enumerate(new):
        total = jax.tree.map(functools.partial(put, layer=layer), total, grads)
      return total

    return {part: add(sums[part], grads[part]) for part in sums}

  def total(self, grads: models.Params) -> models.Params:
    """Returns the sum of the copies' gradients."""
    return grads if self._count == 1 else jax.tree.map(lambda g: jnp.sum(g, axis=0), grads)
