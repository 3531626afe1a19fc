"""Attention of a decode step alone: slots with a prompt each, shared prompts, and the parts that the latter consist of.

    python -m experiments.benchmarks.decode_attention           # one NVIDIA GPU, half a minute
    python -m experiments.benchmarks.decode_attention --smoke   # any machine, seconds; checks that it runs

The heads of Qwen3-0.6B, random keys and values in bfloat16, eight layers in turns so that no cache holds them. The
parts of shared prompts are measured in the form that is used and in others: the two query heads of a key as two tokens,
and XLA's products.

Prints a table and writes decode_attention.json. Columns: what is computed; microseconds a layer, least of five; the
time in which its keys and values are read once at the bandwidth of a copy, and the ratio to it. Of the first two, which
compute the same: the largest and the mean error against float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import models
from async_rl.models import _shared_attention
from experiments.benchmarks.decode_speed import GROUP
from experiments.benchmarks.decode_speed import QWEN3_06B
from experiments.benchmarks.decode_speed import SMOKE
from experiments.benchmarks.decode_speed import copy_bandwidth

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
  """Slots, prompt tokens, positions of a slot's own part and how many of them are filled."""

  slots: int = 256
  prompt: int = 320
  own: int = 256
  filled: int = 160
  layers: int = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
  """What is measured.

  Attributes:
    name: the name in the table.
    attend: function of queries and a layer, which returns the next layer's queries.
    queries: the first queries.
    layers: keys and values.
    read: the bytes of a layer that have to be read.
  """

  name: str
  attend: Callable[[Array, Any], Array]
  queries: Array
  layers: list[Any]
  read: float


def make_kernels(config: models.ModelConfig, case: Case, backend: str) -> list[Kernel]:
  """Returns the kernels, of the same keys and values: first with a prompt for each slot, then with shared ones."""
  heads, n, width = config.num_heads, config.num_kv_heads, config.head_dim
  groups, scale = case.slots // GROUP, width**-0.5
  keys = iter(jax.random.split(jax.random.key(0), 4 * case.layers + 1))

  def random(*shape: int) -> Array:
    return jax.random.normal(next(keys), shape, jnp.bfloat16)

  # Position by position in memory, as cuDNN wants it; seen head by head.
  prompts = [(random(groups, case.prompt, n, width), random(groups, case.prompt, n, width)) for _ in range(case.layers)]
  own = [(random(case.slots, case.own, n, width), random(case.slots, case.own, n, width)) for _ in range(case.layers)]
  join = jax.jit(lambda a, b: jnp.concatenate([jnp.repeat(a, GROUP, 0), b], 1))
  whole = [tuple(map(join, *parts)) for parts in zip(prompts, own, strict=True)]

  def seen(kv: tuple[Array, Array]) -> tuple[Array, Array]:
    return kv[0].swapaxes(1, 2), kv[1].swapaxes(1, 2)

  rows = jnp.arange(case.slots, dtype=jnp.int32)
  positions = jnp.full(case.slots, case.filled - 1, jnp.int32)
  lengths = jnp.full(groups, case.prompt, jnp.int32)
  sharing = models.SharedPrompts(
    None, lengths, rows.reshape(groups, GROUP), rows, jnp.full(case.slots, case.prompt, jnp.int32)
  )
  options: dict[str, Any] = {"num_kv_heads": n, "scale": scale, "backend": backend}
  by_head = jax.jit(seen)

  def xla(q: Array, kv: Any, counts: Array) -> Array:
    return _shared_attention.attend_by("xla", scale)(q, *kv, counts, None)[0]

  def used(q: Array, kv: Any, counts: Array) -> Array:
    return _shared_attention.attend_by(backend, scale)(q, *seen(kv), counts, None)[0]

  def with_own_prompts(q: Array, kv: Any) -> Array:
    return models.cache_attention(q, seen(kv), positions + case.prompt, **options)

  def with_shared_prompts(q: Array, kv: Any) -> Array:
    return models.shared_attention(q, seen(kv[1]), positions, sharing._replace(layers=seen(kv[0])), **options)

  def own_part(q: Array, kv: Any) -> Array:
    return used(q[:, None], kv, positions + 1)[:, 0]

  def own_part_as_tokens(q: Array, kv: Any) -> Array:
    tokens = q.reshape(case.slots, n, -1, width).swapaxes(1, 2)
    return used(tokens, kv, positions + 1).swapaxes(1, 2).reshape(q.shape)

  def prompt_part(q: Array, kv: Any) -> Array:
    return used(q, kv, lengths)

  q = random(case.slots, heads, width)
  members = q.reshape(groups, GROUP, heads, width)
  position = 2 * n * width * q.dtype.itemsize
  filled, shared = case.slots * case.filled * position, groups * case.prompt * position
  each = case.slots * case.prompt * position
  return [
    Kernel("a prompt each", with_own_prompts, q, whole, filled + each),
    Kernel("shared prompts", with_shared_prompts, q, list(zip(prompts, own, strict=True)), filled + shared),
    Kernel("own part", own_part, q, own, filled),
    Kernel("own part, heads as tokens", own_part_as_tokens, q, own, filled),
    Kernel("own part, XLA", lambda q, kv: xla(q[:, None], kv, positions + 1)[:, 0], q,
           list(map(by_head, own)), filled),
    Kernel("prompts", prompt_part, members, prompts, shared),
    Kernel("prompts, XLA", lambda q, kv: xla(q, kv, lengths), members,
           list(map(by_head, prompts)), shared),
  ]  # fmt: skip


def seconds_of(kernel: Kernel, turns: int) -> float:
  """Returns the seconds of a layer, in a loop over all layers whose every call needs the one before."""

  @jax.jit
  def run(q: Array, layers: list[Any]) -> Array:
    return jax.lax.fori_loop(0, turns, lambda _, q: functools.reduce(kernel.attend, layers, q), q)

  best = np.inf
  for _ in range(6):  # the first compiles
    start = time.perf_counter()
    run(kernel.queries, kernel.layers).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return best / turns / len(kernel.layers)


def errors(kernels: list[Kernel], count: int) -> list[tuple[float, float]]:
  """Returns the largest and the mean error of the first two kernels, of so many positions, against float32."""
  plain = kernels[0]
  exact = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
  layer = [kernel.layers[0] for kernel in kernels[:2]]
  k, v = exact(plain.layers[0])
  rows, heads, width = plain.queries.shape
  q = exact(plain.queries).reshape(rows, k.shape[2], -1, width)
  logits = jnp.einsum("bngd,bsnd->bngs", q, k[:, :count], precision="highest") * width**-0.5
  values = jnp.einsum("bngs,bsnd->bngd", jax.nn.softmax(logits), v[:, :count], precision="highest")
  found = [jax.jit(kernel.attend)(kernel.queries, kv) for kernel, kv in zip(kernels[:2], layer, strict=True)]
  gaps = [np.abs(np.asarray(out, np.float32) - np.asarray(values).reshape(rows, heads, width)) for out in found]
  return [(float(gap.max()), float(gap.mean())) for gap in gaps]


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("decode_attention.json"))
  args = parser.parse_args()
  config, case = (SMOKE, Case(16, 32, 32, 20, 2)) if args.smoke else (QWEN3_06B, Case())
  backend = models.Policy(config).cache_backend
  bandwidth = copy_bandwidth(2**24 if args.smoke else 2**31)
  device = jax.devices()[0].device_kind
  kernels = make_kernels(config, case, backend)
  rows: list[dict[str, Any]] = []
  result = {"device": device, "jax": jax.__version__, "copy_GB_per_s": round(bandwidth / 1e9, 1), "backend": backend}
  print(" ".join(f"{name} {value}" for name, value in result.items()))
  for kernel in kernels:
    seconds, floor = seconds_of(kernel, 2 if args.smoke else 20), kernel.read / bandwidth
    rows.append(
      {"kernel": kernel.name, "us": round(1e6 * seconds, 1), "floor_us": round(1e6 * floor, 1),
       "ratio_to_floor": round(seconds / floor, 2)}
    )  # fmt: skip
    print(" ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
  for row, (largest, mean) in zip(rows, errors(kernels, case.prompt + case.filled), strict=False):
    row |= {"largest_error": largest, "mean_error": mean}
    print(f"{row['kernel']}: error {largest:.2e}, mean {mean:.2e}")
  args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
  main()
