"""A checksum of a sampler's weights: the same number wherever, and over however many devices, the same bits lie."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from async_rl._arrays import sum_of_bits
from async_rl.models import Params

Array = jax.Array


def checksum_weights(params: Params) -> int:
  """Returns the checksum, below 2^32, of prepared weights; waits until it is computed.

  Equal bits have equal checksums, whatever devices hold them. A change of one element always changes it; other changes
  do but for one in 2^32.

  Args:
    params: the weights, as from `prepare_weights`.
  """
  return join_sums(jax.device_get([_sum_part(part) for _, part in weight_parts(params)]))


def weight_parts(params: Params) -> Iterator[tuple[str, Params]]:
  """Yields the parts of prepared weights with their names; each layer is one, and all layers have the same name."""
  for name, part in sorted(params.items()):
    for layer in part if isinstance(part, list) else [part]:
      yield name, layer


def sum_part(part: Params) -> Array:
  """Returns the checksum of a part, uint32 []. Traceable."""
  return _weighted([sum_of_bits(x) for x in jax.tree.leaves(part)], jnp.uint32(0))


def join_sums(sums: Sequence[Array]) -> int:
  """Returns the checksum of weights from those of their parts, in order."""
  return _weighted([int(x) for x in sums], 0) % 2**32


_sum_part = jax.jit(sum_part)


def _weighted(values: Sequence[Any], start: Any) -> Any:
  """Returns the sum of values times 1, 3, 5, ...: odd numbers, by which each value can be told modulo 2^32."""
  return sum(((2 * i + 1) * x for i, x in enumerate(values)), start)
