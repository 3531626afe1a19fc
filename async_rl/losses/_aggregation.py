"""From per-token losses to one number, in a way that does not depend on the split into micro-batches.

`aggregate` returns a numerator and a denominator. Sum both over the micro-batches (gradients come from the
numerators only) and divide once, at the end, with `divide_or_zero`.
"""

from __future__ import annotations

from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from async_rl._validation import check_choice
from async_rl._validation import check_number
from async_rl.losses._ratios import check_mask

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
  loss: ArrayLike,
  mask: ArrayLike,
  method: Aggregation,
  *,
  max_length: int | None = None,
  count_empty: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Numerator and denominator of a named mean over a (micro-)batch.

  ================= ============================= ==========================================
  method            numerator                     denominator
  ================= ============================= ==========================================
  ``token_mean``    Σ_b Σ_t loss                  number of tokens
  ``sequence_mean`` Σ_b (Σ_t loss) / L_b          number of sequences
  ``constant``      Σ_b Σ_t loss                  number of sequences · *max_length*
  ================= ============================= ==========================================

  Tokens and lengths L_b are counted in *mask*: pass the batch's mask to keep rejected tokens in the denominator, or
  ``PolicyLoss.keep`` to leave them out. ``constant`` with ``max_length=1`` sums over tokens and means over sequences.

  Args:
    loss: [B, T] per-token loss.
    mask: bool [B, T], the tokens that count.
    method: `token_mean` (DAPO), `sequence_mean` (GRPO) or `constant` (Dr.GRPO).
    max_length: tokens, the constant L_max; for `constant` only.
    count_empty: whether a row without a token in *mask* counts as a sequence (with loss 0). False leaves padding rows
      out, and the rows that a mask hands to another micro-batch; True keeps a wholly rejected sequence in.

  Returns:
    float32 scalars (numerator, denominator); no gradient flows through the denominator.

  Raises:
    ValueError: for an unknown method, or *max_length* missing or given needlessly.

  >>> mask = jnp.array([[True, True], [True, False]])
  >>> numerator, denominator = aggregate(jnp.array([[1.0, 3.0], [5.0, 0.0]]), mask, "token_mean")
  >>> float(divide_or_zero(numerator, denominator))
  3.0
  """
  check_mask(mask, loss=loss)
  check_choice("method", method, get_args(Aggregation))
  if (method == "constant") == (max_length is None):
    raise ValueError(f"*max_length* goes with method='constant' only, got method={method!r}, max_length={max_length}.")
  if max_length is not None:
    check_number("max_length", max_length, above=0)
  per_sequence = jnp.sum(jnp.where(mask, jnp.asarray(loss, jnp.float32), 0.0), axis=-1)
  lengths = jnp.sum(mask, axis=-1, dtype=jnp.float32)
  sequences = jnp.float32(lengths.size) if count_empty else jnp.sum(lengths > 0, dtype=jnp.float32)
  if method == "token_mean":
    return jnp.sum(per_sequence), jnp.sum(lengths)
  if method == "sequence_mean":
    return jnp.sum(per_sequence / jnp.maximum(lengths, 1.0)), sequences
  return jnp.sum(per_sequence), sequences * jnp.float32(max_length)


def divide_or_zero(numerator: ArrayLike, denominator: ArrayLike) -> jax.Array:
  """numerator / denominator, and 0 (with zero gradient) where the denominator is 0."""
  empty = jnp.equal(denominator, 0)
  return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))
