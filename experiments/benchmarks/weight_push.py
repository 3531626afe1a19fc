"""Bandwidth of the weight push from learner devices to generation devices, against a plain copy of as many bytes.

    python -m experiments.benchmarks.weight_push            # two GPUs or more, about 2 minutes
    python -m experiments.benchmarks.weight_push --smoke    # any machine, seconds on forced CPU devices

The weights of a model of Qwen3-0.6B's shape go from float32 on the learner mesh to the sampler's bfloat16 on the
generation mesh, for several splits of this machine's devices. The plain copy is `jax.device_put` of one array of as
many bytes from one learner device to one generation device: what one sampler needs, in one piece.

Prints a row per split, medians of 20 pushes, and writes weight_push.json. Columns: the sizes of both meshes (data x
fsdp x tensor); milliseconds of the cast on the learner's devices, of the copies, and of the push, which is copies and
gather together; gigabytes per second of the push and of the plain copy; their ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import models
from async_rl import rollout
from async_rl import sampling

POLICY = models.Policy(models.named("qwen3-0.6b"))
SMOKE = models.Policy(
  models.ModelConfig(512, d_model=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, d_ff=128)
)


@dataclasses.dataclass(frozen=True)
class Split:
  """Sizes of the two meshes: devices that generate, of how many in all, and the axes."""

  devices: int
  generation: int
  fsdp: int = 1
  tensor: int = 1
  generation_tensor: int = 1

  def meshes(self) -> rollout.Meshes:
    """Returns the meshes, on the first devices of this machine."""
    return rollout.make_meshes(
      self.generation,
      fsdp=self.fsdp,
      tensor=self.tensor,
      generation_tensor=self.generation_tensor,
      devices=jax.devices()[: self.devices],
    )


def splits_of(count: int) -> list[Split]:
  """Returns the splits that `count` devices allow, the simplest first."""
  splits = [Split(2, 1)]
  if count >= 4:
    splits += [Split(4, 1, fsdp=3), Split(4, 3)]
    splits += [Split(4, 2, fsdp=fsdp, generation_tensor=tensor) for fsdp in (1, 2) for tensor in (1, 2)]
    splits += [Split(4, 2, tensor=2, generation_tensor=2), Split(4, 0, fsdp=4)]
  if count >= 8:
    splits += [Split(8, 4, fsdp=4, generation_tensor=tensor) for tensor in (1, 2, 4)]
  return splits


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
  """Returns the median time until the arrays that `run` returns are ready, after a first call that compiles."""
  jax.block_until_ready(run())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return float(np.median(times))


def measure_push(policy: models.Policy, meshes: rollout.Meshes, repeats: int) -> dict[str, float]:
  """Returns the bytes of a push, and the seconds of the cast, of the copies, and of copies and gather together."""
  abstract = models.with_shardings(policy.abstract(), models.param_shardings(policy.abstract(), meshes.learner))
  prepared = jax.eval_shape(functools.partial(sampling.prepare_weights, policy), policy.abstract())
  push = rollout.WeightPush(abstract, policy.dtype, models.param_shardings(prepared, meshes.generation))
  params = jax.jit(policy.init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(jax.random.key(0))
  staged = jax.block_until_ready(push.stage(params))
  return {
    "bytes": push.nbytes,
    "cast": median_seconds(lambda: push.stage(params), repeats),
    "copies": median_seconds(lambda: push.copy(staged), repeats),
    "push": median_seconds(lambda: push.gather(push.copy(staged)), repeats),
  }


def measure_plain_copy(count: int, devices: Sequence[jax.Device], repeats: int) -> float:
  """Returns the seconds in which one array of `count` bytes goes from the first device to the last."""
  array = jax.device_put(jnp.zeros(count // 2, jnp.bfloat16), devices[0])
  return median_seconds(lambda: jax.device_put(array, devices[-1]), repeats)


def format_row(row: dict[str, Any]) -> str:
  """Returns a row of the printed table."""
  learner, generation = ("x".join(str(size) for size in row[mesh].values()) for mesh in ("learner", "generation"))
  times = " ".join(f"{1e3 * row[name]:8.2f}" for name in ("cast", "copies", "push"))
  return f"{learner:9} {generation:11} {times} {row['push_rate']:10.1f} {row['plain_rate']:11.1f} {row['ratio']:6.2f}"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures, prints and writes all splits, and returns what it writes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--repeats", type=int, default=20, help="the number of pushes of which the median counts")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("weight_push.json"))
  args = parser.parse_args(argv)
  devices = jax.devices()
  if len(devices) < 2:
    raise SystemExit("error: a push goes from one device to another, got 1 device; run it on two or more.")
  policy = SMOKE if args.smoke else POLICY
  print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}; milliseconds, gigabytes per second")
  print("learner   generation      cast   copies     push  push GB/s  plain GB/s  ratio")
  rows = []
  for split in splits_of(len(devices))[: 3 if args.smoke else None]:
    meshes = split.meshes()
    row: dict[str, Any] = {"learner": dict(meshes.learner.shape), "generation": dict(meshes.generation.shape)}
    row |= measure_push(policy, meshes, args.repeats)
    plain = measure_plain_copy(
      row["bytes"], [meshes.learner.devices.flat[0], meshes.generation.devices.flat[-1]], args.repeats
    )
    row["push_rate"], row["plain_rate"] = row["bytes"] / row["push"] / 1e9, row["bytes"] / plain / 1e9
    row["ratio"] = plain / row["push"]
    rows.append(row)
    print(format_row(row), flush=True)
  result = {"device": devices[0].device_kind, "devices": len(devices), "jax": jax.__version__, "rows": rows}
  args.out.write_text(json.dumps(result, indent=1) + "\n")
  return result


if __name__ == "__main__":
  main()
