"""The plan's times against measured ones: learner and decode steps on the accelerator at hand.

    python -m experiments.benchmarks.predict            # one H100 or H200, about 5 minutes
    python -m experiments.benchmarks.predict --smoke    # any machine, seconds; checks that it runs

Every step is predicted as `python -m experiments.plan --topology h100:2` does, from the traced program and the chip's
data sheet, and then measured: learner steps with AdamW and the effective-sample-size scaling on 64 sequences of 512
tokens, decode steps through the engine, its host work included. Qwen3-0.6B's shape, random weights, bfloat16.

Prints a row per step, predicted and measured milliseconds and the error of the prediction, and writes predict.json. The
aim is an error of at most 20 %. On a device that is not in the plan's table the predictions are those for an H100.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import sampling
from async_rl import stabilizers
from experiments.benchmarks import decode_speed
from experiments.benchmarks.stabilizer_cost import make_batch
from experiments.plan._chips import CHIPS
from experiments.plan._chips import Chip
from experiments.plan._jaxpr_costs import count_traced
from experiments.plan._request import head_chunks
from experiments.plan._summary import seconds_of


@dataclasses.dataclass(frozen=True)
class LearnerCase:
  """Rows of a micro-batch, tokens of a row, what the backward pass recomputes."""

  rows: int
  row_tokens: int
  remat: str
  head_chunk: int = models.HEAD_CHUNK


LEARNER_CASES = (
  LearnerCase(16, 1024, "attention"),
  LearnerCase(16, 1024, "full"),
  LearnerCase(8, 512, "none"),
  LearnerCase(64, 512, "attention"),
  LearnerCase(64, 512, "activations"),
)
DECODE_CASES = (
  decode_speed.Case(64, 832),
  decode_speed.Case(64, 320),
  decode_speed.Case(256, 832),
  decode_speed.Case(256, 320),
  decode_speed.Case(512, 320, capacity=576),
)
SMOKE_LEARNER_CASES = (LearnerCase(2, 32, "attention", head_chunk=16),)
SMOKE_DECODE_CASES = decode_speed.SMOKE_CASES[1:2]


def chip_of(device: jax.Device) -> Chip:
  """Returns the data sheet of a device, an H100's if it has none."""
  return next((chip for name, chip in CHIPS.items() if name in device.device_kind.lower()), CHIPS["h100"])


def predict(traced: jax.stages.Traced, chip: Chip, turns: Sequence[float]) -> float:
  """Returns the seconds of a traced program."""
  operations, kernels = count_traced(traced.jaxpr, turns)
  return seconds_of(operations, chip) + seconds_of(kernels, chip, kernels=True)


def compare_learner(config: models.ModelConfig, case: LearnerCase, sequences: int, chip: Chip) -> dict[str, Any]:
  """Returns the row of a learner step."""
  half = min(256, case.row_tokens // 2)
  shape = learning.BatchShape(sequences, case.row_tokens, case.rows, completion_tokens=half, prompt_tokens=half)
  mesh = rollout.make_mesh(jax.devices()[:1])

  def make_learner(attention: str) -> learning.Learner:
    policy = models.Policy(config, remat=case.remat, attention=attention)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6), stabilizers.scale_by_ess(0.5))
    objective = learning.objective("topr", advantages="dr_grpo", aggregate="sequence_mean")
    return learning.Learner(policy, optimizer, objective, shape, mesh, head_chunk=case.head_chunk)

  batch = make_batch(shape, config.vocab_size)
  chunks = head_chunks(shape, 0.5, head_chunk=case.head_chunk)  # half of the tokens are completions
  predicted = predict(make_learner("splash").trace_step(), chip, (int(batch.used), chunks))
  learner = make_learner("auto")
  state, placed = learner.init(jax.random.key(0)), learner.put(batch)
  seconds = []
  for _ in range(7):
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(learner.step(state, placed))
    seconds.append(time.perf_counter() - start)
  del metrics
  name = f"learner {case.rows}x{case.row_tokens} x {int(batch.used)} remat {case.remat}"
  return _row(name, predicted, float(np.median(seconds[2:])))


def compare_decode(config: models.ModelConfig, case: decode_speed.Case, chunk: int, chip: Chip) -> dict[str, Any]:
  """Returns the row of a decode step."""
  policy = models.Policy(config)
  # Two programs: compiled as one, on a GPU they take minutes.
  params = jax.jit(functools.partial(sampling.prepare_weights, policy))(jax.jit(policy.init)(jax.random.key(0)))
  measured = decode_speed.measure(policy, params, case, chunk, chip.bandwidth)
  mesh = rollout.make_mesh(jax.devices()[:1])
  # XLA's products over what is filled stand for a kernel, of which the traced program shows no cost.
  counted = dataclasses.replace(policy, attention="xla")
  programs = sampling.Programs(counted, decode_speed.sampler_config(case, chunk), (), mesh)
  slots, positions = measured["computed"]
  if policy.cache_backend != "xla":
    positions = measured["filled"]
  predicted = predict(programs.trace_decode(slots, positions), chip, [chunk]) / chunk
  name = f"decode {slots} slots, {positions} positions"
  return _row(name, predicted, measured["ms_per_step"] / 1e3)


def _row(name: str, predicted: float, measured: float) -> dict[str, Any]:
  return {
    "step": name,
    "predicted_ms": round(1e3 * predicted, 3),
    "measured_ms": round(1e3 * measured, 3),
    "error": round(predicted / measured - 1, 3),
  }


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("predict.json"))
  args = parser.parse_args(arguments)
  chip = chip_of(jax.devices()[0])
  config = decode_speed.SMOKE if args.smoke else decode_speed.QWEN3_06B
  print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, predicted for {chip.name}")
  print(f"{'step':44}{'predicted ms':>14}{'measured ms':>14}{'error':>9}")
  rows = []
  for learner_case in SMOKE_LEARNER_CASES if args.smoke else LEARNER_CASES:
    rows.append(compare_learner(config, learner_case, 8 if args.smoke else 64, chip))
    _print(rows[-1])
  for case in SMOKE_DECODE_CASES if args.smoke else DECODE_CASES:
    rows.append(compare_decode(config, case, 8 if args.smoke else 64, chip))
    _print(rows[-1])
  result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "chip": chip.name, "rows": rows}
  args.out.write_text(json.dumps(result, indent=1) + "\n")


def _print(row: dict[str, Any]) -> None:
  print(f"{row['step']:44}{row['predicted_ms']:14.3f}{row['measured_ms']:14.3f}{row['error']:9.1%}", flush=True)


if __name__ == "__main__":
  main()
