"""Defines the knobs of the sweep, all of them traced, so that one program runs every method.

Two facts make that possible. The losses differ only in the coefficients of a gradient, see `_lag_sweep_losses`. And the
stabilizers take traced options that switch them off: power 0, thresholds beyond 1, gain 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from async_rl import learning
from async_rl import losses
from async_rl import stabilizers
from experiments.reproductions import _lag_sweep_gac as gac
from experiments.reproductions import _lag_sweep_losses as sweep_losses

Array = jax.Array

#: Updates over which the learning rate rises.
WARMUP = 20


class Knobs(NamedTuple):
  """The options that differ between two runs, each a scalar; `stack` makes vectors of them.

  Attributes:
    seed: the seed of everything random, and of the warm start.
    lag: the number of updates between the weights that draw a batch and those that are trained on it; lower while
      training is younger than that. One number, or one for every update.
    rate: the learning rate of Adam, reached after `WARMUP` updates.
    loss: the index into `LOSSES`.
    baseline: the index into `BASELINES`.
    ramp: the number of updates after which the lag grows by one; 1 is a delay queue.
    ess_power: the power of `stabilizers.scale_by_ess`.
    servo: the gain of `servo_by_ess`.
    align_low: the lower threshold of `stabilizers.control_alignment`.
    align_high: its upper threshold.
    alignment: the index into `gac.CHOICES`, of what else it leaves open.
    skip: the probability that an update is skipped.
    b1: Adam's decay of the first moment.
    anchor: the τ in A − τ (log w − its group's mean), a penalty on leaving the behavior policy, per sequence.
    token_anchor: the β in A − β log ρ_t, the same per token.
    ahead: the lead of the drawing weights; 1 is as far as Adam's momentum alone will carry the weights until the data
      are trained on: the last step times b1 + b1² + … + b1^lag. Only the drift that future gradients make is then left
      to correct.
    average: the decay of the moving average of weights that draws; 0 draws from the weights themselves.
    centering: the index into `CENTERINGS`.
    lag_power: the power of `stabilizers.scale_by_lag`.
    fall: the share of the learning rate that is taken away in equal parts over the whole training; 1 ends at nothing.
  """

  seed: int | Array = 0
  lag: int | Array | np.ndarray = 0
  rate: float | Array = 1e-4
  loss: int | Array = 0
  baseline: int | Array = 0
  ramp: int | Array = 1
  ess_power: float | Array = 0.0
  servo: float | Array = 0.0
  align_low: float | Array = 2.0
  align_high: float | Array = 2.0
  skip: float | Array = 0.0
  b1: float | Array = 0.9
  anchor: float | Array = 0.0
  token_anchor: float | Array = 0.0
  ahead: float | Array = 0.0
  average: float | Array = 0.0
  centering: int | Array = 0
  lag_power: float | Array = 0.0
  alignment: int | Array = 0
  fall: float | Array = 0.0


def stack(knobs: Sequence[Knobs], updates: int) -> Knobs:
  """Returns the knobs of many runs as vectors, lags as [runs, updates]; an option has the type of its default."""
  every = [run._replace(lag=np.broadcast_to(np.asarray(run.lag), (updates,))) for run in knobs]
  return jax.tree.map(
    lambda default, *column: np.array(column, np.int32 if isinstance(default, int) else np.float32), Knobs(), *every
  )


def advantages(knobs: Knobs, batch: learning.BatchQuantities) -> Array:
  """Returns the advantages of every token, [B, T]: the chosen baseline, then the anchors."""
  baselines = [learning.Objective(losses.reinforce, baseline) for baseline in sweep_losses.BASELINES.values()]
  by_baseline = jnp.stack([objective.make_advantages(batch) for objective in baselines])
  bounded = jnp.clip(batch.log_weights, -losses.LOG_CLAMP, losses.LOG_CLAMP)
  drift = losses.grpo_advantages(bounded, batch.groups, batch.groups.shape[0], normalize_std=False)
  per_sequence = by_baseline[knobs.baseline] - knobs.anchor * drift
  return per_sequence[:, None] - knobs.token_anchor * jnp.clip(batch.log_ratios, -losses.LOG_CLAMP, losses.LOG_CLAMP)


class ServoState(NamedTuple):
  servo_scale: Array  # shape=(), dtype=float32


def servo_by_ess(gain: float | Array) -> optax.GradientTransformationExtraArgs:
  """Multiplies updates by a factor s <= 1 that is steered so that the batch's ESS ratio stays at `ESS_TARGET`.

  s <- min(1, s exp(gain (ESS ratio - target))), not below 0.01. Unlike `scale_by_ess`, which answers the ESS of one
  batch, it integrates: it settles at the largest step under which data of this lag keep their worth.
  """

  def init(params: optax.Params) -> ServoState:
    del params
    return ServoState(jnp.ones([], jnp.float32))

  def update(
    updates: optax.Updates, state: ServoState, params: optax.Params | None = None, *, log_weights: Array, **extra: Any
  ) -> tuple[optax.Updates, ServoState]:
    del params, extra
    error = stabilizers.ess_ratio(log_weights) - sweep_losses.ESS_TARGET
    scale = jnp.clip(state.servo_scale * jnp.exp(gain * error), 0.01, 1.0).astype(jnp.float32)
    return jax.tree.map(lambda u: scale * u, updates), ServoState(scale)

  return optax.GradientTransformationExtraArgs(init, update)


def optimizer(knobs: Knobs, updates: int) -> optax.GradientTransformationExtraArgs:
  """Returns clipped Adam, for *updates* updates, with every stabilizer around it; by default they only observe."""

  def rate(count: Array) -> Array:
    return knobs.rate * jnp.minimum(1.0, (count + 1) / WARMUP) * (1.0 - knobs.fall * count / updates)

  inner = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=knobs.b1),
    optax.scale_by_learning_rate(rate),
    stabilizers.scale_by_ess(knobs.ess_power),
    servo_by_ess(knobs.servo),
    stabilizers.scale_by_lag(knobs.lag_power),
  )
  return gac.control_alignment(inner, knobs.align_low, knobs.align_high, knobs.alignment)
