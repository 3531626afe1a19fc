"""Control of the alignment of consecutive gradients, inspired by GAC."""

import enum
from typing import Any
from typing import Literal
from typing import NamedTuple
from typing import get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from async_rl import _validation
from async_rl.stabilizers import _gradient_statistics

Kappa = Literal["cap", "remove", "match"]
Previous = Literal["raw", "projected"]


class AlignmentRegime(enum.IntEnum):
  """What `control_alignment` did with a gradient: the values of `ControlAlignmentState.alignment_regime`."""

  KEPT = 0
  PROJECTED = 1
  SKIPPED = 2
  #: Aligned enough to be skipped, but projected and used, because the limit of consecutive skips was reached.
  FORCED = 3


class ControlAlignmentState(NamedTuple):
  """State of `control_alignment`. The scalars describe the last update and can be read by `optax.tree.get`."""

  alignment_cosine: jax.Array  # shape=(), dtype=float32, 0 where undefined
  alignment_norm: jax.Array  # shape=(), dtype=float32, of the last finite gradient, before projection
  alignment_regime: jax.Array  # shape=(), dtype=int32, an AlignmentRegime
  consecutive_aligned_count: jax.Array  # shape=(), dtype=int32, gradients at or above `high`, up to the last one
  skip_count: jax.Array  # shape=(), dtype=int32, skipped steps so far
  forced_count: jax.Array  # shape=(), dtype=int32, steps so far that were taken because of the limit
  alignment_previous: optax.Updates  # like the gradient, in storage_dtype
  inner_state: optax.OptState


def control_alignment(
  inner: optax.GradientTransformation,
  low: float | jax.Array = 0.2,
  high: float | jax.Array = 0.8,
  *,
  max_consecutive_skips: int | jax.Array | None = 5,
  storage_dtype: DTypeLike | None = None,
  kappa: Kappa = "cap",
  previous: Previous = "raw",
  refresh_on_skip: bool = True,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer to suppress the part of the gradient that repeats the previous one.

  Inspired by GAC (gradient alignment control): consecutive gradients are near orthogonal in synchronous training and
  stay aligned under staleness. With gradient g, the previous gradient h and their global cosine c:

  - :math:`c \le \mathrm{low}`: g is kept;
  - between: :math:`g \leftarrow g - (1 - \kappa) \frac{\langle g, h \rangle}{\lVert h \rVert^2} h`;
  - :math:`c \ge \mathrm{high}`: the step is skipped. The updates are zero, and the state of *inner*, moments and
    counters, stays as it was. (Passing zeros to Adam would not skip the step: its moments would decay and still move
    the weights.)

  A gradient without a finite float32 norm is skipped too and does not become the previous gradient. On the first step
  and where a norm is zero there is no cosine: it is reported as 0, and g is kept.

  **It can stall.** Where the signal is strong, gradients are aligned without any staleness: with the thresholds .2
  and .8 and no limit, an on-policy bandit skips nearly every step and hardly learns. After *max_consecutive_skips*
  skips in a row, aligned gradients are therefore projected as in the middle regime, used, and counted in
  `forced_count`, until one is below *high* again (`optax.apply_if_finite` gives up in the same way). A gradient that is
  not finite is never used. Look at `alignment_cosine` in a synchronous run before choosing thresholds. In one
  study of ours .05 and .8, which skipped nothing, helped TOPR at a lag of 4 updates, as Adam's b1 = .5 did; at lags 10
  and 32 no values are shown to help (experiments/reproductions/gac.md).

  **Place** clipping, preconditioning and weight decay inside: `control_alignment(optax.chain(clip, adamw))`. The cosine
  does not change with clipping. Under `optax.masked` or `optax.partition` the cosine is that of the leaves that those
  let through.

  **Cost**: one buffer of the gradient's size in *storage_dtype*, three passes over the gradient, and *inner* runs on
  skipped steps too. The result is selected leaf by leaf, which fuses into the kernels of *inner*. `lax.cond` would save
  the work of a skipped step, but every other step would pay for it: its branches cannot fuse with what surrounds them,
  and a second copy of all that they return is alive at the same time. (Around clipping and AdamW, temporaries of 4.0
  instead of 2.5 times the parameters, as compiled for a CPU.)

  **Relatives in optax**: `optax.apply_if_finite` skips gradients that are not finite, `optax.conditionally_mask` skips
  by a condition on the step count and the extra arguments. Neither passes the gradient to its condition, and both use
  `lax.cond`.

  Args:
    inner: the optimizer, which gets the projected gradient and all extra arguments.
    low: the cosine up to which the gradient is kept, >= 0.
    high: the cosine from which the step is skipped, >= *low*; `math.inf` never skips.
    max_consecutive_skips: the number of aligned gradients in a row that are skipped, >= 0. `None` sets no limit.
    storage_dtype: the dtype of the stored gradient, e.g. "bfloat16"; `None` uses the parameters' own.
    kappa: the part of the projection that remains: "cap" limits it to *low* times the gradient's norm, "remove" leaves
      nothing, "match" makes the new cosine equal to *low*. (This choice and the two below are not published.)
    previous: whether the next step compares with the gradient as it came ("raw") or as *inner* got it ("projected").
    refresh_on_skip: whether a skipped gradient becomes the previous one (as it came).

  Returns:
    The transformation.

  Raises:
    ValueError: if an argument is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = stabilizers.control_alignment(optax.sgd(1.0), low=0.2, high=0.9)
    >>> params = jnp.zeros(2)
    >>> state = optimizer.init(params)
    >>> _, state = optimizer.update(jnp.array([1.0, 0.0]), state, params)
    >>> updates, state = optimizer.update(jnp.array([3.0, 4.0]), state, params)  # cosine 0.6; 3 becomes 0.2 * 5
    >>> print(updates)
    [-1. -4.]
    >>> updates, state = optimizer.update(jnp.array([6.0, 8.0]), state, params)  # cosine 1
    >>> print(updates, optax.tree.get(state, "skip_count"))
    [0. 0.] 1

  References:
    Xu et al., GAC: Stabilizing Asynchronous RL Training for LLMs via Gradient Alignment Control, 2026,
    https://arxiv.org/abs/2603.01501. The paper's thresholds and its formula of the middle regime are not public: the
    formula and all default values are our reconstruction.
  """
  _validation.check_number("low", low, at_least=0)
  _validation.check_number("high", high, at_least=low, finite=False)
  if max_consecutive_skips is not None:
    _validation.check_number("max_consecutive_skips", max_consecutive_skips, at_least=0, whole=True)
  _validation.check_choice("kappa", kappa, get_args(Kappa))
  _validation.check_choice("previous", previous, get_args(Previous))
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> ControlAlignmentState:
    return ControlAlignmentState(
      alignment_cosine=jnp.zeros([], jnp.float32),
      alignment_norm=jnp.zeros([], jnp.float32),
      alignment_regime=jnp.full([], int(AlignmentRegime.KEPT), jnp.int32),
      consecutive_aligned_count=jnp.zeros([], jnp.int32),
      skip_count=jnp.zeros([], jnp.int32),
      forced_count=jnp.zeros([], jnp.int32),
      alignment_previous=optax.tree.zeros_like(params, dtype=storage_dtype),
      inner_state=inner.init(params),
    )

  def update(
    updates: optax.Updates, state: ControlAlignmentState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, ControlAlignmentState]:
    products = _gradient_statistics.gradient_products(updates, state.alignment_previous)
    aligned = products.defined & (products.cosine >= high)
    aligned_count = jnp.where(products.finite & ~aligned, 0, state.consecutive_aligned_count)
    aligned_count = jnp.where(aligned, optax.safe_increment(aligned_count), aligned_count)
    forced = aligned & (False if max_consecutive_skips is None else aligned_count > max_consecutive_skips)
    skipped = ~products.finite | (aligned & ~forced)

    removed = 1.0 - _remaining_share(products.cosine, low, kappa)
    projected = _subtract(updates, removed * products.projection, state.alignment_previous)
    new_updates, inner_state = inner.update(projected, state.inner_state, params, **extra_args)
    new_updates = jax.tree.map(lambda u, g: jnp.where(skipped, 0.0, u).astype(g.dtype), new_updates, updates)
    inner_state = _select(skipped, state.inner_state, inner_state)

    following = updates if previous == "raw" else _select(skipped, updates, projected)
    following = jax.tree.map(lambda g, h: g.astype(h.dtype), following, state.alignment_previous)
    keeps = ~products.finite if refresh_on_skip else skipped
    regime = jnp.where(products.cosine > low, AlignmentRegime.PROJECTED, AlignmentRegime.KEPT)
    regime = jnp.where(forced, AlignmentRegime.FORCED, regime)
    regime = jnp.where(skipped, AlignmentRegime.SKIPPED, regime)
    return new_updates, ControlAlignmentState(
      alignment_cosine=products.cosine,
      alignment_norm=jnp.where(products.finite, products.norm, state.alignment_norm),
      alignment_regime=regime.astype(jnp.int32),
      consecutive_aligned_count=aligned_count,
      skip_count=jnp.where(skipped, optax.safe_increment(state.skip_count), state.skip_count),
      forced_count=jnp.where(forced, optax.safe_increment(state.forced_count), state.forced_count),
      alignment_previous=_select(keeps, state.alignment_previous, following),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _remaining_share(cosine: jax.Array, low: float | jax.Array, kappa: Kappa) -> jax.Array:
  """Returns the share of the parallel part that a gradient with this cosine keeps; 1 at or below *low*."""
  above = cosine > low
  safe = jnp.where(above, cosine, 1.0)
  if kappa == "remove":
    share = jnp.zeros_like(cosine)
  elif kappa == "cap":
    share = low / safe
  else:
    share = low / safe * jnp.sqrt((1.0 - safe**2) / jnp.maximum(1.0 - low**2, 1e-12))
  return jnp.where(above, share, 1.0)


def _subtract(x: Any, factor: jax.Array, y: Any) -> Any:
  """Returns x - factor y, leaf by leaf, computed in float32 or wider, in the dtypes of x."""
  wide = _gradient_statistics.at_least_float32
  return jax.tree.map(lambda a, b: (wide(a) - factor * wide(b)).astype(a.dtype), x, y)


def _select(condition: jax.Array, old: Any, new: Any) -> Any:
  """Returns *old* where *condition* holds and *new* elsewhere, leaf by leaf."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), old, new)
