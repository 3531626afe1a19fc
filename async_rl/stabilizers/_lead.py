"""Sampling weights that lead by what the optimizer will do anyway."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from async_rl import _validation
from async_rl.stabilizers import _gradient_statistics


class LeadByMomentumState(NamedTuple):
  """State of `lead_by_momentum`."""

  lead: optax.Updates  # like the parameters, how far ahead of them the sampler's weights are
  inner_state: optax.OptState


def lead_by_momentum(
  inner: optax.GradientTransformation, lag: int | jax.Array, storage_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer to record how far it will carry the parameters until data drawn now are trained on.

  Part of the drift between the weights that draw and the weights that train is known in advance: over the next *lag*
  steps momentum moves the parameters whatever the gradients are. After each update, *inner* runs *lag* times more on
  zero gradients, on a copy of its state; the sum of those updates is the lead. It is exact for any optimizer: bias
  correction, schedules, second moments and weight decay included. (The closed form of constant momentum, the last step
  times β + … + β^k, is too long by 2.1 after one update of Adam, by 1.4 near a cosine schedule's end, and too short by
  .75 in a warm-up.) A sampler that is sent `leading_params` is off-policy only by what the new gradients do. Behavior
  log-probabilities are those of the weights that drew, so importance weights stay exact.

  **It is not shown to help.** On 21 fresh seeds of our sweep at lag 10, the constant-momentum lead changed accuracy,
  over the same momentum without a lead, by +.018 ± .010 (95 %, paired) with sequence-level PPO, exact OPOB and
  momentum .97, by +.006 ± .009 without OPOB, and by -.025 ± .015 at momentum .9. Among 54 comparisons the first is a
  hint, no more. It is an option, not a recommendation.

  The updates of *inner* pass unchanged. Put everything that shapes the step inside; extra arguments are those of the
  last batch for all steps ahead. With leading weights no batch is on-policy, whatever its lag, so give `scale_by_ess` a
  fixed number.

  Args:
    inner: the optimizer, learning rate included.
    lag: k, the typical lag of trained data in steps, an integer >= 0; 0 leads by nothing.
    storage_dtype: the dtype of the lead; `None` uses the parameters' own.

  Returns:
    The transformation. It costs *lag* more updates of *inner* at every step, one buffer the size of the parameters, and
    temporaries of the size of *inner*'s state.

  Raises:
    ValueError: if *lag* is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = stabilizers.lead_by_momentum(optax.sgd(0.1, momentum=0.5), lag=2)
    >>> params = jnp.zeros(1)
    >>> updates, state = optimizer.update(jnp.ones(1), optimizer.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> lead = stabilizers.leading_params(params, state) - params  # a half and a quarter of the step of 0.1
    >>> print(lead.round(3))
    [-0.075]

  References:
    Weight prediction by momentum is known from pipeline-parallel training: Chen et al., Efficient and Robust Parallel
    DNN Training through Model Parallelism on Multi-GPU Platform (SpecTrain), 2018, https://arxiv.org/abs/1809.02839;
    Guan et al., XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training, 2019,
    https://arxiv.org/abs/1911.04610; Yang et al., PipeMare: Asynchronous Pipeline Parallel DNN Training, 2019,
    https://arxiv.org/abs/1910.05124; Kosson et al., Pipelined Backpropagation at Scale: Training Large Models without
    Batches (linear weight prediction), 2020, https://arxiv.org/abs/2003.11666. Here it is applied to the weights that
    draw samples.
  """
  _validation.check_number("lag", lag, at_least=0, whole=True)
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> LeadByMomentumState:
    return LeadByMomentumState(optax.tree.zeros_like(params, dtype=storage_dtype), inner.init(params))

  def update(
    updates: optax.Updates, state: LeadByMomentumState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, LeadByMomentumState]:
    new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    zeros = optax.tree.zeros_like(updates)
    start = None if params is None else optax.apply_updates(params, new_updates)

    def step_ahead(_: jax.Array, carry: tuple[optax.Updates, optax.OptState]) -> tuple[optax.Updates, optax.OptState]:
      lead, inner_state = carry
      at = None if start is None else _add(start, lead)
      step, inner_state = inner.update(zeros, inner_state, at, **extra_args)
      return jax.tree.map(lambda x, u: x + u.astype(x.dtype), lead, step), inner_state

    wide = _gradient_statistics.at_least_float32
    no_lead = jax.tree.map(lambda g: jnp.zeros_like(wide(g)), updates)
    lead, _ = jax.lax.fori_loop(0, lag, step_ahead, (no_lead, inner_state))
    lead = jax.tree.map(lambda x, old: jnp.where(jnp.isfinite(x), x, 0.0).astype(old.dtype), lead, state.lead)
    return new_updates, LeadByMomentumState(lead, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def has_lead(opt_state: optax.OptState) -> bool:
  """Returns whether a `lead_by_momentum` is in the optimizer to which *opt_state* belongs.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> stabilizers.has_lead(stabilizers.lead_by_momentum(optax.adam(1e-3), lag=4).init(jnp.zeros(1)))
    True
    >>> stabilizers.has_lead(optax.adam(1e-3).init(jnp.zeros(1)))
    False
  """
  return bool(_lead_states(opt_state))


def leading_params(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
  """Returns the weights to draw with: *params* and the lead that a `lead_by_momentum` in the optimizer recorded.

  With Flax NNX, pass both through `nnx.as_pure`: `leading_params(nnx.as_pure(nnx.state(model, nnx.Param)),
  nnx.as_pure(optimizer.opt_state))`. An Equinox module can be passed as it is.

  Args:
    params: the parameters after the update, a tree of arrays.
    opt_state: the state of the optimizer, however nested.

  Returns:
    A tree like *params*. Parameters that the transformation was not given (by `optax.masked`, `optax.partition` or as
    None) do not lead.

  Raises:
    ValueError: if *opt_state* holds no lead, or one for parameters of another structure.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), lag=1)
    >>> params = jnp.array([4.0])
    >>> updates, state = optimizer.update(jnp.array([2.0]), optimizer.init(params), params)
    >>> stabilizers.leading_params(optax.apply_updates(params, updates), state)  # 4 - 2, and half of that step more
    Array([1.], dtype=float32)
  """
  states = _lead_states(opt_state)
  if not states:
    raise ValueError(
      "*opt_state* must hold the state of a lead_by_momentum, got none; "
      "add one to the optimizer, or, with Flax NNX, pass nnx.as_pure(optimizer.opt_state)."
    )
  for state in states:  # several with optax.partition
    try:
      params = _add(params, state.lead)
    except ValueError as error:
      raise ValueError(
        "*params* must have the structure of the parameters that the optimizer was made for; "
        f"with Flax NNX, pass nnx.as_pure of both. ({error})"
      ) from error
  return params


def _lead_states(opt_state: optax.OptState) -> list[LeadByMomentumState]:
  def is_lead(x: Any) -> bool:
    return isinstance(x, LeadByMomentumState)

  return [state for state in jax.tree.leaves(opt_state, is_leaf=is_lead) if is_lead(state)]


def _add(params: optax.Params, lead: optax.Updates) -> optax.Params:
  """Returns *params* plus *lead*, in the dtypes of *params*; parameters without a lead stay as they are."""

  def has_none(x: Any) -> bool:
    return x is None or isinstance(x, optax.MaskedNode)

  return jax.tree.map(lambda x, p: p if has_none(x) else p + x.astype(p.dtype), lead, params, is_leaf=has_none)
