"""The form in which samplers take the weights."""

from __future__ import annotations

from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import as_used
from async_rl.models import unstack_layers


def prepare_weights(policy: Policy, params: Params) -> Params:
  """Returns the sampler's copy of the master weights: layers unstacked, matrices and biases in the compute dtype.

  Scales of norms stay float32, as the learner uses them, so that the two agree on every log-probability as far as
  the dtype allows. Traceable: run it under `jit` where the master weights live, and half of the bytes travel.
  Nothing of the result aliases `params`, which may be donated afterwards.

  Args:
    policy: the architecture.
    params: the parameters, as from `Policy.init`.
  """
  return as_used(unstack_layers(params), policy.dtype)
