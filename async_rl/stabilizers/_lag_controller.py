"""A closed loop that lowers the allowed lag when the training signals say that data are too stale."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl import _validation


class LagControllerState(NamedTuple):
  """State of a lag controller."""

  allowed_lag: jax.Array  # shape=(), dtype=int32
  smoothed_ess: jax.Array  # shape=(), dtype=float32
  smoothed_cosine: jax.Array  # shape=(), dtype=float32
  ess_seen: jax.Array  # shape=(), dtype=int32, observations in smoothed_ess
  cosine_seen: jax.Array  # shape=(), dtype=int32
  updates_to_ignore: jax.Array  # shape=(), dtype=int32, after a cut
  updates_without_alarm: jax.Array  # shape=(), dtype=int32, since the last change


class LagController(NamedTuple):
  """A pair of pure functions: `init() -> state`, `update(state, *, ess_ratio, cosine) -> (allowed_lag, state)`."""

  init: Callable[[], LagControllerState]
  update: Callable[..., tuple[jax.Array, LagControllerState]]


def _smooth(
  mean: jax.Array, seen: jax.Array, value: ArrayLike, decay: float, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns a running mean, plain at first, and its number of observations; NaN is not an observation."""
  value = jnp.asarray(value, jnp.float32)
  used = used & jnp.isfinite(value)
  weight = jnp.maximum(1.0 - decay, 1.0 / (seen + 1.0))
  moved = mean + weight * (jnp.where(used, value, mean) - mean)
  return jnp.where(used, moved, mean).astype(jnp.float32), jnp.where(used, seen + 1, seen)


def control_lag(
  max_lag: int,
  min_lag: int = 0,
  *,
  ess_floor: float = 0.25,
  cosine_ceiling: float = 0.5,
  decay: float = 0.8,
  patience: int = 20,
) -> LagController:
  """Chooses the allowed lag from the effective sample size and the alignment of gradients.

  Halve on alarm, recover by one. An alarm is a running mean of the ESS ratio below `ess_floor`, or of the cosine above
  `cosine_ceiling`. It halves the allowed lag; then, because batches that are already under way are as stale as
  before, the controller ignores as many updates as the lag was, plus one, and restarts its means. After
  `patience` updates without alarm it allows one more.

  It is for training loops that can change their lag bound while they run: call `update` after each optimizer step, and
  submit or accept only what the returned lag allows. The trainer of this library fixes its bound for a whole run and
  does not call it. The functions are pure and take and return arrays, so they work on the host, under `jit`, `scan` and
  `vmap`. The rule and its thresholds are ours, not from a paper, and were tested on simulated signals only. `ess_floor`
  must lie below the ESS ratio at lag 0, which is under 1 where sampler and trainer differ numerically.

  Args:
    max_lag: the largest allowed lag in optimizer steps, and the initial one, >= 0.
    min_lag: the smallest allowed lag, 0 <= min_lag <= max_lag.
    ess_floor: the ESS ratio below which the lag is cut, in [0, 1]; 0 ignores the ESS.
    cosine_ceiling: the cosine to the previous gradient above which the lag is cut, in [0, 1]; 1 ignores the cosine.
    decay: the decay per update of the running means, in [0, 1).
    patience: the number of updates without alarm that earn one more step of lag, >= 1.

  Returns:
    The controller. `update` takes this optimizer step's `ess_ratio` and `cosine`; NaN means not measured.

  Raises:
    ValueError: if an argument is out of range.

  Examples:
    >>> from async_rl import stabilizers
    >>> controller = stabilizers.control_lag(max_lag=8)
    >>> allowed_lag, state = controller.update(controller.init(), ess_ratio=0.7, cosine=0.0)
    >>> print(allowed_lag)
    8
    >>> for _ in range(4):
    ...   allowed_lag, state = controller.update(state, ess_ratio=0.1, cosine=0.0)
    >>> print(allowed_lag)
    4
  """
  _validation.check_number("max_lag", max_lag, at_least=0, whole=True)
  _validation.check_number("min_lag", min_lag, at_least=0, at_most=max_lag, whole=True)
  _validation.check_number("ess_floor", ess_floor, at_least=0, at_most=1)
  _validation.check_number("cosine_ceiling", cosine_ceiling, at_least=0, at_most=1)
  _validation.check_number("decay", decay, at_least=0, below=1)
  _validation.check_number("patience", patience, at_least=1, whole=True)

  def init() -> LagControllerState:
    return LagControllerState(
      allowed_lag=jnp.array(max_lag, jnp.int32),
      smoothed_ess=jnp.zeros([], jnp.float32),
      smoothed_cosine=jnp.zeros([], jnp.float32),
      ess_seen=jnp.zeros([], jnp.int32),
      cosine_seen=jnp.zeros([], jnp.int32),
      updates_to_ignore=jnp.zeros([], jnp.int32),
      updates_without_alarm=jnp.zeros([], jnp.int32),
    )

  def update(
    state: LagControllerState, *, ess_ratio: ArrayLike, cosine: ArrayLike
  ) -> tuple[jax.Array, LagControllerState]:
    watching = state.updates_to_ignore == 0
    ess, ess_seen = _smooth(state.smoothed_ess, state.ess_seen, ess_ratio, decay, watching)
    aligned, cosine_seen = _smooth(state.smoothed_cosine, state.cosine_seen, cosine, decay, watching)
    alarm = watching & (((ess_seen > 0) & (ess < ess_floor)) | ((cosine_seen > 0) & (aligned > cosine_ceiling)))
    cut = alarm & (state.allowed_lag > min_lag)
    calm = jnp.where(alarm | ~watching, 0, state.updates_without_alarm + 1)
    raised = calm >= patience
    allowed = jnp.where(cut, jnp.maximum(state.allowed_lag // 2, min_lag), state.allowed_lag + raised)
    allowed = jnp.minimum(allowed, max_lag).astype(jnp.int32)
    return allowed, LagControllerState(
      allowed_lag=allowed,
      smoothed_ess=ess,
      smoothed_cosine=aligned,
      ess_seen=jnp.where(cut, 0, ess_seen),
      cosine_seen=jnp.where(cut, 0, cosine_seen),
      updates_to_ignore=jnp.where(cut, state.allowed_lag + 1, jnp.maximum(state.updates_to_ignore - 1, 0)),
      updates_without_alarm=jnp.where(raised, 0, calm),
    )

  return LagController(init, update)
