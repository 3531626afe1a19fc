"""Decode speed of the slot engine against the memory-bandwidth floor.

    python -m experiments.benchmarks.decode_speed            # one GPU with 80 GB, about 3 minutes
    python -m experiments.benchmarks.decode_speed --smoke    # any machine, seconds; checks that it runs

A random model of Qwen3-0.6B's shape decodes chunks of 64 steps in slots of 1,024 positions, through the public API:
the host's work between chunks is in the times. The floor of a step is the time to read the weights once and the
filled part of the cache once, at the bandwidth of a device-to-device copy measured in the same run.

Prints a table and writes decode_speed.json. Columns: slots; filled cache positions (mean over the chunk); attended
positions; ms per step; its ratio to the floor; tokens drawn per second while decoding; and, for the first rows,
tokens per second end to end, over three waves of requests with prefill and refills.

One H100 (80 GB), JAX 0.11.2, copy at 2,960 GB/s:

    slots filled attended ms/step /floor tokens/s end-to-end
       64    928     1024   4.153   1.54    15410      14626
       64    416      512    2.83   1.97    22617
       64    416     1024   4.182   2.92    15303
      256    928     1024   12.81   1.33    19985      18805
      256    416      512   7.494   1.65    34161
      256    416     1024  12.789   2.82    20017
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from async_rl.models import ModelConfig
from async_rl.models import Params
from async_rl.models import Policy
from async_rl.sampling import Engine
from async_rl.sampling import SamplerConfig
from async_rl.sampling import generate
from async_rl.sampling import prepare_weights
from async_rl.types import Prompt
from async_rl.types import Request

QWEN3_06B = ModelConfig(
  vocab_size=151_936, d_model=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, d_ff=3072,
  rope_theta=1e6, tie_embeddings=True, qk_norm=True,
)  # fmt: skip
SMOKE = dataclasses.replace(QWEN3_06B, vocab_size=512, d_model=64, num_layers=2, d_ff=128, head_dim=16)


@dataclasses.dataclass(frozen=True)
class Case:
  """Slots, prompt tokens, cache positions per slot, attention length buckets, whether to run end to end."""

  slots: int
  prompt: int
  capacity: int = 1024
  buckets: int = 2
  end_to_end: bool = False


CASES = (
  Case(64, 832, end_to_end=True),
  Case(64, 320),
  Case(64, 320, buckets=1),
  Case(256, 832, end_to_end=True),
  Case(256, 320),
  Case(256, 320, buckets=1),
)
SMOKE_CASES = (Case(16, 32, 128, end_to_end=True), Case(16, 40, 128), Case(16, 40, 128, buckets=1))


def copy_bandwidth(size: int) -> float:
  """Bytes per second, read and written, of a device-to-device copy of `size` bytes."""
  x = jnp.zeros(size // 4, jnp.float32)
  bump = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = bump(x).block_until_ready()
  best = np.inf
  for _ in range(5):
    start = time.perf_counter()
    for _ in range(10):
      x = bump(x)
    x.block_until_ready()
    best = min(best, (time.perf_counter() - start) / 10)
  return 2 * size / best


def sampler_config(case: Case, chunk: int) -> SamplerConfig:
  """Returns the sizes of the engine of one row."""
  return SamplerConfig(
    slots=case.slots,
    group_size=8,
    max_prompt_tokens=case.prompt,
    max_new_tokens=case.capacity - case.prompt,
    chunk=chunk,
    length_buckets=case.buckets,
  )


def measure(policy: Policy, params: Params, case: Case, chunk: int, bandwidth: float) -> dict[str, Any]:
  """One row of the table."""
  config = sampler_config(case, chunk)
  engine = Engine(policy, config, stop_ids=(), pad_id=0)
  engine.set_weights(params, 0)
  rng = np.random.default_rng(0)
  vocab = policy.config.vocab_size
  request = lambda ticket: Request(ticket, rng.integers(0, vocab, case.prompt), Prompt(ticket, "", None))
  for ticket in range(case.slots // 8):
    engine.submit(request(ticket))
  engine.step()  # compiles and prefills
  start = time.perf_counter()
  engine.step()
  step = (time.perf_counter() - start) / chunk

  filled = case.prompt + 1.5 * chunk
  c = policy.config
  cache_bytes = case.slots * filled * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2
  floor = (sum(x.nbytes for x in jax.tree.leaves(params)) + cache_bytes) / bandwidth
  row = {
    "slots": case.slots,
    "filled": int(filled),
    "attended": next(n for n in config.lengths if n >= case.prompt + 2 * chunk - 1),
    "ms_per_step": round(1e3 * step, 3),
    "ratio_to_floor": round(step / floor, 2),
    "tokens_per_s": round(case.slots / step),
  }
  if case.end_to_end:
    while not engine.idle:
      engine.step()
    start = time.perf_counter()
    done = generate(engine, [request(ticket) for ticket in range(3 * case.slots // 8)])
    row["end_to_end_tokens_per_s"] = round(sum(len(d.tokens) for d in done) / (time.perf_counter() - start))
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("decode_speed.json"))
  args = parser.parse_args()
  policy = Policy(SMOKE if args.smoke else QWEN3_06B)
  # Two programs: compiled as one, on a GPU they take minutes.
  params = jax.jit(functools.partial(prepare_weights, policy))(jax.jit(policy.init)(jax.random.key(0)))
  bandwidth = copy_bandwidth(2**24 if args.smoke else 2**31)
  result = {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "copy_GB_per_s": round(bandwidth / 1e9, 1),
    "rows": [
      measure(policy, params, c, 8 if args.smoke else 64, bandwidth) for c in (SMOKE_CASES if args.smoke else CASES)
    ],
  }
  args.out.write_text(json.dumps(result, indent=1) + "\n")
  print(f"{result['device']}, jax {result['jax']}, copy {result['copy_GB_per_s']} GB/s")
  print("slots filled attended ms/step /floor tokens/s end-to-end")
  for r in result["rows"]:
    print(
      f"{r['slots']:5} {r['filled']:6} {r['attended']:8} {r['ms_per_step']:7} {r['ratio_to_floor']:6} "
      f"{r['tokens_per_s']:8} {r.get('end_to_end_tokens_per_s', ''):>10}"
    )


if __name__ == "__main__":
  main()
