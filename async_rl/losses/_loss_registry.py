"""The whole family by name, for configs and for benchmarks that compare all of it.

Some entries need more than the four arrays of the shared signature, for instance the lag of each token. `needs` reads
these names from the function itself, so that a trainer can pass what it has::

    loss_fn = CORRECTIONS["a3po"]
    out = loss_fn(logprobs, behavior, advantages, mask, **{name: extras[name] for name in needs(loss_fn)})
"""

import functools
import inspect
import math
import types
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax

from async_rl.losses._advantages import grpo_advantages
from async_rl.losses._advantages import importance_mean_advantages
from async_rl.losses._advantages import maxrl_advantages
from async_rl.losses._advantages import opo_advantages
from async_rl.losses._advantages import reinforce_advantages
from async_rl.losses._advantages import rloo_advantages
from async_rl.losses._clipped import gspo
from async_rl.losses._clipped import log_ratio_quantile
from async_rl.losses._clipped import ppo_clip
from async_rl.losses._clipped import proximal_rloo
from async_rl.losses._clipped import sat
from async_rl.losses._decoupled import a3po
from async_rl.losses._decoupled import decoupled_ppo
from async_rl.losses._opob import opob_advantages
from async_rl.losses._opob import opob_by_length_advantages
from async_rl.losses._opob import opob_by_logits_advantages
from async_rl.losses._policy_gradient import PolicyLossFn
from async_rl.losses._policy_gradient import cispo
from async_rl.losses._policy_gradient import reinforce
from async_rl.losses._policy_gradient import sequence_tis
from async_rl.losses._policy_gradient import token_tis
from async_rl.losses._policy_gradient import topr
from async_rl.losses._rejection import geometric_mask
from async_rl.losses._rejection import icepop
from async_rl.losses._rejection import m2po
from async_rl.losses._rejection import opsm
from async_rl.losses._rejection import second_moment_threshold
from async_rl.losses._rejection import sequence_mask
from async_rl.losses._soft import log_squared
from async_rl.losses._soft import sapo
from async_rl.losses._soft import vespo
from async_rl.losses._trust_regions import dppo
from async_rl.losses._trust_regions import estr
from async_rl.losses._trust_regions import trm

#: Policy losses with their default options. What an entry needs beyond the shared signature: `needs`.
CORRECTIONS: Mapping[str, PolicyLossFn] = types.MappingProxyType(
  {
    "reinforce": reinforce,
    "untruncated_is": functools.partial(sequence_tis, cap=math.inf),
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
    "cispo": cispo,
    "topr": topr,
    "m2po": m2po,
    "m2po_signed": functools.partial(m2po, signed=True),
    "dppo": dppo,
    "dppo_kl": functools.partial(dppo, kl=True, bound=0.05),
    "estr": estr,
    "trm": trm,
    "log_squared": log_squared,
    "sapo": sapo,
    "vespo": vespo,
    "ppo_clip": ppo_clip,
    "sat": sat,
    "dapo": functools.partial(ppo_clip, high=0.28),
    "opsm": opsm,
    "gspo": gspo,
    "gspo_token": functools.partial(gspo, token=True),
    "proximal_rloo": proximal_rloo,
    "decoupled_recompute": decoupled_ppo,
    "decoupled_linear": functools.partial(a3po, linear=True),
    "decoupled_behavior": ppo_clip,
    "a3po": a3po,
  }
)

#: Advantage functions (rewards, groups, num_groups, **needs) -> [B].
ADVANTAGES: Mapping[str, Callable[..., jax.Array]] = types.MappingProxyType(
  {
    "reinforce": reinforce_advantages,
    "grpo": grpo_advantages,
    "dr_grpo": functools.partial(grpo_advantages, normalize_std=False),
    "rloo": rloo_advantages,
    "maxrl": maxrl_advantages,
    "opo": opo_advantages,
    "importance_mean": importance_mean_advantages,
    "opob": opob_advantages,
    "opob_by_length": opob_by_length_advantages,
    "opob_by_logits": opob_by_logits_advantages,
  }
)

#: Statistics of the whole batch that a correction can need, by that name: functions (log_ratios, mask) of raw
#: log-ratios under the weights at the start of the step, [B, T] each.
STATISTICS: Mapping[str, Callable[..., jax.Array]] = types.MappingProxyType(
  {"threshold": second_moment_threshold, "log_ratio_scale": log_ratio_quantile}
)


def needs(function: Callable[..., Any]) -> tuple[str, ...]:
  """Names of the keyword arguments that *function* requires beyond the shared signature.

  >>> needs(CORRECTIONS["a3po"]), needs(CORRECTIONS["ppo_clip"]), needs(ADVANTAGES["opo"])
  (('lag',), (), ('lengths',))
  """
  parameters = inspect.signature(function).parameters.values()
  return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
