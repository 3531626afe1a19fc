"""Scaling by the effective sample size in trainers that pass no extra arguments to the optimizer.

The ratio (Σw)² / (B Σw²) needs three sums over the batch: B, Σw and Σw². A probe parameter of three numbers carries
them: a custom backward pass returns the sums as the probe's gradient, so they reach the optimizer inside the gradient
tree. Sums add up over micro-batches and devices as gradients do, and common factors (means, loss scaling) cancel.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from async_rl import _arrays
from async_rl.stabilizers import _ess

#: The name of the parameter, anywhere in the tree.
NAME = "ess_probe"
#: Log-weights are clamped to ±LOG_CLAMP, so that sums of squared weights stay finite in float32.
LOG_CLAMP = 20.0


class ScaleByEssProbeState(NamedTuple):
  """State of `scale_by_ess_probe`. Each field can be read by `optax.tree.get`."""

  ess_ratio: jax.Array  # shape=(), dtype=float32, of the last batch
  ess_scale: jax.Array  # shape=(), dtype=float32, of the last update
  ess_undefined_count: jax.Array  # shape=(), dtype=int32, batches so far without a usable ratio
  inner_state: optax.OptState


def ess_probe() -> jax.Array:
  """Returns the probe parameter, zeros, float32 [3]. Put it into the parameters under the name `ess_probe`.

  It stays zero and changes no other gradient. Leave it out of exports and weight pushes, in NNX by the filter
  ``nnx.All(nnx.Param, nnx.Not(nnx.PathContains("ess_probe")))``. A trainer that logs the norm of the whole gradient, as
  Tunix does, counts the sums in it. With adapters alone being trained it must be one of the trained parameters.

  Examples:
    >>> from async_rl import stabilizers
    >>> params = {"w": jnp.ones(2), "ess_probe": stabilizers.ess_probe()}
    >>> print(params["ess_probe"])
    [0. 0. 0.]
  """
  return jnp.zeros(3, jnp.float32)


def attach_ess_probe(
  loss: jax.Array, probe: jax.Array, log_weights: ArrayLike, mask: ArrayLike | None = None
) -> jax.Array:
  """Returns *loss* as it is, and makes the gradient of *probe* the sums that `scale_by_ess_probe` needs.

  Call it on the loss of each micro-batch, before it is scaled or averaged. The ratio of the whole batch is exact as
  long as all micro-batches and devices enter the gradient with the same weight (a mean or a sum over them).

  Args:
    loss: the loss, a float [].
    probe: the parameter of `ess_probe`.
    log_weights: float [B]; for each sequence the sum over its trained tokens of log pi - log mu, neither clipped nor
      truncated. No gradient flows through it. Beyond ±20 it is clamped.
    mask: bool [B]; False on rows without trained tokens. `None` counts all rows.

  Raises:
    TypeError: if *mask* is not bool.
    ValueError: if *probe*, *log_weights* or *mask* has a wrong shape.

  Examples:
    >>> import jax
    >>> from async_rl import stabilizers
    >>> log_weights = jnp.log(jnp.array([1.0, 3.0]))
    >>> loss = lambda probe: stabilizers.attach_ess_probe(jnp.float32(5.0), probe, log_weights)
    >>> value, sums = jax.value_and_grad(loss)(stabilizers.ess_probe())
    >>> print(value, sums)  # B, the sum of the weights, and of their squares
    5.0 [ 2.  4. 10.]
  """
  if jnp.shape(probe) != (3,):
    raise ValueError(f"*probe* must be made by ess_probe(), of shape (3,), got probe.shape={jnp.shape(probe)}.")
  _ess.check_log_weights(log_weights)
  log_weights = jnp.asarray(log_weights, jnp.float32)
  counted = jnp.ones(log_weights.shape, bool) if mask is None else jnp.asarray(mask)
  _arrays.check_mask(counted, log_weights=log_weights)
  weights = jnp.where(counted, jnp.exp(jnp.clip(log_weights, -LOG_CLAMP, LOG_CLAMP)), 0.0)
  sums = jnp.stack([jnp.sum(counted, dtype=jnp.float32), jnp.sum(weights), jnp.sum(jnp.square(weights))])
  return _attach(loss, probe, jax.lax.stop_gradient(sums))


@jax.custom_vjp
def _attach(loss: jax.Array, probe: jax.Array, sums: jax.Array) -> jax.Array:
  del probe, sums
  return loss


def _attach_forward(loss: jax.Array, probe: jax.Array, sums: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
  return loss, (sums, probe)


def _attach_backward(residuals: tuple[jax.Array, Any], cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  sums, probe = residuals
  return cotangent, (cotangent.astype(jnp.float32) * sums).astype(probe.dtype), jnp.zeros_like(sums)


_attach.defvjp(_attach_forward, _attach_backward)


def scale_by_ess_probe(
  inner: optax.GradientTransformation,
  power: float | jax.Array = 0.5,
  on_policy_ratio: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer to do what `scale_by_ess` at its end would, with sums that arrive as the gradient of a probe.

  It is for trainers that pass no extra arguments to the optimizer (Tunix, MaxText). Beside the probe in the parameters,
  a user writes two lines, one in the loss and one where the optimizer is made::

    loss = stabilizers.attach_ess_probe(loss, params["ess_probe"], log_weights)
    optimizer = stabilizers.scale_by_ess_probe(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6)))

  It must be outermost, so that nothing clips or preconditions the sums. *inner* sees neither the probe nor its
  gradient. Only `optax.MultiSteps` may go around it, since the sums add up.

  Args:
    inner: the optimizer, learning rate included.
    power: the exponent, >= 0; see `scale_by_ess`.
    on_policy_ratio: the ratio from which the step is not shortened, > 0.

  Returns:
    The transformation. Where the ratio is undefined (a log-weight is NaN, no row counts, the probe is not attached) the
    updates are zero, and `ess_undefined_count` grows.

  Raises:
    ValueError: if an argument is out of range, or the parameters do not hold exactly one probe.

  Examples:
    >>> import jax
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = stabilizers.scale_by_ess_probe(optax.sgd(1.0), power=1.0)
    >>> params = {"w": jnp.array(2.0), "ess_probe": stabilizers.ess_probe()}
    >>> def loss(params):
    ...   log_weights = jnp.array([0.0, 0.0, -100.0, -100.0])  # half of the batch counts
    ...   return stabilizers.attach_ess_probe(3.0 * params["w"], params["ess_probe"], log_weights)
    >>> updates, state = optimizer.update(jax.grad(loss)(params), optimizer.init(params), params)
    >>> print(updates["w"], updates["ess_probe"], optax.tree.get(state, "ess_ratio"))
    -1.5 [0. 0. 0.] 0.5
  """
  _ess.check_scaling(power, on_policy_ratio)
  rest = optax.masked(inner, lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: not _is_probe(path), tree))

  def init(params: optax.Params) -> ScaleByEssProbeState:
    if jax.tree.leaves(params):  # `optax.tree.map_params` calls this without any
      _find_probe(params)
    return ScaleByEssProbeState(
      ess_ratio=jnp.ones([], jnp.float32),
      ess_scale=jnp.ones([], jnp.float32),
      ess_undefined_count=jnp.zeros([], jnp.int32),
      inner_state=rest.init(params),
    )

  def update(
    updates: optax.Updates, state: ScaleByEssProbeState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, ScaleByEssProbeState]:
    ratio = _ratio_of_sums(_find_probe(updates))
    scale = _ess.scale_of_ratio(ratio, power, on_policy_ratio)
    updates, inner_state = rest.update(updates, state.inner_state, params, **extra_args)
    updates = _ess.scale_updates(updates, scale, ratio)
    updates = jax.tree_util.tree_map_with_path(lambda path, u: jnp.zeros_like(u) if _is_probe(path) else u, updates)
    undefined_count = _ess.count_undefined(state.ess_undefined_count, ratio)
    return updates, ScaleByEssProbeState(ratio, scale, undefined_count, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _ratio_of_sums(sums: jax.Array) -> jax.Array:
  """Returns (Σw)² / (B Σw²) of the sums, all three times one unknown factor; 0 where it is undefined. float32 []."""
  count, total, squares = sums.astype(jnp.float32)
  defined = jnp.all(jnp.isfinite(sums)) & (count != 0) & (squares != 0)
  ratio = (total / jnp.where(defined, count, 1.0)) * (total / jnp.where(defined, squares, 1.0))
  return jnp.where(defined, jnp.minimum(ratio, 1.0), 0.0)


def _is_probe(path: tuple[Any, ...]) -> bool:
  return any(NAME in (getattr(key, "key", None), getattr(key, "name", None)) for key in path)


def _find_probe(tree: Any) -> jax.Array:
  """Returns the leaf of the probe."""
  found = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if _is_probe(path)]
  if len(found) != 1:
    raise ValueError(
      f"*params* must hold one parameter named {NAME}, got {len(found)}; put ess_probe() into the tree under that name."
    )
  return found[0]
