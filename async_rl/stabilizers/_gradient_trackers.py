"""Transformations that observe gradients and change nothing."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from async_rl import _validation
from async_rl.stabilizers import _gradient_statistics


class TrackNormState(NamedTuple):
  """State of `track_norm`. Each field can be read by `optax.tree.get`."""

  grad_norm: jax.Array  # shape=(), dtype=float32, of the last finite gradient
  grad_norm_usual: jax.Array  # shape=(), dtype=float32, running geometric mean; 0 before the first gradient
  grad_spike: jax.Array  # shape=(), dtype=bool, whether the last gradient was a spike
  grad_spike_count: jax.Array  # shape=(), dtype=int32
  grad_nonfinite_count: jax.Array  # shape=(), dtype=int32
  grad_norm_count: jax.Array  # shape=(), dtype=int32, gradients in grad_norm_usual


def track_norm(
  decay: float | jax.Array = 0.95, threshold: float | jax.Array = 5.0
) -> optax.GradientTransformationExtraArgs:
  """Observes the global norm of the updates and counts spikes.

  A spike is a norm above `threshold` times the usual one, the running geometric mean of earlier norms: a scale-free
  test. A spike enters that mean as no more than the threshold, so that one outlier hardly moves it but a lasting change
  does. Norms that are zero or not finite do not enter.

  It measures what reaches its place in the chain: gradients at the front, steps at the end. To have both, name
  them: `optax.named_chain(("gradient", track_norm()), ("adam", optax.adam(1e-3)), ("step", track_norm()))`, and read
  `optax.tree.get(state["step"], "grad_norm")`.

  Args:
    decay: the decay per update of the running mean, in [0, 1). Early on it is a plain mean.
    threshold: the ratio to the usual norm that makes a spike, > 1.

  Returns:
    The transformation. It keeps six scalars.

  Raises:
    ValueError: if an argument is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = optax.chain(stabilizers.track_norm(), optax.sgd(0.1))
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> for size in (1.0, 1.0, 20.0):
    ...   _, state = optimizer.update(size * jnp.array([0.6, 0.8]), state, params)
    >>> print(optax.tree.get(state, "grad_norm"), optax.tree.get(state, "grad_spike_count"))
    20.0 1
  """
  _validation.check_number("decay", decay, at_least=0, below=1)
  _validation.check_number("threshold", threshold, above=1)

  def init(params: optax.Params) -> TrackNormState:
    del params
    return TrackNormState(
      grad_norm=jnp.zeros([], jnp.float32),
      grad_norm_usual=jnp.zeros([], jnp.float32),
      grad_spike=jnp.zeros([], bool),
      grad_spike_count=jnp.zeros([], jnp.int32),
      grad_nonfinite_count=jnp.zeros([], jnp.int32),
      grad_norm_count=jnp.zeros([], jnp.int32),
    )

  def update(
    updates: optax.Updates, state: TrackNormState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, TrackNormState]:
    del params, extra_args
    norm, usual, seen = _gradient_statistics.global_norm(updates), state.grad_norm_usual, state.grad_norm_count
    finite = jnp.isfinite(norm)
    spike = finite & (seen > 0) & (norm > threshold * usual)
    entering = jnp.where(spike, threshold * usual, norm)
    weight = jnp.maximum(1.0 - decay, 1.0 / (seen + 1.0))
    counts = finite & (norm > 0)
    log_usual = jnp.log(jnp.where(seen > 0, usual, 1.0))
    log_entering = jnp.log(jnp.where(counts, entering, 1.0))
    moved = jnp.exp((1.0 - weight) * log_usual + weight * log_entering).astype(jnp.float32)
    return updates, TrackNormState(
      grad_norm=jnp.where(finite, norm, state.grad_norm),
      grad_norm_usual=jnp.where(counts, moved, usual),
      grad_spike=spike,
      grad_spike_count=jnp.where(spike, optax.safe_increment(state.grad_spike_count), state.grad_spike_count),
      grad_nonfinite_count=jnp.where(
        finite, state.grad_nonfinite_count, optax.safe_increment(state.grad_nonfinite_count)
      ),
      grad_norm_count=jnp.where(counts, optax.safe_increment(seen), seen),
    )

  return optax.GradientTransformationExtraArgs(init, update)


class TrackCosineState(NamedTuple):
  """State of `track_cosine`. The cosine can be read by `optax.tree.get`."""

  grad_cosine: jax.Array  # shape=(), dtype=float32, 0 where undefined
  previous_gradient: optax.Updates  # like the gradient, in storage_dtype


def track_cosine(storage_dtype: DTypeLike | None = None) -> optax.GradientTransformationExtraArgs:
  """Observes the global cosine of each gradient to the one before.

  It is near 0 in synchronous training where noise dominates the gradient, and high under harmful staleness, but also
  where the signal is strong. `control_alignment` reports it too and needs no second buffer.

  Args:
    storage_dtype: the dtype of the stored gradient, e.g. "bfloat16"; `None` uses the parameters' own.

  Returns:
    The transformation. It costs one buffer of the gradient's size in `storage_dtype`. The cosine is 0 on the first
    update and where a norm is zero or not finite; a gradient that is not finite is not stored.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = optax.chain(stabilizers.track_cosine(), optax.sgd(0.1))
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> _, state = optimizer.update(jnp.array([1.0, 0.0]), state, params)
    >>> _, state = optimizer.update(jnp.array([3.0, 4.0]), state, params)
    >>> print(optax.tree.get(state, "grad_cosine"))
    0.6
  """

  def init(params: optax.Params) -> TrackCosineState:
    return TrackCosineState(jnp.zeros([], jnp.float32), optax.tree.zeros_like(params, dtype=storage_dtype))

  def update(
    updates: optax.Updates, state: TrackCosineState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, TrackCosineState]:
    del params, extra_args
    products = _gradient_statistics.gradient_products(updates, state.previous_gradient)
    previous = jax.tree.map(
      lambda g, h: jnp.where(products.finite, g.astype(h.dtype), h), updates, state.previous_gradient
    )
    return updates, TrackCosineState(products.cosine, previous)

  return optax.GradientTransformationExtraArgs(init, update)
