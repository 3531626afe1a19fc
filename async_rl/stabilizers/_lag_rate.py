"""Scaling of the step by the lag of the batch."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from async_rl import _validation
from async_rl.stabilizers import _gradient_statistics


class ScaleByLagState(NamedTuple):
  """State of `scale_by_lag`. The field can be read by `optax.tree.get`."""

  lag_scale: jax.Array  # shape=(), dtype=float32, of the last update


def scale_by_lag(
  power: float | jax.Array = 1.0, reference: float | jax.Array = 1.0
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates down where the batch is old: the largest stable learning rate falls as one over the lag.

  .. math:: u \leftarrow u \cdot \min(1, S_0 / S)^\mathrm{power}

  with S the mean lag of the batch's tokens, in optimizer steps. The update takes it as the extra argument `mean_lag`, a
  float [], which the learner passes. Up to the lag :math:`S_0` the step keeps its length.

  **Place it last**, after the preconditioner and the learning rate, as `scale_by_ess`: before Adam it would cancel. At
  a constant lag it is a constant factor, so that it differs from a lower learning rate only where lags vary.

  Args:
    power: the exponent, >= 0. 1 is the published law.
    reference: the lag S_0 from which on steps are shortened, > 0.

  Returns:
    The transformation.

  Raises:
    ValueError: if an argument is out of range; from `update`, if `mean_lag` is no scalar.
    TypeError: from `update`, if `mean_lag` is not given.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = optax.chain(optax.sgd(1.0), stabilizers.scale_by_lag(reference=2.0))
    >>> params = jnp.zeros(1)
    >>> state = optimizer.init(params)
    >>> for mean_lag in (0.0, 8.0):
    ...   updates, state = optimizer.update(jnp.ones(1), state, params, mean_lag=mean_lag)
    ...   print(updates)
    [-1.]
    [-0.25]

  References:
    Staleness-Learning Rate Scaling Laws, 2026, https://arxiv.org/abs/2607.01083; Zhang et al., Staleness-aware
    Async-SGD for Distributed Deep Learning, 2015, https://arxiv.org/abs/1511.05950
  """
  _validation.check_number("power", power, at_least=0)
  _validation.check_number("reference", reference, above=0)

  def init(params: optax.Params) -> ScaleByLagState:
    del params
    return ScaleByLagState(jnp.ones([], jnp.float32))

  def update(
    updates: optax.Updates,
    state: ScaleByLagState,
    params: optax.Params | None = None,
    *,
    mean_lag: ArrayLike,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ScaleByLagState]:
    del state, params, extra_args
    if jnp.ndim(mean_lag) != 0:
      raise ValueError(f"*mean_lag* must be one number, got mean_lag.shape={jnp.shape(mean_lag)}.")
    lag = jnp.maximum(jnp.asarray(mean_lag, jnp.float32), reference)
    scale = jnp.power(reference / lag, power).astype(jnp.float32)
    return _gradient_statistics.scaled(updates, scale), ScaleByLagState(scale)

  return optax.GradientTransformationExtraArgs(init, update)
