"""Scaling of the step by the effective sample size of the batch (VCPO)."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from async_rl import _arrays
from async_rl import _validation
from async_rl.stabilizers import _gradient_statistics


class ScaleByEssState(NamedTuple):
  """State of `scale_by_ess`. Each field can be read by `optax.tree.get`."""

  ess_ratio: jax.Array  # shape=(), dtype=float32, of the last batch
  ess_scale: jax.Array  # shape=(), dtype=float32, of the last update
  ess_undefined_count: jax.Array  # shape=(), dtype=int32, batches so far without a usable ratio


def scale_by_ess(
  power: float | jax.Array = 0.5, on_policy_ratio: float | jax.Array = 1.0
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates by the effective sample size of the batch's importance weights.

  .. math:: u \leftarrow u \cdot \min(1, \rho / \rho_0)^\mathrm{power}

  .. math:: \rho = \frac{1}{B} \frac{(\sum_i w_i)^2}{\sum_i w_i^2}

  **Extra arguments of `update`**

  - `log_weights`, float32 [B], required: for each sequence of the *whole* optimizer batch the sum over its trained
    tokens of log pi - log mu, neither clipped nor truncated.
  - `log_weights_mask`, bool [B]: False on rows without trained tokens. By default all rows count.

  Inside `shard_map`, pass the values of all shards. `jax.lax.all_gather` fails under the default `check_vma=True`,
  because its result counts as varying; a sum of padded slices does not::

    whole = jnp.zeros((jax.lax.axis_size(axis), *local.shape), local.dtype).at[jax.lax.axis_index(axis)].set(local)
    log_weights = jax.lax.psum(whole, axis).reshape(-1)

  `optax.MultiSteps` passes the extra arguments of the last micro-batch only: accumulate gradients outside, or pass the
  whole batch's `log_weights` with every micro-batch.

  **Place it last**, after the preconditioner and the learning rate: it sets the learning rate of this step only, and so
  scales decoupled weight decay too. Before Adam a factor that changes slowly cancels, because Adam divides by the
  size of the updates that it is given.

  **The on-policy ratio** :math:`\rho_0` is the ratio of the same set-up when nothing is stale: below 1 where sampler
  and trainer differ numerically (0.65 to 0.75 is common). It can be measured while training, see
  `track_on_policy_ratio`, or scheduled, by `optax.inject_hyperparams` as any number.

  Args:
    power: the exponent, >= 0. 0.5 in the paper; 1 gives a step proportional to the effective sample size.
    on_policy_ratio: the ratio from which the step is not shortened, > 0.

  Returns:
    The transformation. Where the ratio is undefined (a log-weight is NaN or +inf, no row counts) the updates are zero,
    and `ess_undefined_count` grows.

  Raises:
    ValueError: if an argument is out of range; from `update`, if `log_weights` is not of rank 1.
    TypeError: from `update`, if `log_weights` is not given.

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
  check_scaling(power, on_policy_ratio)

  def init(params: optax.Params) -> ScaleByEssState:
    del params
    return ScaleByEssState(
      ess_ratio=jnp.ones([], jnp.float32),
      ess_scale=jnp.ones([], jnp.float32),
      ess_undefined_count=jnp.zeros([], jnp.int32),
    )

  def update(
    updates: optax.Updates,
    state: ScaleByEssState,
    params: optax.Params | None = None,
    *,
    log_weights: ArrayLike,
    log_weights_mask: ArrayLike | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ScaleByEssState]:
    del params, extra_args
    check_log_weights(log_weights)
    ratio = _arrays.ess_ratio(log_weights, log_weights_mask)
    scale = scale_of_ratio(ratio, power, on_policy_ratio)
    undefined_count = count_undefined(state.ess_undefined_count, ratio)
    return scale_updates(updates, scale, ratio), ScaleByEssState(ratio, scale, undefined_count)

  return optax.GradientTransformationExtraArgs(init, update)


class TrackOnPolicyRatioState(NamedTuple):
  """State of `track_on_policy_ratio`. Each field can be read by `optax.tree.get`."""

  on_policy_ess_ratio: jax.Array  # shape=(), dtype=float32
  on_policy_batch_count: jax.Array  # shape=(), dtype=int32, batches measured


class _OnPolicyRatio(optax.schedules.StatefulSchedule):
  """What `track_on_policy_ratio` returns."""

  def __init__(self, decay: float | jax.Array, initial: float | jax.Array):
    self._decay = decay
    self._initial = initial

  def init(self) -> TrackOnPolicyRatioState:
    return TrackOnPolicyRatioState(jnp.asarray(self._initial, jnp.float32), jnp.zeros([], jnp.int32))

  def update(
    self,
    state: TrackOnPolicyRatioState,
    *,
    log_weights: ArrayLike,
    on_policy: ArrayLike,
    log_weights_mask: ArrayLike | None = None,
    **extra_args: Any,
  ) -> TrackOnPolicyRatioState:
    del extra_args
    check_log_weights(log_weights)
    ratio = _arrays.ess_ratio(log_weights, log_weights_mask)
    measured = jnp.asarray(on_policy, bool) & (ratio > 0)
    decay = jnp.where(state.on_policy_batch_count > 0, self._decay, 0.0)
    moved = (decay * state.on_policy_ess_ratio + (1.0 - decay) * ratio).astype(jnp.float32)
    count = state.on_policy_batch_count
    return TrackOnPolicyRatioState(
      on_policy_ess_ratio=jnp.where(measured, moved, state.on_policy_ess_ratio),
      on_policy_batch_count=jnp.where(measured, optax.safe_increment(count), count),
    )

  def __call__(self, state: TrackOnPolicyRatioState, **extra_args: Any) -> jax.Array:
    if extra_args:  # none come from `init`, where no batch has been seen yet
      state = self.update(state, **extra_args)
    return state.on_policy_ess_ratio


def track_on_policy_ratio(
  decay: float | jax.Array = 0.9, initial: float | jax.Array = 1.0
) -> optax.schedules.StatefulSchedule:
  """Measures the ESS ratio of on-policy batches, for the `on_policy_ratio` of `scale_by_ess`.

  It is a stateful schedule, which optax feeds with the extra arguments of `update`. Beside those of `scale_by_ess` it
  needs `on_policy`, bool []: True when no token of the batch is stale. The first such batch sets the ratio, later ones
  move it. With leading weights (`lead_by_momentum`) no batch is on-policy, whatever its lag: give a fixed number then.

  Args:
    decay: the decay per on-policy batch, in [0, 1).
    initial: the ratio until the first on-policy batch, > 0.

  Returns:
    The schedule. Its state (`TrackOnPolicyRatioState`) is that of `optax.inject_hyperparams`.

  Raises:
    ValueError: if an argument is out of range.
    TypeError: from `update`, if `on_policy` is not given.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> on_policy_ratio = stabilizers.track_on_policy_ratio(decay=0.9)
    >>> scale = optax.inject_hyperparams(stabilizers.scale_by_ess)(power=1.0, on_policy_ratio=on_policy_ratio)
    >>> optimizer = optax.chain(optax.sgd(1.0), scale)
    >>> params = jnp.zeros(1)
    >>> state = optimizer.init(params)
    >>> half, quarter = jnp.array([0.0, 0.0, -100.0, -100.0]), jnp.array([0.0, -100.0, -100.0, -100.0])
    >>> _, state = optimizer.update(jnp.ones(1), state, params, log_weights=half, on_policy=True)
    >>> updates, state = optimizer.update(jnp.ones(1), state, params, log_weights=quarter, on_policy=False)
    >>> print(updates, optax.tree.get(state, "on_policy_ess_ratio"))
    [-0.5] 0.5
  """
  _validation.check_number("decay", decay, at_least=0, below=1)
  _validation.check_number("initial", initial, above=0)
  return _OnPolicyRatio(decay, initial)


def check_log_weights(log_weights: ArrayLike) -> None:
  """Raises unless *log_weights* is a vector [B]."""
  if jnp.ndim(log_weights) != 1:
    raise ValueError(
      f"*log_weights* must be one value per sequence, shape [B], got log_weights.shape={jnp.shape(log_weights)}; "
      "sum the log-ratios of each sequence over its trained tokens."
    )


def check_scaling(power: float | jax.Array, on_policy_ratio: float | jax.Array) -> None:
  """Raises unless the arguments of `scale_by_ess` are in range."""
  _validation.check_number("power", power, at_least=0)
  remedy = "wrap scale_by_ess in optax.inject_hyperparams to pass a schedule" if callable(on_policy_ratio) else ""
  _validation.check_number("on_policy_ratio", on_policy_ratio, above=0, remedy=remedy)


def scale_of_ratio(ratio: jax.Array, power: float | jax.Array, on_policy_ratio: float | jax.Array) -> jax.Array:
  """Returns the factor of the step, float32 []; 0 where *ratio* is 0, which is how an undefined one is reported."""
  scale = jnp.power(jnp.minimum(1.0, ratio / on_policy_ratio), power)
  return jnp.where(ratio > 0, scale, 0.0).astype(jnp.float32)


def scale_updates(updates: optax.Updates, scale: jax.Array, ratio: jax.Array) -> optax.Updates:
  """Returns *updates* times *scale* in their dtypes, and zeros where *ratio* is 0, whatever the updates are."""
  scaled = _gradient_statistics.scaled(updates, scale)
  return jax.tree.map(lambda u: jnp.where(ratio > 0, u, jnp.zeros_like(u)), scaled)


def count_undefined(count: jax.Array, ratio: jax.Array) -> jax.Array:
  """Returns *count*, increased by one where *ratio* is 0."""
  return jnp.where(ratio > 0, count, optax.safe_increment(count))
