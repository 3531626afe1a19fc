"""Attention of a decode step alone, with the norms, rotation and storing before it, by every way there is on GPUs.

    python -m experiments.benchmarks.decode_attention           # one NVIDIA GPU, two minutes
    python -m experiments.benchmarks.decode_attention --smoke   # any machine, seconds; checks that it runs

The heads of Qwen3-0.6B, random keys and values in bfloat16; prompts of 320 positions and 160 more of each slot's own,
several layers in turns so that no cache holds them. All slots live, and an eighth of them; and what is left of a batch
whose completions have a long tail: 2, 8 and all of 32 slots, at 346 of 896 positions.

Prints a table and writes decode_attention.json. Columns: slots, how many of them live; what computes; whether groups of
8 share their prompts; microseconds a layer, least of five; the time in which the keys and values of live slots are read
once at the bandwidth of a copy, shared prompts once for their group, and the ratio to it; the largest and the mean
error against float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import models
from async_rl.models import _fused_decode
from async_rl.models._layers import Norms
from async_rl.models._layers import RMSNorm
from async_rl.models._layers import Rotation
from experiments.benchmarks.decode_speed import GROUP
from experiments.benchmarks.decode_speed import QWEN3_06B
from experiments.benchmarks.decode_speed import SMOKE
from experiments.benchmarks.decode_speed import copy_bandwidth

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Case:
  """Slots, how many of them live, prompt tokens, positions of a slot's own part and how many of them are filled."""

  slots: int
  live: int
  prompt: int = 320
  own: int = 256
  filled: int = 160
  layers: int = 4


TAIL = tuple(Case(32, live, prompt=96, own=800, filled=250, layers=8) for live in (2, 8, 32))
CASES = (Case(64, 64), Case(64, 8), Case(256, 256), Case(256, 32), Case(8, 8, layers=16), *TAIL)
SMOKE_CASES = (Case(16, 16, 32, 32, 20, 2), Case(16, 8, 32, 32, 20, 2))


class Step(NamedTuple):
  """What a layer gets: the new token of each slot, its entry, -1 for slots that do not live, and its angles."""

  q: Array
  k: Array
  v: Array
  entries: Array
  angles: Array


def make_step(config: models.ModelConfig, case: Case, shared: bool) -> Step:
  """Returns a random step."""
  keys = iter(jax.random.split(jax.random.key(0), 4))
  heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
  q, k, v = (jax.random.normal(next(keys), (case.slots, n, config.head_dim), jnp.bfloat16) for n in heads)
  entry = case.filled - 1 + (0 if shared else case.prompt)
  entries = jnp.where(jnp.arange(case.slots) < case.live, entry, -1).astype(jnp.int32)
  return Step(q, k, v, entries, jax.random.normal(next(keys), (case.slots, config.head_dim // 2)))


def rotation_of(config: models.ModelConfig, angles: Array) -> Rotation:
  """Returns the norms of the model and the rotation by angles."""
  return Rotation(Norms(), RMSNorm(config.head_dim, config), RMSNorm(config.head_dim, config), angles)


def make_layers(config: models.ModelConfig, case: Case) -> tuple[list[Any], list[Any], list[Any]]:
  """Returns prompts, own parts, and both in one piece for every slot: keys and values [rows, positions, N, d]."""
  keys = iter(jax.random.split(jax.random.key(1), 4 * case.layers))

  def random(rows: int, length: int) -> tuple[Array, Array]:
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    return jax.random.normal(next(keys), shape, jnp.bfloat16), jax.random.normal(next(keys), shape, jnp.bfloat16)

  prompts = [random(case.slots // GROUP, case.prompt) for _ in range(case.layers)]
  own = [random(case.slots, case.own) for _ in range(case.layers)]
  join = jax.jit(lambda a, b: jnp.concatenate([jnp.repeat(a, GROUP, 0), b], 1))
  whole = [(join(a[0], b[0]), join(a[1], b[1])) for a, b in zip(prompts, own, strict=True)]
  return prompts, own, whole


def by_head(kv: Any) -> Any:
  """Returns keys and values [rows, positions, N, d] as [rows, N, positions, d], or the other way round."""
  return tuple(x.swapaxes(1, 2) for x in kv)


def share(case: Case) -> models.SharedPrompts:
  """Returns which slots share which prompt, without the prompts."""
  rows, groups = jnp.arange(case.slots, dtype=jnp.int32), case.slots // GROUP
  lengths = jnp.where(jnp.arange(groups) * GROUP < case.live, case.prompt, 0).astype(jnp.int32)
  return models.SharedPrompts(None, lengths, rows.reshape(groups, GROUP), rows, jnp.full_like(rows, case.prompt))


def attend_by(backend: str, config: models.ModelConfig) -> Callable[[Step, Any], tuple[Array, Any]]:
  """Returns what a layer computes with a backend, of a step and keys and values to the queries' result and both.

  XLA's products want keys and values head by head, [rows, N, positions, d], kernels position by position.
  """

  def attend(step: Step, kv: Any) -> tuple[Array, Any]:
    if backend == "triton":
      out, kv = _attend_in_one_kernel(config, step, by_head(kv))
      return out, by_head(kv)
    q, k = rotation_of(config, step.angles)(step.q, step.k)
    rows, entries = jnp.arange(len(q)), jnp.maximum(step.entries, 0)
    kv = kv if backend == "xla" else by_head(kv)
    kv = tuple(x.at[rows, :, entries].set(y) for x, y in zip(kv, (k, step.v), strict=True))
    out = models.cache_attention(q, kv, entries, num_kv_heads=k.shape[1], scale=_scale(config), backend=backend)
    return out, kv if backend == "xla" else by_head(kv)

  return attend


def attend_to_shared(
  sharing: models.SharedPrompts, config: models.ModelConfig
) -> Callable[[Step, Any], tuple[Array, Any]]:
  """Returns what a layer computes where prompts are shared, of a step, and prompts and own parts."""

  def attend(step: Step, parts: Any) -> tuple[Array, Any]:
    prompts, kv = map(by_head, parts)
    out, kv = _attend_in_one_kernel(config, step, kv, sharing._replace(layers=prompts))
    return out, (by_head(prompts), by_head(kv))

  return attend


def _attend_in_one_kernel(
  config: models.ModelConfig, step: Step, kv: Any, prompts: models.SharedPrompts | None = None
) -> tuple[Array, Any]:
  return _fused_decode.rotate_store_and_attend(
    step.q, step.k, step.v, kv, step.entries, rotation_of(config, step.angles),
    scale=_scale(config),
    prompts=prompts,
    interpret=jax.default_backend() == "cpu",
  )  # fmt: skip


def _scale(config: models.ModelConfig) -> float:
  return config.head_dim**-0.5


def seconds_of(attend: Callable, step: Step, layers: list[Any], turns: int) -> float:
  """Returns the seconds of a layer, in a loop over all layers whose every call needs the one before."""

  @functools.partial(jax.jit, donate_argnums=1)
  def run(step: Step, layers: list[Any]) -> tuple[Array, list[Any]]:
    def turn(_: int, state: tuple[Array, list[Any]]) -> tuple[Array, list[Any]]:
      q, layers = state
      after = []
      for kv in layers:
        q, kv = attend(step._replace(q=q), kv)
        after.append(kv)
      return q, after

    return jax.lax.fori_loop(0, turns, turn, (step.q, layers))

  best = np.inf
  for _ in range(6):  # the first compiles
    start = time.perf_counter()
    out, layers = run(step, layers)
    out.block_until_ready()
    best = min(best, time.perf_counter() - start)
  return best / turns / len(layers)


def exact_result(config: models.ModelConfig, step: Step, kv: Any, live: int) -> np.ndarray:
  """Returns what attention to whole rows gives in float32, of live slots."""
  q, k, v, angles, *kv = jax.tree.map(
    lambda x: x[:live].astype(jnp.float32), (step.q, step.k, step.v, step.angles, *kv)
  )
  (q, k), entry = rotation_of(config, angles)(q, k), int(step.entries[0])
  k, v = (x.at[:, :, entry].set(y)[:, :, : entry + 1] for x, y in zip(kv, (k, v), strict=True))
  grouped = q.reshape(live, k.shape[1], -1, q.shape[2])
  logits = jnp.einsum("bngd,bnsd->bngs", grouped, k, precision="highest") * _scale(config)
  return np.asarray(jnp.einsum("bngs,bnsd->bngd", jax.nn.softmax(logits), v, precision="highest").reshape(q.shape))


def measure(config: models.ModelConfig, case: Case, bandwidth: float, turns: int) -> Iterator[dict[str, Any]]:
  """Yields the rows of a case."""
  prompts, own, whole = make_layers(config, case)
  position = 4 * config.num_kv_heads * config.head_dim  # bytes
  whole_step, own_step = (make_step(config, case, shared) for shared in (False, True))
  exact = exact_result(config, whole_step, by_head(whole[0]), case.live)
  backends = ["triton"] if jax.default_backend() == "cpu" else ["triton", "cudnn"]
  ways: list[tuple[str, bool, Callable, Step, list[Any]]] = [
    (name, False, attend_by(name, config), whole_step, whole) for name in backends
  ]
  ways.append(("triton", True, attend_to_shared(share(case), config), own_step, list(zip(prompts, own, strict=True))))
  ways.append(("xla", False, attend_by("xla", config), whole_step, list(map(jax.jit(by_head), whole))))
  for name, shared, attend, step, layers in ways:
    got = np.asarray(jax.jit(attend)(step, layers[0])[0][: case.live], np.float32)
    copies = jax.tree.map(jnp.copy, layers)  # the first call gives its layers away
    read = case.live * case.filled + case.prompt * (-(-case.live // GROUP) if shared else case.live)
    seconds, floor = seconds_of(attend, step, copies, turns), read * position / bandwidth
    yield {
      "slots": case.slots,
      "live": case.live,
      "attention": name,
      "shared_prompts": shared,
      "us": round(1e6 * seconds, 1),
      "floor_us": round(1e6 * floor, 1),
      "ratio_to_floor": round(seconds / floor, 2),
      "largest_error": float(np.abs(got - exact).max()),
      "mean_error": float(np.abs(got - exact).mean()),
    }


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("decode_attention.json"))
  args = parser.parse_args()
  config = dataclasses.replace(SMOKE, head_dim=32) if args.smoke else QWEN3_06B
  bandwidth = copy_bandwidth(2**24 if args.smoke else 2**31)
  device = jax.devices()[0].device_kind
  rows: list[dict[str, Any]] = []
  result = {"device": device, "jax": jax.__version__, "copy_GB_per_s": round(bandwidth / 1e9, 1)}
  print(" ".join(f"{name} {value}" for name, value in result.items()))
  for case in SMOKE_CASES if args.smoke else CASES:
    for row in measure(config, case, bandwidth, 2 if args.smoke else 20):
      rows.append(row)
      print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
      args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
  main()
