"""Effective sample size of importance weights: how much of a stale batch still counts.

ESS/n = (Σw)² / (n Σw²), in log space: 1 when all weights are equal, 1/n when one weight is everything. The token level
alone is no alarm (it stays near 1 while training collapses); watch the sequence level, on raw weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._arrays import check_mask
from async_rl._arrays import ess_ratio
from async_rl._validation import check_number
from async_rl.losses._ratios import sequence_log_weights


def ess_statistics(
  log_ratios: ArrayLike,
  mask: ArrayLike,
  *,
  lag: ArrayLike | None = None,
  edges: Sequence[int] = (1, 4, 16, 64),
  token_cap: float = 2.0,
  sequence_cap: float = 8.0,
) -> dict[str, jax.Array]:
  """ESS ratios of a whole batch, raw and truncated, at token and at sequence level, and per lag.

  Args:
    log_ratios: [B, T] raw log-ratios of the whole optimizer batch.
    mask: bool [B, T].
    lag: int [B, T]; adds one entry per bucket of lag. A sequence has the lag of its oldest token.
    edges: first lag of each bucket after the one that starts at 0; static.
    token_cap: truncation of the token weights.
    sequence_cap: truncation of the sequence weights.

  Returns:
    `ess/sequence`, `ess/token`, `ess_truncated/sequence`, `ess_truncated/token`, and, given *lag*, the raw ones per
    bucket as `ess/sequence/lag_4-15` or `ess/token/lag_64+` (0 where a bucket is empty).

  >>> sorted(ess_statistics(jnp.zeros((2, 1)), jnp.ones((2, 1), bool), lag=jnp.array([[0], [7]]), edges=(1,)))[:3]
  ['ess/sequence', 'ess/sequence/lag_0', 'ess/sequence/lag_1+']
  """
  for name, cap in (("token_cap", token_cap), ("sequence_cap", sequence_cap)):
    check_number(name, cap, above=0)
  check_mask(mask, log_ratios=log_ratios)
  levels = {
    "sequence": (sequence_log_weights(log_ratios), jnp.any(mask, axis=-1), sequence_cap),
    "token": (jnp.asarray(log_ratios, jnp.float32), jnp.asarray(mask), token_cap),
  }
  statistics = {}
  for level, (log_weights, counted, cap) in levels.items():
    statistics[f"ess/{level}"] = ess_ratio(log_weights, counted)
    statistics[f"ess_truncated/{level}"] = ess_ratio(log_weights, counted, cap=cap)
  if lag is None:
    return statistics
  check_mask(mask, lag=lag)
  lags = {"sequence": jnp.max(jnp.where(mask, lag, 0), axis=-1), "token": jnp.asarray(lag)}
  for level, (log_weights, counted, _) in levels.items():
    for name, inside in lag_buckets(lags[level], edges).items():
      statistics[f"ess/{level}/{name}"] = ess_ratio(log_weights, counted & inside)
  return statistics


def lag_buckets(lag: ArrayLike, edges: Sequence[int] = (1, 4, 16, 64)) -> dict[str, jax.Array]:
  """Returns which entries of *lag* lie in each bucket, bool arrays of its shape, by the bucket's name.

  Args:
    lag: int, any shape.
    edges: first lag of each bucket after the one that starts at 0, increasing; static.

  >>> {name: inside.tolist() for name, inside in lag_buckets(jnp.array([0, 2, 9]), edges=(1, 4)).items()}
  {'lag_0': [True, False, False], 'lag_1-3': [False, True, False], 'lag_4+': [False, False, True]}
  """
  if not all(low < high for low, high in zip((0, *edges), edges)):
    raise ValueError(f"*edges* must be increasing lags from 1 on, got edges={tuple(edges)}.")
  lag = jnp.asarray(lag)
  buckets = {}
  for low, high in zip((0, *edges), (*edges, None)):
    if high is None:
      buckets[f"lag_{low}+"] = lag >= low
    else:
      last = "" if high == low + 1 else f"-{high - 1}"
      buckets[f"lag_{low}{last}"] = (lag >= low) & (lag < high)
  return buckets
