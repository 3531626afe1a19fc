"""Control of the alignment of consecutive gradients (GAC)."""

from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from async_rl import _validation
from async_rl.stabilizers import _statistics

#: Values of `ControlAlignmentState.alignment_regime`.
KEPT, PROJECTED, SKIPPED = 0, 1, 2


class ControlAlignmentState(NamedTuple):
  """State of `control_alignment`. The scalars describe the last update and can be read by `optax.tree.get`."""

  alignment_cosine: jax.Array  # shape=(), dtype=float32, 0 where undefined
  alignment_norm: jax.Array  # shape=(), dtype=float32, of the last finite gradient, before projection
  alignment_regime: jax.Array  # shape=(), dtype=int32: KEPT, PROJECTED or SKIPPED
  skip_count: jax.Array  # shape=(), dtype=int32, skipped steps so far
  reference_gradient: optax.Updates  # like the gradient, in storage_dtype
  inner_state: optax.OptState


def control_alignment(
  inner: optax.GradientTransformation,
  low: float | jax.Array = 0.2,
  high: float | jax.Array = 0.8,
  *,
  kappa: Literal["cap", "remove", "match"] = "cap",
  reference: Literal["raw", "projected"] = "raw",
  refresh_on_skip: bool = True,
  storage_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer to suppress the part of the gradient that repeats the previous one (GAC).

  Consecutive gradients are near orthogonal in synchronous training and stay aligned under staleness. With
  gradient g, reference h (the previous gradient) and their global cosine c:

  - :math:`c \le \mathrm{low}`: g is kept;
  - between: :math:`g \leftarrow g - (1 - \kappa) \frac{\langle g, h \rangle}{\lVert h \rVert^2} h`;
  - :math:`c \ge \mathrm{high}`: the step is skipped. The updates are zero, and the state of `inner`, moments and
    counters, stays as it was. (Zeros handed to Adam are no skip: its moments would decay and still move the weights.)

  A gradient without a finite float32 norm is skipped too, and leaves the reference alone. On the first step and where
  a norm is zero, there is no cosine (it is reported as 0) and g is kept.

  Clipping, preconditioning and weight decay belong inside: `control_alignment(optax.chain(clip, adamw))`. Under
  `optax.masked` or `optax.partition` the cosine is of the leaves that those let through. As long as gradients stay
  aligned, steps stay skipped: watch `skip_count`.

  The paper's thresholds and formula of the middle regime are not public. This is our reconstruction, and so are
  the default values; every choice is an argument.

  Args:
    inner: the optimizer, which gets the projected gradient and all extra arguments.
    low: cosine up to which the gradient is kept, >= 0.
    high: cosine from which the step is skipped, >= low; `math.inf` never skips.
    kappa: what remains of the parallel part: "cap" limits it to low times the gradient's norm, "remove" leaves nothing,
      "match" makes the new cosine equal to low.
    reference: whether the next step compares with the gradient as it came ("raw") or as `inner` got it ("projected").
    refresh_on_skip: whether a skipped gradient becomes the reference (as it came).
    storage_dtype: dtype of the stored reference, e.g. "bfloat16"; the parameters' own if None.

  Returns:
    The transformation. It costs one buffer of the gradient's size in `storage_dtype`.

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
    https://arxiv.org/abs/2603.01501
  """
  _validation.check_number("low", low, at_least=0)
  _validation.check_number("high", high, at_least=low, finite=False)
  _validation.check_choice("kappa", kappa, ("cap", "remove", "match"))
  _validation.check_choice("reference", reference, ("raw", "projected"))
  inner = optax.with_extra_args_support(inner)

  def kept_share(cosine: jax.Array) -> jax.Array:
    """The kappa of a gradient with this cosine; 1 at or below low."""
    safe = jnp.where(cosine > low, cosine, 1.0)
    share = {
      "remove": lambda: jnp.zeros_like(cosine),
      "cap": lambda: low / safe,
      "match": lambda: low / safe * jnp.sqrt((1.0 - safe**2) / jnp.maximum(1.0 - low**2, 1e-12)),
    }[kappa]()
    return jnp.where(cosine > low, share, 1.0)

  def init(params: optax.Params) -> ControlAlignmentState:
    return ControlAlignmentState(
      alignment_cosine=jnp.zeros([], jnp.float32),
      alignment_norm=jnp.zeros([], jnp.float32),
      alignment_regime=jnp.full([], KEPT, jnp.int32),
      skip_count=jnp.zeros([], jnp.int32),
      reference_gradient=optax.tree.zeros_like(params, dtype=storage_dtype),
      inner_state=inner.init(params),
    )

  def update(
    updates: optax.Updates, state: ControlAlignmentState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, ControlAlignmentState]:
    previous = state.reference_gradient
    products = _statistics.gradient_products(updates, previous)
    skipped = ~products.finite | (products.defined & (products.cosine >= high))
    subtracted = (1.0 - kept_share(products.cosine)) * products.projection
    wide = _statistics.at_least_float32
    projected = jax.tree.map(lambda g, h: (wide(g) - subtracted * wide(h)).astype(g.dtype), updates, previous)
    new_updates, inner_state = inner.update(projected, state.inner_state, params, **extra_args)
    # Selecting leaf by leaf can fuse into the kernels of `inner`. The branches of a `lax.cond` cannot, and hold a
    # second copy of all that they return.
    new_updates = jax.tree.map(lambda u, g: jnp.where(skipped, 0.0, u).astype(g.dtype), new_updates, updates)
    inner_state = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state.inner_state, inner_state)
    keeps = ~products.finite if refresh_on_skip else skipped
    reference_gradient = jax.tree.map(
      lambda g, p, h: jnp.where(keeps, h, (g if reference == "raw" else jnp.where(skipped, g, p)).astype(h.dtype)),
      updates,
      projected,
      previous,
    )
    regime = jnp.where(skipped, SKIPPED, jnp.where(products.cosine > low, PROJECTED, KEPT)).astype(jnp.int32)
    return new_updates, ControlAlignmentState(
      alignment_cosine=products.cosine,
      alignment_norm=jnp.where(products.finite, products.norm, state.alignment_norm),
      alignment_regime=regime,
      skip_count=jnp.where(skipped, optax.safe_increment(state.skip_count), state.skip_count),
      reference_gradient=reference_gradient,
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init, update)
