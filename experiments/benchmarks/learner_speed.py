"""The learner's speed: seconds of a step and the share of the device's peak that goes into what the step must compute.

    python -m experiments.benchmarks.learner_speed                         # one GPU with 80 GB, about 2 minutes
    python -m experiments.benchmarks.learner_speed --shape smollm2-135m    # the same
    python -m experiments.benchmarks.learner_speed --smoke                 # any machine, seconds; checks that it runs
    python -m experiments.benchmarks.learner_speed --dtype bfloat16 float16 --profile DIR
    python -m experiments.benchmarks.learner_speed --exact-norms none packed single --rows 16    # what exact OPOB costs

A random model of Qwen3-0.6B's shape, or of that which `--shape` names, takes steps with AdamW, clipping and the
effective-sample-size scaling on groups of eight sequences of one length, with float32 master weights, in bfloat16
unless `--dtype` and `--residual-dtype` say otherwise. The loss is TOPR's; with `--exact-norms` also truncated sequence
weights with exact OPOB, whose gradient norms are computed in the ways that are named. `--profile` adds a step that is
traced by `jax.profiler` for every row.

The operations that count are those of the model, nothing for what is computed twice:

    tokens * (6 N + 6 L H d T) + sampled tokens * 6 D V

with N parameters in the matrices of L layers, H heads of width d, T tokens of a sequence (attention sees half of the
square), width D and V tokens of the vocabulary. Their share of the peak is the MFU (model FLOPs utilization).

Prints a row per case and writes learner_speed.json. Columns: the shape; sequences, the prompt's and the completion's
tokens, rows and tokens of a micro-batch, how many of these a step has; what the backward pass recomputes (`--remat`
chooses); the dtypes of activations and of the residual stream; seconds to compile; ms of a step, the median, the
shortest and the longest; MFU; GiB that the step needs beside the state; with `--exact-norms`, how the norms are
computed, whose operations do not count. The file is written after every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import stabilizers
from async_rl.types import Batch
from async_rl.types import TrainState
from experiments.benchmarks import decode_speed
from experiments.benchmarks.stabilizer_cost import make_batch
from experiments.plan._chips import chip_of

WARM_UPS = 4
#: Instead of a way of exact norms: a loss that needs none.
NO_NORMS = "none"


@dataclasses.dataclass(frozen=True)
class Case:
  """Sequences, tokens of a prompt and of a completion, rows of a micro-batch, tokens and most sequences of a row."""

  sequences: int
  prompt: int
  completion: int
  rows: int
  row_tokens: int
  row_sequences: int

  def shape(self) -> learning.BatchShape:
    """Returns the shape of the batch."""
    return learning.BatchShape(
      self.sequences, self.row_tokens, self.rows, self.completion, self.prompt, self.row_sequences
    )

  def operations(self, config: models.ModelConfig) -> float:
    """Returns the floating-point operations of a step that count."""
    c, length = config, self.prompt + self.completion
    heads = c.num_heads * c.head_dim
    per_layer = c.d_model * (2 * heads + 2 * c.num_kv_heads * c.head_dim + 3 * c.d_ff)
    per_token = 6 * c.num_layers * (per_layer + heads * length)
    return self.sequences * (length * per_token + self.completion * 6 * c.d_model * c.vocab_size)


#: By the shape of the model, a name of `models.named`.
CASES = {
  "qwen3-0.6b": (
    Case(64, 256, 256, rows=64, row_tokens=512, row_sequences=1),
    Case(64, 1, 511, rows=64, row_tokens=512, row_sequences=1),
    Case(64, 256, 256, rows=16, row_tokens=1024, row_sequences=8),  # the rows of the configs
    Case(16, 1024, 1024, rows=16, row_tokens=2048, row_sequences=1),
  ),
  "smollm2-135m": tuple(Case(512, 130, 84, rows, row_tokens=1024, row_sequences=8) for rows in (16, 32, 64)),
}
SMOKE_CASES = (Case(8, 16, 16, rows=2, row_tokens=64, row_sequences=3),)


def make_learner(
  policy: models.Policy, case: Case, mesh: jax.sharding.Mesh, exact_norms: str = NO_NORMS
) -> learning.Learner:
  """Returns the learner that takes the steps of a case, with exact OPOB unless its norms are `NO_NORMS`."""
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6), stabilizers.scale_by_ess(0.5))
  if exact_norms == NO_NORMS:
    objective = learning.objective("topr", advantages="dr_grpo", aggregate="sequence_mean")
    return learning.Learner(policy, optimizer, objective, case.shape(), mesh)
  objective = learning.objective("sequence_tis", advantages="opob", aggregate="sequence_mean")
  return learning.Learner(policy, optimizer, objective, case.shape(), mesh, exact_norms=exact_norms)


class Step:
  """A compiled step, its state and its batch.

  Args:
    policy: the model.
    case: the case.
    exact_norms: how exact norms are computed, or `NO_NORMS`.
  """

  def __init__(self, policy: models.Policy, case: Case, exact_norms: str = NO_NORMS):
    learner = make_learner(policy, case, rollout.make_mesh(jax.devices()[:1]), exact_norms)
    start = time.perf_counter()
    self._compiled = learner.trace_step().lower().compile()
    self.compile_seconds = time.perf_counter() - start
    self._state: TrainState = learner.init(jax.random.key(0))
    self._batch: Batch = learner.put(make_batch(case.shape(), policy.config.vocab_size))
    self.micro_batches = int(self._batch.used)

  @property
  def temporaries(self) -> int:
    """Returns the bytes that it needs beside its arguments and results."""
    return self._compiled.memory_analysis().temp_size_in_bytes

  def __call__(self) -> float:
    """Takes a step; returns its seconds."""
    start = time.perf_counter()
    self._state, metrics = jax.block_until_ready(self._compiled(self._state, self._batch, None))
    del metrics
    return time.perf_counter() - start


def row(shape: str, policy: models.Policy, case: Case, step: Step, seconds: list[float]) -> dict[str, Any]:
  """Returns the row of a case; `shape` is the name of the policy's."""
  median = float(np.median(seconds))
  return {
    "shape": shape,
    "sequences": case.sequences,
    "prompt": case.prompt,
    "completion": case.completion,
    "rows": f"{case.rows} x {case.row_tokens}",
    "micro_batches": step.micro_batches,
    "remat": policy.remat,
    "dtype": policy.dtype,
    "residual_dtype": policy.residual_dtype,
    "compile_s": round(step.compile_seconds, 1),
    "ms": [round(1e3 * x, 1) for x in (median, min(seconds), max(seconds))],
    "mfu": round(case.operations(policy.config) / median / chip_of(jax.devices()[0].device_kind).flops, 3),
    "temporaries_GiB": round(step.temporaries / 2**30, 1),
  }


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--shape", default="qwen3-0.6b", choices=tuple(CASES), help="the shape of the model")
  parser.add_argument("--remat", nargs="+", default=["activations"], choices=models.REMAT)
  parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=models.DTYPES)
  parser.add_argument("--residual-dtype", choices=models.DTYPES, help="by default as models.Policy has it")
  parser.add_argument("--exact-norms", nargs="+", default=[NO_NORMS], choices=(NO_NORMS, "packed", "single"))
  parser.add_argument("--rows", nargs="+", type=int, help="only cases with micro-batches of so many rows")
  parser.add_argument("--profile", help="a folder for traces of one step each")
  parser.add_argument("--repeats", type=int, default=10)
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("learner_speed.json"))
  args = parser.parse_args(arguments)
  shape, config, cases = args.shape, models.named(args.shape), CASES[args.shape]
  if args.smoke:
    shape, config, cases = "tiny", decode_speed.SMOKE, SMOKE_CASES
  if args.rows:
    if missing := set(args.rows) - {case.rows for case in cases}:
      parser.error(f"no case has {sorted(missing)} rows; there are {sorted({case.rows for case in cases})}")
    cases = tuple(case for case in cases if case.rows in args.rows)
  device = jax.devices()[0].device_kind
  print(f"{device}, jax {jax.__version__}")
  rows: list[dict[str, Any]] = []
  for case in cases:
    for dtype, remat, exact_norms in itertools.product(args.dtype, args.remat, args.exact_norms):
      policy = models.Policy(config, dtype, remat=remat, residual_dtype=args.residual_dtype)
      step = Step(policy, case, exact_norms)
      for _ in range(WARM_UPS):
        step()
      rows.append(row(shape, policy, case, step, [step() for _ in range(args.repeats)]))
      if args.exact_norms != [NO_NORMS]:
        rows[-1]["exact_norms"] = exact_norms
      print(" ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
      args.out.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1) + "\n")
      if args.profile:
        with jax.profiler.trace(args.profile):
          step()
      del step


if __name__ == "__main__":
  main()
