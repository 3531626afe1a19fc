"""Compares sampling and learning on every mesh of this machine's devices with one device.

    python -m experiments.benchmarks.mesh_parity            # two GPUs or more, 10 minutes, mostly compilation
    python -m experiments.benchmarks.mesh_parity --smoke    # any machine, a minute on two forced CPU devices

A random policy with grouped-query attention draws 256 samples on each generation mesh and takes a learner step over
them on each learner mesh, in float32 with exact products and in bfloat16 with the attention kernels of the machine.
Prints a row per mesh and writes mesh_parity.json.

Columns of generation: samples whose tokens equal those of one device; largest difference of log-probabilities up to the
first different token. Columns of learning: relative difference of the gradient, ‖g − g₁‖ / ‖g₁‖, and of the loss; and
the mean difference of the learner's log-probabilities from those that one device drew, which is 0 but for rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import sampling
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request

MODEL = models.ModelConfig(
  vocab_size=4096, d_model=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64, d_ff=1536,
  tie_embeddings=True, qk_norm=True,
)  # fmt: skip
SMOKE = dataclasses.replace(MODEL, vocab_size=512, d_model=64, num_layers=2, head_dim=16, d_ff=128)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of one comparison: groups, samples of each, and the longest prompt and completion in tokens."""

  groups: int = 64
  samples: int = 4
  prompt: int = 96
  completion: int = 64

  def requests(self, vocab_size: int) -> list[Request]:
    """Returns random prompts of many lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, self.prompt + 1, self.groups)
    prompts = [np.asarray(rng.integers(0, vocab_size, size), np.int32) for size in lengths]
    return [Request(i, tokens, Prompt(i, "", None)) for i, tokens in enumerate(prompts)]


def meshes_of(devices: Sequence[jax.Device], pure: bool) -> Iterator[dict[str, int]]:
  """Yields the sizes of the axes of every mesh over all `devices`; if `pure`, of meshes with one axis."""
  count = len(devices)
  divisors = [n for n in range(1, count + 1) if count % n == 0]
  for fsdp, tensor in itertools.product(divisors, divisors):
    axes = {"data": count // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
    if count % (fsdp * tensor) == 0 and (not pure or count in axes.values()):
      yield axes


def draw_samples(
  policy: models.Policy, params: models.Params, mesh: Mesh, sizes: Sizes
) -> tuple[list[Request], list[Completion]]:
  """Draws all samples on a generation mesh."""
  config = sampling.SamplerConfig(
    slots=sizes.groups * sizes.samples // 2,  # half of them, so that slots are refilled
    group_size=sizes.samples,
    max_prompt_tokens=sizes.prompt,
    max_new_tokens=sizes.completion,
    chunk=16,
  )
  engine = sampling.Engine(policy, config, stop_ids=(7, 8, 9), pad_id=0, mesh=mesh)
  engine.set_weights(params, 0)
  requests = sizes.requests(policy.config.vocab_size)
  return requests, sampling.generate(engine, requests)


def learn_once(
  policy: models.Policy, params: models.Params, groups: list[Group], mesh: Mesh, sizes: Sizes
) -> tuple[Any, dict[str, float]]:
  """Returns the gradient of one step, as the change of the parameters under plain descent, and the step's metrics."""
  shape = learning.BatchShape(
    sequences=sizes.groups * sizes.samples,
    row_tokens=2 * (sizes.prompt + sizes.completion),
    rows=16,
    completion_tokens=sizes.completion,
  )
  objective = learning.objective("sequence_tis", advantages="dr_grpo")
  learner = learning.Learner(policy, optax.sgd(1.0), objective, shape, mesh)
  before = learner.init(jax.random.key(0), params)
  start = jax.device_get(before.params)
  after, metrics = learner.step(before, learner.put(learning.pack(groups, shape)))
  gradient = jax.tree.map(np.subtract, start, jax.device_get(after.params))
  return gradient, {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


def compare_samples(found: list[Completion], expected: list[Completion]) -> dict[str, float]:
  """Compares samples of the same tickets; log-probabilities are compared up to the first different token."""
  equal, largest = 0, 0.0
  for a, b in zip(found, expected, strict=True):
    size = min(len(a.tokens), len(b.tokens))
    same = int(np.argmin(np.append(a.tokens[:size] == b.tokens[:size], False)))
    equal += same == len(a.tokens) == len(b.tokens)
    largest = max(largest, float(np.max(np.abs(a.logprobs[:same] - b.logprobs[:same]), initial=0.0)))
  return {"equal_samples": equal, "samples": len(expected), "max_logprob_difference": largest}


def norm(tree: Any) -> float:
  """Returns the Euclidean norm of all leaves, in float64."""
  return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))))


def compare_dtype(model: models.ModelConfig, dtype: str, sizes: Sizes, pure: bool) -> list[dict[str, Any]]:
  """Returns the rows of one compute dtype."""
  devices = jax.devices()
  policy = models.Policy(model, dtype=dtype)
  params = jax.jit(policy.init)(jax.random.key(1))
  # Large embeddings make peaked distributions: rounding is visible, and samples end by themselves.
  params = jax.device_get(jax.tree.map(lambda x: 1.5 * x, params))
  one = rollout.make_mesh(devices[:1])
  requests, samples = draw_samples(policy, params, one, sizes)
  groups = []
  for i, request in enumerate(requests):
    completions = tuple(samples[i * sizes.samples : (i + 1) * sizes.samples])
    rewards = np.array([np.mean(c.tokens % 2) for c in completions], np.float32)
    groups.append(Group(request, completions, rewards))
  gradient, metrics = learn_once(policy, params, groups, one, sizes)
  rows = []
  for axes in meshes_of(devices, pure):
    row: dict[str, Any] = {"dtype": dtype, **axes}
    mesh = rollout.make_mesh(devices, fsdp=axes["fsdp"], tensor=axes["tensor"])
    if axes["fsdp"] == 1:  # samplers have no fsdp axis
      row |= compare_samples(draw_samples(policy, params, mesh, sizes)[1], samples)
    found, values = learn_once(policy, params, groups, mesh, sizes)
    difference = jax.tree.map(lambda a, b: np.subtract(a, b, dtype=np.float64), found, gradient)
    row["gradient_difference"] = norm(difference) / norm(gradient)
    row["loss_difference"] = abs(values["loss"] - metrics["loss"]) / abs(metrics["loss"])
    row["sampler_learner_difference"] = values["logprob_difference/lag_zero"]
    rows.append(row)
    print(format_row(row), flush=True)
  return rows


def format_row(row: dict[str, Any]) -> str:
  """Returns a row of the printed table."""
  samples = f"{row['equal_samples']}/{row['samples']}" if "samples" in row else "-"
  logprobs = f"{row['max_logprob_difference']:.1e}" if "samples" in row else "-"
  return (
    f"{row['dtype']:8} {row['data']:4} {row['fsdp']:4} {row['tensor']:6} {samples:>8} {logprobs:>9} "
    f"{row['gradient_difference']:9.1e} {row['loss_difference']:9.1e} {row['sampler_learner_difference']:9.1e}"
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--pure", action="store_true", help="only meshes with one axis")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="only this compute dtype")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("mesh_parity.json"))
  args = parser.parse_args()
  if len(jax.devices()) < 2:
    raise SystemExit("error: this compares meshes with one device, got 1 device; run it on two or more.")
  model, sizes = (SMOKE, Sizes(8, 2, 24, 16)) if args.smoke else (MODEL, Sizes())
  print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
  print("dtype    data fsdp tensor    equal   logprob  gradient      loss  s-l mean")
  rows: list[dict[str, Any]] = []
  if args.dtype != "bfloat16":
    with jax.default_matmul_precision("highest"):
      rows += compare_dtype(model, "float32", sizes, args.pure)
  if args.dtype != "float32":
    rows += compare_dtype(model, "bfloat16", sizes, args.pure)
  result = {"device": jax.devices()[0].device_kind, "devices": len(jax.devices()), "jax": jax.__version__, "rows": rows}
  args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
