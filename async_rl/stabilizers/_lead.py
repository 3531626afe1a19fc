"""Sampling weights that lead by what momentum will do anyway."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from async_rl import _validation


class LeadByMomentumState(NamedTuple):
  """State of `lead_by_momentum`."""

  lead: optax.Updates  # like the parameters, how far ahead of them the sampler's weights are


def lead_by_momentum(
  decay: float | jax.Array, lag: float | jax.Array, storage_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
  """Records how far momentum alone will carry the parameters until data drawn now are trained on.

  Part of the drift between the weights that draw and the weights that train is known in advance: with decay β, the
  last step u goes on as β u, β² u, …, β^k u over the next k steps, whatever their gradients are. A sampler that is sent
  `leading_params`, params + (β + β² + … + β^k) u, is off-policy only by what the new gradients do. Behavior
  log-probabilities are those of the weights that drew, so importance weights stay exact.

  The updates pass unchanged. Place it last in the chain, after the learning rate and `scale_by_ess`, within
  `control_alignment`. With Adam it takes the second moment as constant over the lag. Where samplers lead, no batch is
  on-policy, at no lag: give `scale_by_ess` a fixed `reference` and no `reference_decay`. Not from a paper: see
  experiments/reproductions/lag_sweep.md for what it does, and does not do, at which lag.

  Args:
    decay: β of the momentum; Adam's b1. In [0, 1).
    lag: k, typical lag of trained data in steps, >= 0; 0 leads by nothing.
    storage_dtype: of the lead; `None`: that of the parameters.

  Returns:
    The transformation. It keeps one buffer the size of the parameters.

  Raises:
    ValueError: if an argument is out of range.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = optax.chain(optax.sgd(0.1, momentum=0.5), stabilizers.lead_by_momentum(0.5, lag=2))
    >>> params = jnp.zeros(1)
    >>> updates, state = optimizer.update(jnp.ones(1), optimizer.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> lead = stabilizers.leading_params(params, state) - params  # a half and a quarter of the step of 0.1
    >>> print(lead.round(3))
    [-0.075]
  """
  _validation.check_number("decay", decay, at_least=0, below=1)
  _validation.check_number("lag", lag, at_least=0)
  reach = decay * (1.0 - decay**lag) / (1.0 - decay)

  def init(params: optax.Params) -> LeadByMomentumState:
    return LeadByMomentumState(optax.tree.zeros_like(params, dtype=storage_dtype))

  def update(
    updates: optax.Updates, state: LeadByMomentumState, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, LeadByMomentumState]:
    del params, extra_args
    ahead = lambda u, old: jnp.where(jnp.isfinite(u), reach * u, 0.0).astype(old.dtype)
    return updates, LeadByMomentumState(jax.tree.map(ahead, updates, state.lead))

  return optax.GradientTransformationExtraArgs(init, update)


def leading_params(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
  """The weights to draw with: `params` and the lead that a `lead_by_momentum` in the optimizer recorded, if any.

  Args:
    params: after the update; a tree of arrays.
    opt_state: of the optimizer, any nesting.

  Returns:
    A tree like `params`; `params` itself without a lead. Parameters that the transformation was not given (by
    `optax.masked` or `optax.partition`) do not lead.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from async_rl import stabilizers
    >>> optimizer = optax.chain(optax.sgd(1.0, momentum=0.5), stabilizers.lead_by_momentum(0.5, lag=1))
    >>> params = jnp.array([4.0])
    >>> updates, state = optimizer.update(jnp.array([2.0]), optimizer.init(params), params)
    >>> stabilizers.leading_params(optax.apply_updates(params, updates), state)  # 4 - 2, and half of that step more
    Array([1.], dtype=float32)
  """
  is_lead = lambda x: isinstance(x, LeadByMomentumState)
  held_back = lambda x: isinstance(x, optax.MaskedNode)
  add = lambda ahead, p: p if held_back(ahead) else p + ahead.astype(p.dtype)
  for state in filter(is_lead, jax.tree.leaves(opt_state, is_leaf=is_lead)):  # several with optax.partition
    params = jax.tree.map(add, state.lead, params, is_leaf=held_back)
  return params
