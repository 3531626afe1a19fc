"""Scaling of the step by the effective sample size of the batch (VCPO)."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from async_rl import _arrays
from async_rl import _validation
from async_rl.stabilizers import _statistics


class ScaleByEssState(NamedTuple):
  """State of `scale_by_ess`: what the last update saw. Each field can be read by `optax.tree.get`."""

  ess_ratio: jax.Array  # shape=(), dtype=float32
  ess_scale: jax.Array  # shape=(), dtype=float32
  ess_reference: jax.Array  # shape=(), dtype=float32
  ess_reference_count: jax.Array  # shape=(), dtype=int32, on-policy batches seen


def _running_reference(
  state: ScaleByEssState, ratio: jax.Array, on_policy: ArrayLike, decay: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The reference and its count after a batch; the first on-policy one replaces the initial reference."""
  measured = jnp.asarray(on_policy, bool) & (ratio > 0)
  decay = jnp.where(state.ess_reference_count > 0, decay, 0.0)
  moved = (decay * state.ess_reference + (1.0 - decay) * ratio).astype(jnp.float32)
  return (
    jnp.where(measured, moved, state.ess_reference),
    jnp.where(measured, optax.safe_increment(state.ess_reference_count), state.ess_reference_count),
  )


def scale_by_ess(
  power: float | jax.Array = 0.5,
  reference: float | jax.Array = 1.0,
  *,
  reference_decay: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates by how much of the batch its importance weights leave effective.

  .. math:: u \leftarrow u \cdot \min(1, \rho / \rho_\mathrm{ref})^\mathrm{power}, \qquad
    \rho = \frac{1}{B} \frac{(\sum_i w_i)^2}{\sum_i w_i^2}

  `update` needs the extra argument `log_weights`, float32 [B]: for each sequence of the *whole* optimizer batch the sum
  over its trained tokens of log pi - log mu, neither clipped nor truncated. It takes a second one, `log_weights_mask`,
  bool [B], which is False on rows without trained tokens (default: all rows count). Inside `shard_map`, gather
  both over the shards first.

  **Place it last**, after the preconditioner and the learning rate: it sets the learning rate of this step only, and so
  scales decoupled weight decay too. Before Adam a factor that changes slowly cancels, because Adam divides by the
  size of the updates that it is given.

  **The reference** is the ratio of the same set-up when nothing is stale: below 1 where sampler and trainer differ
  numerically (0.65 to 0.75 is common). With `reference_decay`, it is measured: `update` then also needs the extra
  argument `on_policy`, bool [], True when no token of the batch is stale; the first such batch sets the reference to
  its ratio, the later ones move it. Until then `reference` serves.

  Args:
    power: exponent, >= 0. 0.5 in the paper; 1 gives a step proportional to the effective sample size.
    reference: rho_ref, > 0.
    reference_decay: decay per on-policy batch of the running reference, in [0, 1); None keeps `reference` fixed.

  Returns:
    The transformation. Its state (`ScaleByEssState`) holds the last ratio, scale and reference.

  Raises:
    ValueError: if an argument is out of range, or `log_weights` is not of rank 1.
    TypeError: from `update`, if `log_weights` (or `on_policy`, where needed) is not given.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = optax.chain(optax.sgd(1.0), stabilizers.scale_by_ess())
    >>> params = {"w": jnp.zeros(2)}
    >>> state = optimizer.init(params)
    >>> log_weights = jnp.array([0.0, 0.0, -100.0, -100.0])  # half of the batch counts
    >>> updates, state = optimizer.update({"w": jnp.ones(2)}, state, params, log_weights=log_weights)
    >>> print(updates["w"])
    [-0.70710677 -0.70710677]
    >>> print(optax.tree.get(state, "ess_ratio"))
    0.5

  References:
    Huang et al., Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs, 2026, equations 4 and 5,
    https://arxiv.org/abs/2602.17616
  """
  _validation.check_number("power", power, at_least=0)
  _validation.check_number("reference", reference, above=0)
  if reference_decay is not None:
    _validation.check_number("reference_decay", reference_decay, at_least=0, below=1)

  def init(params: optax.Params) -> ScaleByEssState:
    del params
    return ScaleByEssState(
      ess_ratio=jnp.ones([], jnp.float32),
      ess_scale=jnp.ones([], jnp.float32),
      ess_reference=jnp.array(reference, jnp.float32),
      ess_reference_count=jnp.zeros([], jnp.int32),
    )

  def update(
    updates: optax.Updates,
    state: ScaleByEssState,
    params: optax.Params | None = None,
    *,
    log_weights: ArrayLike,
    log_weights_mask: ArrayLike | None = None,
    on_policy: ArrayLike | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ScaleByEssState]:
    del params, extra_args
    if jnp.ndim(log_weights) != 1:
      raise ValueError(f"log_weights must be one value per sequence, shape [B], got shape {jnp.shape(log_weights)}")
    ratio = _arrays.ess_ratio(log_weights, log_weights_mask)
    current, count = jnp.asarray(reference, jnp.float32), state.ess_reference_count
    if reference_decay is not None:
      if on_policy is None:
        raise TypeError("scale_by_ess with reference_decay needs the extra argument on_policy (bool) in update")
      current, count = _running_reference(state, ratio, on_policy, reference_decay)
    scale = jnp.power(jnp.minimum(1.0, ratio / current), power).astype(jnp.float32)
    updates = jax.tree.map(lambda u: (scale * _statistics.at_least_float32(u)).astype(u.dtype), updates)
    return updates, ScaleByEssState(ratio, scale, current, count)

  return optax.GradientTransformationExtraArgs(init, update)
