"""Compiles and counts the programs of a run: `python -m experiments.plan._measure` is the child of a plan.

Reads a `Request` from its input and from its arguments the names of programs, or first words of them, none for all.
Prints a JSON object per line: what stays in memory, then for every program that it begins, and what it costs. The
compiler may abort, so that whoever started it knows the program at which it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from async_rl import models
from async_rl import runtime
from experiments.plan import _hlo_costs
from experiments.plan import _jaxpr_costs
from experiments.plan._chips import Chip
from experiments.plan._compile import compile_program
from experiments.plan._gpus import cudnn_as_there
from experiments.plan._hlo_costs import Operation
from experiments.plan._measure_all import select
from experiments.plan._request import Request
from experiments.plan._request import head_chunks
from experiments.plan._request import micro_batches
from experiments.plan._summary import Summary
from experiments.plan._summary import summarize


def loop_turns(request: Request, experiment: runtime.Experiment, program: str, mesh: Mesh) -> tuple[float, ...]:
  """Returns the turns of a program's loops that depend on data, see `_jaxpr_costs.count_traced`."""
  if program == "decode":
    return (experiment.sampler_config.chunk,)
  tokens = request.prompt_tokens + request.completion_tokens
  chunks = head_chunks(experiment.batch_shape, request.completion_tokens / tokens, models.row_parts(mesh))
  return micro_batches(experiment, tokens), chunks


def filled_positions(request: Request, experiment: runtime.Experiment, program: str = "decode") -> float:
  """Returns the mean of the filled positions of a row of the cache, over the decode steps of a sample.

  Without the prompt if groups share it. Of other programs than "decode": the mean of the tokens of a sequence.
  """
  if program != "decode":
    return request.prompt_tokens + request.completion_tokens
  return (0 if experiment.sampler_config.shares_prompts else request.prompt_tokens) + request.completion_tokens / 2


def measure(
  program: runtime.RunProgram, chip: Chip, devices: list[Any], turns: tuple[float, ...], filled: float, compiles: bool
) -> Summary:
  """Returns the costs of a program.

  Args:
    program: the program.
    chip: the chip.
    devices: the devices of its mesh.
    turns: the turns of loops that depend on data, see `_jaxpr_costs.count_traced`.
    filled: the filled positions of a row of the cache, or the tokens of a sequence.
    compiles: whether to compile it. Otherwise the traced program is counted, as it is for GPUs anyway, of whose
      compiled program only the memory is taken.

  Raises:
    Exception: whatever the compiler says, such as that the memory does not suffice.
  """
  with contextlib.nullcontext() if chip.is_tpu else cudnn_as_there():
    traced = program.trace()
    lowered = traced.lower() if compiles else None
  operations, kernels = _count_traced(program, traced, turns, filled, len(devices))
  exchanges: list[_hlo_costs.Exchange] = []
  memory: dict[str, float] = {}
  if lowered is not None:
    compiled = compile_program(lowered, devices)
    memory |= compiled.memory
    if compiled.text is not None:
      operations, exchanges = _hlo_costs.count_compiled(compiled.text, turns)
    elif chip.is_tpu:
      memory["unread"] = 1.0
  return summarize(operations, kernels, exchanges, chip, devices, memory)


def _count_traced(
  program: runtime.RunProgram, traced: jax.stages.Traced, turns: tuple[float, ...], filled: float, devices: int
) -> tuple[list[Operation], list[Operation]]:
  """Returns the operations and kernels of one of the devices, which hold resident arrays as these are sharded."""
  known = {
    (x.shape, x.dtype): runtime.bytes_per_device(x) / max(1, x.size * x.dtype.itemsize)
    for x in jax.tree.leaves(program.resident)
  }
  shares = [known.get((x.shape, x.dtype), 1 / devices) for x in traced.jaxpr.in_avals]
  return _jaxpr_costs.count_traced(traced.jaxpr, turns, devices=devices, shares=shares, filled=filled)


def cache_reads(request: Request, experiment: runtime.Experiment, trace: runtime.RunTrace) -> dict[str, float]:
  """Returns the bytes of the cache that a decode step reads on a TPU chip, by backend, the run's own first.

  XLA reads all positions of the cache, here the longest. The ragged kernel, which does not take all heads, reads the
  blocks that hold something, or those of a layer's window: at each end half a block in vain.
  """
  if not request.target.chip.is_tpu:
    return {}
  whole = float(runtime.bytes_per_device(trace.resident["generation"]["cache"]))
  config, capacity = experiment.policy.config, experiment.sampler_config.capacity
  shown = [config.sliding_window if config.is_local(i) else None for i in range(config.num_layers)]
  half = models.RAGGED_BLOCK / 2
  reached = [
    min(filled_positions(request, experiment), math.inf if window is None else window + half) + half for window in shown
  ]
  reads = {"xla": whole, "ragged": whole * sum(min(1.0, x / capacity) for x in reached) / len(reached)}
  policy = dataclasses.replace(experiment.policy, mesh=trace.meshes.generation)
  backends = [dataclasses.replace(policy, attention=name).cache_backend for name in (policy.attention, "ragged", "xla")]
  return {name: reads[name] for name in backends if name in reads}


def messages(request: Request, names: Sequence[str]) -> Iterator[dict[str, Any]]:
  """Yields what stays in memory; then the name of each program, and its costs as soon as they are known."""
  target, experiment = request.target, request.experiment()
  devices = target.devices(request.compiles)
  trace = runtime.trace_run(experiment, devices)
  sides = {"learner": trace.meshes.learner, "generation": trace.meshes.generation}
  yield dict(
    resident={
      side: {kind: runtime.bytes_per_device(arrays) for kind, arrays in kinds.items()}
      for side, kinds in trace.resident.items()
    },
    meshes={side: dict(mesh.shape) for side, mesh in sides.items()},
    hosts=len({d.process_index for d in devices}),
    samplers=len(trace.meshes.samplers),
    engines=trace.engines,
    colocated=trace.meshes.colocated,
    cache_reads=cache_reads(request, experiment, trace),
    layers=experiment.policy.config.num_layers,
    parameters=sum(x.size for x in jax.tree.leaves(experiment.policy.abstract())),
    programs=list(trace.programs),
  )
  for name in select(trace.programs, names):
    program = trace.programs[name]
    yield {"program": name}
    start = time.monotonic()
    result: dict[str, Any] = {
      "side": program.side,
      "resident": runtime.bytes_per_device(program.resident),
      "makes": None if program.makes is None else runtime.bytes_per_device(program.makes),
    }
    try:
      devices = list(sides[program.side].devices.flat)
      turns = loop_turns(request, experiment, name, sides[program.side])
      filled = filled_positions(request, experiment, name)
      summary = measure(program, target.chip, devices, turns, filled, request.compiles)
      result["costs"] = dataclasses.asdict(summary)
    except Exception as error:
      result["error"] = f"{type(error).__name__}: {error}"
    yield {"program": name, "seconds": round(time.monotonic() - start, 1), **result}


if __name__ == "__main__":
  for message in messages(Request.from_json(sys.stdin.read()), sys.argv[1:]):
    print(json.dumps(message), flush=True)
