"""Time and memory that each stabilizer adds to a learner step.

    python -m experiments.benchmarks.stabilizer_cost            # one GPU with 80 GB, about 5 minutes
    python -m experiments.benchmarks.stabilizer_cost --smoke    # any machine, seconds; checks that it runs

The parameters are those of a Qwen2.5-0.5B-shaped model, in float32. Two measurements:

1. The update alone: gradient in, parameters out, donated. A stabilizer's cost is what it adds to
   clip + AdamW, as a share of the learner step: that of the real learner on 64 sequences of 512 tokens, or --step-ms.
2. The whole learner step with clip + AdamW and with all stabilizers, in turns, as a check on the shares.

Prints a table and writes stabilizer_cost.json. Columns: ms of the update; ms added to clip + AdamW; the same as a share
of the learner step; bytes of optimizer state added, per parameter; peak of the update's temporaries, per parameter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import stabilizers
from async_rl import types

QWEN25_05B = models.ModelConfig(
  vocab_size=151_936, d_model=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, d_ff=4864,
  rope_theta=1e6, tie_embeddings=True, qkv_bias=True,
)  # fmt: skip
SMOKE = dataclasses.replace(QWEN25_05B, vocab_size=512, d_model=64, num_layers=2, num_heads=4, head_dim=16, d_ff=128)
BASELINE = "clip + adamw"
IN_LEARNER = (BASELINE, "all, float32", "all, bfloat16")


def base() -> optax.GradientTransformation:
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.1))


def everything(storage_dtype: str) -> optax.GradientTransformation:
  aligned = stabilizers.control_alignment(base(), storage_dtype=storage_dtype)
  return optax.chain(stabilizers.track_norm(), aligned, stabilizers.scale_by_ess())


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
  BASELINE: base,
  "scale_by_ess": lambda: optax.chain(base(), stabilizers.scale_by_ess()),
  "track_norm": lambda: optax.chain(stabilizers.track_norm(), base()),
  "track_cosine float32": lambda: optax.chain(stabilizers.track_cosine("float32"), base()),
  "track_cosine bfloat16": lambda: optax.chain(stabilizers.track_cosine("bfloat16"), base()),
  "control_alignment float32": lambda: stabilizers.control_alignment(base(), storage_dtype="float32"),
  "control_alignment bfloat16": lambda: stabilizers.control_alignment(base(), storage_dtype="bfloat16"),
  "all, float32": lambda: everything("float32"),
  "all, bfloat16": lambda: everything("bfloat16"),
}


def measure_update(optimizer: optax.GradientTransformation, params: Any, repeats: int) -> dict[str, float]:
  """Median seconds of one update, and its memory in bytes."""
  optimizer = optax.with_extra_args_support(optimizer)
  make_gradients = jax.jit(
    lambda params, seed: jax.tree.map(lambda p: jax.random.normal(jax.random.key(seed), p.shape, p.dtype), params)
  )

  def update(params, opt_state, gradients, log_weights):
    updates, opt_state = optimizer.update(gradients, opt_state, params, log_weights=log_weights)
    return optax.apply_updates(params, updates), opt_state

  params, opt_state = jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params)
  log_weights = jnp.linspace(-1.0, 1.0, 64)
  gradients = make_gradients(params, 0)
  compiled = jax.jit(update, donate_argnums=(0, 1, 2)).lower(params, opt_state, gradients, log_weights).compile()
  seconds = []
  for repeat in range(repeats + 2):
    gradients = jax.block_until_ready(make_gradients(params, repeat))
    start = time.perf_counter()
    params, opt_state = jax.block_until_ready(compiled(params, opt_state, gradients, log_weights))
    seconds.append(time.perf_counter() - start)
  memory = compiled.memory_analysis()
  assert memory is not None
  return {
    "seconds": float(np.median(seconds[2:])),
    "state_bytes": sum(x.nbytes for x in jax.tree.leaves(opt_state)),
    "temp_bytes": memory.temp_size_in_bytes,
  }


def make_batch(shape: learning.BatchShape, vocab_size: int) -> types.Batch:
  """Random groups of eight, every sequence as long as can be; prompts without a bound are as long as completions."""
  rng = np.random.default_rng(0)
  size, groups = shape.completion_tokens, []

  def draw(size: int) -> np.ndarray:
    return rng.integers(0, vocab_size, size).astype(np.int32)

  for ticket in range(shape.sequences // 8):
    completions = tuple(
      types.Completion(
        ticket=ticket,
        sample=sample,
        tokens=draw(size),
        logprobs=np.full(size, -np.log(vocab_size), np.float32),
        versions=np.zeros(size, np.int32),
        mask=np.ones(size, bool),
        finish=types.LENGTH,
      )
      for sample in range(8)
    )
    request = types.Request(ticket, draw(shape.prompt_tokens or size), types.Prompt(ticket, "", None))
    groups.append(types.Group(request, completions, rng.normal(size=8).astype(np.float32)))
  return learning.pack(groups, shape)


def measure_learner(config: models.ModelConfig, smoke: bool, repeats: int) -> dict[str, float]:
  """Median seconds of the whole learner step, the optimizers taking turns."""
  length = 32 if smoke else 512
  shape = learning.BatchShape(
    sequences=16 if smoke else 64, row_tokens=4 * length, rows=2 if smoke else 4, completion_tokens=length // 2
  )
  mesh = rollout.make_mesh(jax.devices()[:1])
  policy = models.Policy(config, dtype="float32" if smoke else "bfloat16", remat="attention")
  steps = {}
  for name in IN_LEARNER[:2] if smoke else IN_LEARNER:
    learner = learning.Learner(
      policy,
      OPTIMIZERS[name](),
      learning.objective("sequence_tis", advantages="grpo"),
      shape,
      mesh,
    )
    batch = learner.put(make_batch(shape, config.vocab_size))
    state, _ = jax.block_until_ready(learner.step(learner.init(jax.random.key(0)), batch))
    steps[name] = (learner, state)
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for _ in range(repeats):
    for name, (learner, state) in steps.items():
      start = time.perf_counter()
      state, _ = jax.block_until_ready(learner.step(state, batch))
      seconds[name].append(time.perf_counter() - start)
      steps[name] = (learner, state)
  return {name: float(np.median(times)) for name, times in seconds.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, for any machine")
  parser.add_argument("--step-ms", type=float, help="length of a learner step in ms, instead of measuring one")
  parser.add_argument("--repeats", type=int, default=30)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("stabilizer_cost.json"))
  options = parser.parse_args(arguments)
  config, repeats = (SMOKE, 3) if options.smoke else (QWEN25_05B, options.repeats)
  num_params = config.num_params()
  device = jax.devices()[0].device_kind

  learner = {} if options.step_ms else measure_learner(config, options.smoke, max(repeats // 3, 3))
  step = 1e-3 * options.step_ms if options.step_ms else learner[BASELINE]
  print(f"{device}, {num_params / 1e6:.0f}M parameters; learner step {1e3 * step:.1f} ms")
  for name, seconds in learner.items():
    print(f"  whole step, {name}: {1e3 * seconds:.1f} ms ({100 * (seconds / step - 1):+.2f} %)")

  params = jax.jit(models.Policy(config).init)(jax.random.key(0))
  names = IN_LEARNER if options.smoke else tuple(OPTIMIZERS)
  updates = {name: measure_update(OPTIMIZERS[name](), params, repeats) for name in names}
  print(f"{'optimizer':30}{'update ms':>10}{'added ms':>10}{'share %':>9}{'state B/param':>15}{'temp B/param':>14}")
  for name, row in updates.items():
    added = row["seconds"] - updates[BASELINE]["seconds"]
    row["share_of_step"] = added / step
    state = (row["state_bytes"] - updates[BASELINE]["state_bytes"]) / num_params
    print(
      f"{name:30}{1e3 * row['seconds']:10.2f}{1e3 * added:10.2f}{100 * added / step:9.2f}"
      f"{state:15.2f}{row['temp_bytes'] / num_params:14.2f}"
    )
  result = {"device": device, "params": num_params, "step_s": step, "learner_s": learner, "updates": updates}
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  return result


if __name__ == "__main__":
  main()
