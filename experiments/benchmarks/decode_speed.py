"""Decode speed of the slot engine against the memory-bandwidth floor of what is live.

    python -m experiments.benchmarks.decode_speed                       # one GPU with 80 GB, about 4 minutes
    python -m experiments.benchmarks.decode_speed --attention auto xla  # attention by kernels against XLA's products
    python -m experiments.benchmarks.decode_speed --smoke               # any machine, seconds; checks that it runs
    python -m experiments.benchmarks.decode_speed --shared-prompts --only 256:320:576 --repeats 3  # two minutes

A random model of Qwen3-0.6B's shape decodes chunks of 64 steps through the public API: the host's work between chunks
is in the times. The floor of a step is the time to read the weights once and the filled part of the live slots' cache
once, at the bandwidth of a device-to-device copy measured in the same run. With `--shared-prompts`, every row is
measured without and with shared prompts in turns; with them, the floor counts a prompt once for its group. Nothing ends
a completion early but in the last row, so that groups stay whole and there are as few prompts as can be.

Prints a table and writes decode_speed.json. Columns: attention; whether prompts are shared; slots; how many of them
live; filled positions of a sample (mean over the chunk); rows and positions of the cache that a step computes; size of
all keys and values; ms per step; the floor and the ratio to it; tokens drawn per second while decoding; and, for some
rows, tokens per second end to end, over three waves of requests with prefill and refills. The last row is a batch in
which every 62nd token ends a completion, from its first chunk to the end of the longest completion.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from async_rl.models import Params
from async_rl.models import Policy
from async_rl.models import named
from async_rl.sampling import Engine
from async_rl.sampling import SamplerConfig
from async_rl.sampling import generate
from async_rl.sampling import prepare_weights
from async_rl.types import Prompt
from async_rl.types import Request

QWEN3_06B = named("qwen3-0.6b")
SMOKE = dataclasses.replace(QWEN3_06B, vocab_size=512, d_model=64, num_layers=2, d_ff=128, head_dim=16)
GROUP = 8  # samples of a prompt


@dataclasses.dataclass(frozen=True)
class Case:
  """Slots, prompt tokens, cache positions, length buckets, live slots (all), whether to run end to end, group size,
  whether groups share their prompts.
  """

  slots: int
  prompt: int
  capacity: int = 1024
  buckets: int = 2
  live: int | None = None
  end_to_end: bool = False
  group: int = GROUP
  shared: bool = False


CASES = (
  Case(64, 832, end_to_end=True),
  Case(64, 320),
  Case(64, 320, 576, end_to_end=True),
  Case(256, 832, end_to_end=True),
  Case(256, 320),
  Case(256, 320, 576, end_to_end=True),
  Case(512, 320, 896),
  Case(512, 320, 896, live=64),
  Case(512, 320, 896, live=8),
)
SMOKE_CASES = (Case(16, 32, 128, end_to_end=True), Case(16, 40, 128), Case(32, 40, 128, live=8))
MEAN_LENGTH = 62  # of completions with a long tail


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
    group_size=case.group,
    max_prompt_tokens=case.prompt,
    max_new_tokens=case.capacity - case.prompt,
    chunk=chunk,
    length_buckets=case.buckets,
    shared_prompts=case.shared,
  )


def make_request(policy: Policy, ticket: int, length: int) -> Request:
  """Returns a request with a random prompt."""
  tokens = np.random.default_rng(ticket).integers(0, policy.config.vocab_size, length)
  return Request(ticket, tokens, Prompt(ticket, "", None))


def floor_of(policy: Policy, params: Params, filled: float, bandwidth: float) -> float:
  """Returns the seconds in which the weights and so many positions of the cache, of all slots together, are read."""
  c = policy.config
  position = c.num_layers * 2 * c.num_kv_heads * c.head_dim * jnp.dtype(policy.dtype).itemsize
  return (sum(x.nbytes for x in jax.tree.leaves(params)) + filled * position) / bandwidth


def make_engine(policy: Policy, params: Params, config: SamplerConfig, stop_ids: Sequence[int] = ()) -> Engine:
  """Returns an engine that has weights; without tokens that stop it, every completion is the longest."""
  engine = Engine(policy, config, stop_ids=stop_ids, pad_id=0)
  engine.set_weights(params, 0)
  return engine


def measure(
  policy: Policy, params: Params, case: Case, chunk: int, bandwidth: float, engine: Engine | None = None
) -> dict[str, Any]:
  """One row of the table.

  Args:
    policy: the architecture.
    params: the weights as a sampler takes them.
    case: the sizes.
    chunk: the steps of a chunk.
    bandwidth: bytes per second of the device's memory.
    engine: the engine of these sizes, from `make_engine`; `None` makes one.
  """
  engine = engine or make_engine(policy, params, sampler_config(case, chunk))
  drain(engine)  # of what an earlier call left
  live = case.live or case.slots
  for ticket in range(live // case.group):
    engine.submit(make_request(policy, ticket, case.prompt))
  engine.step()  # compiles and prefills
  start = time.perf_counter()
  engine.step()
  step = (time.perf_counter() - start) / chunk
  read = live * 1.5 * chunk + (live // case.group if case.shared else live) * case.prompt
  floor = floor_of(policy, params, read, bandwidth)
  row = {
    "shared_prompts": case.shared,
    "slots": case.slots,
    "live": live,
    "filled": int(case.prompt + 1.5 * chunk),
    "computed": list(engine.cache_shape),
    "cache_GB": round(engine.cache_bytes / 1e9, 2),
    "ms_per_step": round(1e3 * step, 3),
    "floor_ms": round(1e3 * floor, 3),
    "ratio_to_floor": round(step / floor, 2),
    "tokens_per_s": round(live / step),
  }
  if case.end_to_end:
    drain(engine)
    start = time.perf_counter()
    done = generate(
      engine, [make_request(policy, ticket, case.prompt) for ticket in range(3 * case.slots // case.group)]
    )
    row["end_to_end_tokens_per_s"] = round(sum(len(d.tokens) for d in done) / (time.perf_counter() - start))
  return row


def drain(engine: Engine) -> None:
  """Finishes all samples of an engine."""
  while not engine.idle:
    engine.step()


def measure_tail(policy: Policy, params: Params, case: Case, chunk: int, bandwidth: float) -> dict[str, Any]:
  """The row of a batch whose completions have a long tail: one sample per slot, from the first chunk to the last."""
  stops = range(0, policy.config.vocab_size, MEAN_LENGTH)
  engine = make_engine(policy, params, sampler_config(case, chunk), stops)
  engine.warmup()
  seconds, floor = 0.0, 0.0
  for ticket in range(case.slots // case.group):
    engine.submit(make_request(policy, ticket, case.prompt))
  done = engine.step()  # with the prefill: the first chunk is not measured
  while not engine.idle:
    start = time.perf_counter()
    done += engine.step()
    seconds += time.perf_counter() - start
  lengths = np.zeros((case.slots // case.group, case.group), np.int64)
  for completion in done:
    lengths[completion.ticket, completion.sample] = len(completion.tokens)
  longest = max(len(completion.tokens) for completion in done)
  for step in range(chunk, longest):
    live = lengths > step
    prompts = live.any(1).sum() if case.shared else live.sum()
    floor += floor_of(policy, params, prompts * case.prompt + live.sum() * step, bandwidth)
  return {
    "shared_prompts": case.shared,
    "slots": case.slots,
    "mean_length": round(float(lengths.mean()), 1),
    "longest": longest,
    "ms_per_step": round(1e3 * seconds / (longest - chunk), 3),
    "ratio_to_floor": round(seconds / floor, 2),
    "tokens_per_s": round(float(np.maximum(lengths - chunk, 0).sum()) / seconds),
  }


def random_weights(policy: Policy) -> Any:
  """Returns random weights as a sampler takes them."""
  # Two programs: compiled as one, on a GPU they take minutes.
  return jax.jit(functools.partial(prepare_weights, policy))(jax.jit(policy.init)(jax.random.key(0)))


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--attention", nargs="+", default=["auto"], help="backends of attention, as in models.Policy")
  parser.add_argument("--shared-prompts", action="store_true", help="measure every row without and with them")
  parser.add_argument("--only", nargs="+", help="rows to measure, as slots:prompt:capacity; tail for the last")
  parser.add_argument("--repeats", type=int, default=1, help="times that each row is measured, in turns")
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("decode_speed.json"))
  args = parser.parse_args()
  cases = SMOKE_CASES if args.smoke else CASES
  names = [f"{case.slots}:{case.prompt}:{case.capacity}" for case in cases]
  if unknown := set(args.only or ()) - {*names, "tail"}:
    parser.error(f"--only takes some of {', '.join(dict.fromkeys(names))} and tail, got {', '.join(sorted(unknown))}")
  config = SMOKE if args.smoke else QWEN3_06B
  params = random_weights(Policy(config))
  bandwidth = copy_bandwidth(2**24 if args.smoke else 2**31)
  chunk = 8 if args.smoke else 64
  device = jax.devices()[0].device_kind
  rows: list[dict[str, Any]] = []
  result = {"device": device, "jax": jax.__version__, "copy_GB_per_s": round(bandwidth / 1e9, 1), "rows": rows}
  print(f"{device}, jax {jax.__version__}, copy {result['copy_GB_per_s']} GB/s")
  variants = list(itertools.product(args.attention, (False, True) if args.shared_prompts else (False,)))

  def report(attention: str, row: dict[str, Any]) -> None:
    rows.append({"attention": attention} | row)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(" ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)

  for name, case in zip(names, cases, strict=True):
    if args.only and name not in args.only:
      continue
    engines: dict[tuple[str, bool], Engine] = {}
    for _, (attention, shared) in itertools.product(range(args.repeats), variants):
      policy, case = Policy(config, attention=attention), dataclasses.replace(case, shared=shared)
      engine = engines.get((attention, shared)) or make_engine(policy, params, sampler_config(case, chunk))
      if args.repeats > 1:  # at once, they need more memory
        engines[attention, shared] = engine
      report(attention, measure(policy, params, case, chunk, bandwidth, engine))
      del engine
  if not args.only or "tail" in args.only:
    tail, chunk = (Case(32, 40, 128), 8) if args.smoke else (Case(512, 320, 832), 16)
    for attention, shared in variants:
      case = dataclasses.replace(tail, shared=shared)
      report(attention, measure_tail(Policy(config, attention=attention), params, case, chunk, bandwidth))


if __name__ == "__main__":
  main()
