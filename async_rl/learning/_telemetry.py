"""What a learner step reports, under the names that people look for."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from async_rl import losses
from async_rl import stabilizers
from async_rl.types import NO_GROUP
from async_rl.types import Batch

Array = jax.Array


class Collected(NamedTuple):
  """Per-token results of the loss's forward passes over all micro-batches, in the loss plane, [B, C]."""

  logprobs: Array
  entropy: Array
  clipped: Array
  keep: Array


#: Fields of stabilizers' states and the metrics they become.
_OPTIMIZER_METRICS = {
  "alignment_cosine": "grad/cosine_to_previous",
  "alignment_regime": "stabilizers/alignment_regime",
  "skip_count": "stabilizers/skips",
  "ess_scale": "stabilizers/ess_scale",
  "forced_count": "stabilizers/forced",
  "ess_undefined_count": "stabilizers/ess_undefined",
  "on_policy_ess_ratio": "stabilizers/on_policy_ess_ratio",
  "grad_cosine": "grad/cosine_to_previous",
  "grad_spike_count": "grad/spikes",
}


def optimizer_metrics(opt_state: optax.OptState) -> dict[str, Array]:
  """The scalars that stabilizers leave in their state; a field that occurs twice is ambiguous and left out."""
  metrics = {}
  for field, name in _OPTIMIZER_METRICS.items():
    found = optax.tree.get_all_with_path(opt_state, field)
    if len(found) == 1:
      metrics[name] = found[0][1].astype(jnp.float32)
  return metrics


def batch_metrics(
  batch: Batch, collected: Collected, lag: Array, log_weights: Array, advantages: Array, reference: Array | None
) -> dict[str, Array]:
  """Metrics of a whole batch, float32 [] each.

  Args:
    batch: the batch.
    collected: what the loss's forward pass found, in the loss plane.
    lag: int32 [B, C].
    log_weights: float32 [B], raw sequence log-weights.
    advantages: float32 [B].
    reference: float32 [B, C], log-probabilities under the reference policy if there is one.
  """
  mask = batch.mask
  tokens = jnp.sum(mask, axis=1)
  rows = tokens > 0
  rewarded = batch.groups != NO_GROUP
  log_ratio = jnp.where(mask, collected.logprobs - batch.logprobs, 0.0)
  fresh = mask & (lag == 0)
  mean = lambda x, where: losses.divide_or_zero(
    jnp.sum(jnp.where(where, x.astype(jnp.float32), 0.0)), jnp.sum(where, dtype=jnp.float32)
  )
  largest = lambda x, where: jnp.max(jnp.where(where, x, -jnp.inf).astype(jnp.float32), initial=-jnp.inf)
  ratio = losses.clamped_exp(log_ratio)
  zero_variance = losses.zero_variance_fraction(batch.rewards, batch.groups, batch.rewards.shape[0])
  metrics = {
    "reward/mean": jnp.mean(batch.rewards, where=rewarded),
    "reward/std": jnp.std(batch.rewards, where=rewarded),
    "reward/frac_zero_std": zero_variance,
    "advantage/abs_mean": jnp.mean(jnp.abs(advantages), where=rewarded),
    "staleness/mean": mean(lag, mask),
    "staleness/max": jnp.max(lag).astype(jnp.float32),
    "staleness/min": -jnp.maximum(largest(-lag, mask), jnp.float32(-(2**31))),
    "ess/sequence": stabilizers.ess_ratio(log_weights, rows),
    "ess/token": stabilizers.ess_ratio(log_ratio, mask),
    "ratio/mean": mean(ratio, mask),
    "ratio/max": jnp.maximum(largest(ratio, mask), 0.0),
    "log_weight/abs_max": jnp.max(jnp.abs(log_weights)),
    "clip_fraction": mean(collected.clipped, mask),
    "reject_fraction": 1.0 - mean(collected.keep, mask),
    "logprob_difference/lag_zero": mean(jnp.abs(log_ratio), fresh),
    "logprob_difference/stale": mean(jnp.abs(log_ratio), mask & ~fresh),
    "entropy": mean(collected.entropy, mask),
    "kl/behavior": mean(jnp.exp(jnp.clip(-log_ratio, -20.0, 20.0)) - 1.0 + log_ratio, mask),
    "response/length_mean": mean(tokens, rows),
    "response/length_max": jnp.max(tokens).astype(jnp.float32),
    "response/truncated": jnp.mean(batch.truncated.astype(jnp.float32), where=rewarded),
    "tokens/trained": jnp.sum(collected.keep & mask, dtype=jnp.float32),
    "tokens/fill": _fill(batch),
  }
  if reference is not None:
    # Unbiased for KL(mu || reference) of whole sequences, because mu drew them.
    metrics["kl/reference"] = mean(jnp.sum(jnp.where(mask, batch.logprobs - reference, 0.0), axis=1), rows)
  return metrics


def _fill(batch: Batch) -> Array:
  """Share of the computed token plane that holds tokens."""
  computed = batch.used * batch.tokens.shape[1] * batch.tokens.shape[2]
  return jnp.sum(batch.segments > 0, dtype=jnp.float32) / jnp.maximum(computed, 1)
