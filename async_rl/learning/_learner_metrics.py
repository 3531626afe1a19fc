"""What a learner step reports, with the definition of every metric.

mu is the policy that drew the tokens and pi the one that is trained, at the start of the step; l = log pi - log mu of a
token. Means are over the trained tokens of the whole batch (or the sequences that have any), and 0 where there are
none.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from async_rl import losses
from async_rl.types import NO_GROUP
from async_rl.types import Batch

Array = jax.Array

#: The metrics of a learner step: what each one is, and how it is estimated. `/lag_*` stands for one metric per bucket
#: of lag, 0 where the bucket is empty; sequences count by the lag of their oldest token.
METRICS: Mapping[str, str] = types.MappingProxyType(
  {
    "loss": "The aggregated loss, with a value head that of the values included.",
    "grad/norm": "The Euclidean norm of the gradient, before the optimizer.",
    "update/norm": "The Euclidean norm of the change of the parameters.",
    "update/skipped": "1 if the step was skipped because its gradient or update was not finite, else 0.",
    "reward/mean": "The mean reward of the samples whose reward did not fail.",
    "reward/std": "The standard deviation of these rewards.",
    "reward/frac_zero_std": "The share of the groups whose rewards are all equal.",
    "advantage/abs_mean": "The mean absolute advantage of these samples, or of the tokens if each has its own.",
    "value/mean": "The mean value of the texts before the tokens. These three only with a value head.",
    "value/loss": "Half the mean squared difference of values and returns.",
    "value/explained": "The share of the returns' variance that is not in their difference to the values.",
    "staleness/mean": "The mean lag of the tokens: the learner's version minus the version that drew the token.",
    "staleness/max": "The largest lag of a token.",
    "staleness/min": "The smallest lag of a token.",
    "staleness/share/lag_*": "The share of the tokens in the bucket.",
    "ess/sequence": "The effective sample size of the raw sequence weights exp(sum of l), as a share of the sequences; "
    "at the expectation 1 / (1 + chi-squared(pi || mu)).",
    "ess/token": "The effective sample size of the raw token ratios exp(l), as a share of the tokens.",
    "ess/sequence/lag_*": "`ess/sequence` of the bucket's sequences.",
    "ess/token/lag_*": "`ess/token` of the bucket's tokens.",
    "ratio/mean": "The mean ratio exp(l) of the tokens; its expectation is 1.",
    "ratio/max": "The largest ratio.",
    "ratio/mean/lag_*": "`ratio/mean` of the bucket's tokens.",
    "ratio/max/lag_*": "`ratio/max` of the bucket's tokens.",
    "log_weight/abs_max": "The largest absolute sequence log-weight, |sum of l|.",
    "clip_fraction": "The share of the tokens whose ratio or weight was cut by a clip or a cap of the loss.",
    "reject_fraction": "The share of the tokens that the loss rejected.",
    "logprob_difference/lag_zero": "The mean |l| of the tokens without lag: how far sampler and learner disagree.",
    "logprob_difference/stale": "The mean |l| of the tokens with a lag.",
    "entropy": "The mean entropy of pi's distributions at the tokens' prefixes, in nats, each exact.",
    "kl/behavior": "The mean KL(mu || pi) of the distributions at the tokens' prefixes, in nats; estimated, without "
    "bias and never negative, by exp(l) - 1 - l.",
    "kl/reference": "KL(mu || reference policy) of whole sequences, in nats; estimated, without bias, by the mean over "
    "the sequences of log mu - log pi_ref. Only with a reference policy.",
    "response/length_mean": "The mean number of trained tokens of the sequences that have any.",
    "response/length_max": "The largest number of trained tokens of a sequence.",
    "response/truncated": "The share of the completions that hit the length limit.",
    "tokens/trained": "The number of tokens with a gradient: in the mask, and not rejected.",
    "tokens/fill": "The share of the computed token plane that holds tokens.",
    "optimizer/learning_rate": "The learning rate of the step, before stabilizers scale it: that of a schedule, or an "
    "injected one (`optax.inject_hyperparams`). A constant is not reported.",
    "grad/cosine_to_previous": "The cosine to the previous gradient, by `control_alignment` or `track_cosine`.",
    "grad/spikes": "The number of spikes of the gradient norm so far, from `track_norm`.",
    "stabilizers/*": "Any other scalar in the state of a stabilizer, by the name of its field.",
  }
)

#: First lag of each bucket after the one of lag 0.
LAG_EDGES = (1, 4, 16, 64)

#: Fields of stabilizers' states whose metric has another name than `stabilizers/FIELD`.
_RENAMED = {
  "alignment_cosine": "grad/cosine_to_previous",
  "grad_cosine": "grad/cosine_to_previous",
  "grad_spike_count": "grad/spikes",
  "skip_count": "stabilizers/skips",
  "forced_count": "stabilizers/forced",
  "ess_undefined_count": "stabilizers/ess_undefined",
}


class Collected(NamedTuple):
  """Per-token results of the loss's forward passes over all micro-batches, in the loss plane, [B, C]."""

  logprobs: Array
  entropy: Array
  clipped: Array
  keep: Array


def optimizer_metrics(opt_state: optax.OptState, rates: Sequence[Array] = ()) -> dict[str, Array]:
  """Returns the scalars in the states of stabilizers, and the learning rates, float32 [] each.

  A stabilizer's state is any NamedTuple that is not optax's own. A name that occurs again, such as that of a second
  `track_norm`, gets the suffix /2, /3 and so on, in the order of the chain.

  Args:
    opt_state: the state after the step, which also holds injected learning rates.
    rates: the learning rates that schedules gave the step, see `scheduled_rates`.
  """
  metrics: dict[str, Array] = {}
  seen: dict[str, int] = {}
  for name, value in (*_optimizer_scalars(opt_state), *(("optimizer/learning_rate", rate) for rate in rates)):
    seen[name] = seen.get(name, 0) + 1
    metrics[name if seen[name] == 1 else f"{name}/{seen[name]}"] = value.astype(jnp.float32)
  return metrics


def _optimizer_scalars(state: Any) -> Iterator[tuple[str, Array]]:
  if isinstance(state, tuple) and hasattr(state, "_fields"):
    if type(state).__module__.partition(".")[0] != "optax":
      for field, value in zip(state._fields, state):
        if _is_scalar(value):
          yield _RENAMED.get(field, f"stabilizers/{field}"), value
    hyperparams = getattr(state, "hyperparams", None)
    if isinstance(hyperparams, dict) and _is_scalar(hyperparams.get("learning_rate")):
      yield "optimizer/learning_rate", hyperparams["learning_rate"]
  if isinstance(state, tuple | list | dict):
    for child in state.values() if isinstance(state, dict) else state:
      yield from _optimizer_scalars(child)


def _is_scalar(value: Any) -> bool:
  """Whether a state's field is a number; typed random keys are none."""
  if not isinstance(value, jax.Array) or value.shape:
    return False
  return jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_


def batch_metrics(
  batch: Batch,
  collected: Collected,
  lag: Array,
  advantages: Array,
  reference: Array | None,
  edges: Sequence[int] = LAG_EDGES,
) -> dict[str, Array]:
  """Returns the metrics of a whole batch that `METRICS` defines, float32 [] each.

  Args:
    batch: the batch.
    collected: the results of the loss's forward passes.
    lag: int32 [B, C].
    advantages: float32 [B], or [B, C].
    reference: float32 [B, C], log-probabilities under the reference policy; `None` without one.
    edges: the first lag of each bucket after the one of lag 0; without any, nothing is reported by lag.
  """
  mask = batch.mask
  tokens = jnp.sum(mask, axis=1)
  rows = tokens > 0
  rewarded = batch.groups != NO_GROUP
  mean_reward = _mean(batch.rewards, rewarded)
  log_ratios = losses.log_ratios(collected.logprobs, batch.logprobs, mask)
  log_weights = losses.sequence_log_weights(log_ratios)
  fresh = mask & (lag == 0)
  ratio = losses.clamped_exp(log_ratios)
  zero_variance = losses.zero_variance_fraction(batch.rewards, batch.groups, batch.rewards.shape[0])
  metrics = {
    "reward/mean": mean_reward,
    "reward/std": jnp.sqrt(_mean(jnp.square(batch.rewards - mean_reward), rewarded)),
    "reward/frac_zero_std": zero_variance,
    "advantage/abs_mean": _mean(jnp.abs(advantages), rewarded if advantages.ndim == 1 else mask),
    "staleness/mean": _mean(lag, mask),
    "staleness/max": _largest(lag, mask),
    "staleness/min": -_largest(-lag, mask),
    "ess/sequence": losses.ess_ratio(log_weights, rows),
    "ess/token": losses.ess_ratio(log_ratios, mask),
    "ratio/mean": _mean(ratio, mask),
    "ratio/max": _largest(ratio, mask),
    "log_weight/abs_max": jnp.max(jnp.abs(log_weights)),
    "clip_fraction": _mean(collected.clipped, mask),
    "reject_fraction": 1.0 - _mean(collected.keep, mask),
    "logprob_difference/lag_zero": _mean(jnp.abs(log_ratios), fresh),
    "logprob_difference/stale": _mean(jnp.abs(log_ratios), mask & ~fresh),
    "entropy": _mean(collected.entropy, mask),
    "kl/behavior": _mean(losses.kl_estimate(batch.logprobs, collected.logprobs, mask, estimator="k3"), mask),
    "response/length_mean": _mean(tokens, rows),
    "response/length_max": jnp.max(tokens).astype(jnp.float32),
    "response/truncated": _mean(batch.truncated, rewarded),
    "tokens/trained": jnp.sum(collected.keep & mask, dtype=jnp.float32),
    "tokens/fill": _fill(batch),
    **(_by_lag(ratio, log_ratios, mask, lag, edges) if edges else {}),
  }
  if reference is not None:
    distances = losses.log_ratios(batch.logprobs, reference, mask)
    metrics["kl/reference"] = _mean(losses.sequence_log_weights(distances), rows)
  return metrics


def value_metrics(values: Array, returns: Array, mask: Array) -> dict[str, Array]:
  """Returns the metrics of a value head, float32 [] each; all arguments are [B, C]."""
  left, spread = (_mean(jnp.square(x - _mean(x, mask)), mask) for x in (returns - values, returns))
  return {
    "value/mean": _mean(values, mask),
    "value/loss": _mean(losses.value_loss(values, values, returns, mask, clip=None), mask),
    "value/explained": losses.divide_or_zero(spread - left, spread),
  }


def _by_lag(ratio: Array, log_ratios: Array, mask: Array, lag: Array, edges: Sequence[int]) -> dict[str, Array]:
  """Ratios, effective sample sizes and shares of the tokens, by bucket of lag."""
  statistics = losses.ess_statistics(log_ratios, mask, lag=lag, edges=edges)
  metrics = {name: value for name, value in statistics.items() if "/lag_" in name}
  for name, inside in losses.lag_buckets(lag, edges).items():
    metrics |= {
      f"staleness/share/{name}": _mean(inside, mask),
      f"ratio/mean/{name}": _mean(ratio, mask & inside),
      f"ratio/max/{name}": _largest(ratio, mask & inside),
    }
  return metrics


def _mean(values: Array, where: Array) -> Array:
  """Mean of the entries that count; 0 where none does."""
  total = jnp.sum(jnp.where(where, values.astype(jnp.float32), 0.0))
  return losses.divide_or_zero(total, jnp.sum(where, dtype=jnp.float32))


def _largest(values: Array, where: Array) -> Array:
  """Largest of the entries that count; 0 where none does."""
  largest = jnp.max(jnp.where(where, values.astype(jnp.float32), -jnp.inf), initial=-jnp.inf)
  return jnp.where(jnp.any(where), largest, 0.0)


def _fill(batch: Batch) -> Array:
  """Share of the computed token plane that holds tokens."""
  computed = batch.used * batch.tokens.shape[1] * batch.tokens.shape[2]
  return jnp.sum(batch.segments > 0, dtype=jnp.float32) / jnp.maximum(computed, 1)
