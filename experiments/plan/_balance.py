"""The pace of both sides of a run, the lag to expect, and the split of the devices that balances them.

Programs run one after the other on each side, at the times of their rooflines. Other splits are estimated from the
programs of this one: the learner's work is divided by its chips, decoding reads the weights and each slot's cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from experiments.plan._plan import Plan

#: The share of the slots that draw, where finished ones are refilled between chunks.
OCCUPANCY = 0.85


@dataclasses.dataclass(frozen=True)
class Pace:
  """The time of one optimizer step.

  Attributes:
    learner: the seconds of the learner.
    generation: the seconds of a host's sampler for its part of a batch, pushes and prompts included.
    step: the seconds of a step, of both sides together.
    tokens: the completion tokens trained per second.
    sample: the seconds from the first to the last token of a sample of mean length.
    lag: the mean lag of trained tokens, in optimizer steps.
    limit: the side that the other waits for, "learner" or "generation".
  """

  learner: float
  generation: float
  step: float
  tokens: float
  sample: float
  lag: float
  limit: str


@dataclasses.dataclass(frozen=True)
class Split:
  """A way to divide the devices.

  Attributes:
    options: the options that ask for it, by name.
    pace: its pace.
    learner_bytes: the memory of a learner chip at its peak.
    generation_bytes: the memory of a generation chip at its peak.
  """

  options: dict[str, int]
  pace: Pace
  learner_bytes: float
  generation_bytes: float


def find_pace(plan: Plan) -> Pace | None:
  """Returns the pace of a plan; `None` if a program is missing."""
  times = _times(plan)
  return None if times is None else _pace(plan, *times)


def _times(plan: Plan) -> tuple[float, float, float, float] | None:
  """Returns the seconds of a step with its push, of a decode step, of all prefills of a batch, and of a gather."""
  seconds: dict[str, float] = {}
  for program in plan.programs:
    if program.costs is None:
      return None
    name = program.name.partition(" ")[0]
    seconds[name] = seconds.get(name, 0.0) + program.costs.seconds
  options, layers = plan.request.options, plan.layers
  rows = max(1, min(options["prefill_tokens"] // options["max_prompt_tokens"], options["slots"] // options["samples"]))
  rows = math.ceil(rows / plan.meshes["generation"]["data"]) * plan.meshes["generation"]["data"]
  prompts = options["groups"] / plan.hosts
  prefill = prompts / rows * (seconds["prefill"] + layers * seconds["put"])
  return seconds["step"] + seconds["stage"], seconds["decode"] / options["decode_chunk"], prefill, seconds["gather"]


def _pace(plan: Plan, learner: float, decode: float, prefill: float, gather: float, slots: int | None = None) -> Pace:
  options, length = plan.request.options, plan.request.completion_tokens
  slots = slots or options["slots"]
  batch = options["groups"] * options["samples"]
  drawing = min(slots * OCCUPANCY, batch / plan.hosts * (1 + _lag_bound(options)))
  generation = batch / plan.hosts * length / drawing * decode + prefill + gather
  together = plan.colocated or options["mode"] != "async"
  step = learner + generation if together else max(learner, generation)
  limit = "learner" if learner >= generation else "generation"
  bound = _lag_bound(options)
  lag = 0.0 if bound == 0 else float(bound) if limit == "learner" else min(bound, length * decode / 2 / step + 0.5)
  return Pace(learner, generation, step, batch * length / step, length * decode, lag, limit)


def _lag_bound(options: dict[str, Any]) -> int:
  return 0 if options["mode"] == "sync" else options["max_lag"]


def best_split(plan: Plan) -> Split | None:
  """Returns the split that trains most tokens per second of those that fit; `None` if a program is missing."""
  times = _times(plan)
  if times is None or plan.colocated:
    return None
  splits = [split for split in _splits(plan, times) if max(split.learner_bytes, split.generation_bytes) <= plan.hbm]
  return max(splits, key=lambda split: (split.pace.tokens, -split.options["slots"]), default=None)


def _splits(plan: Plan, times: tuple[float, float, float, float]) -> Iterator[Split]:
  options, learner, generation = plan.request.options, plan.meshes["learner"], plan.meshes["generation"]
  chips, own = math.prod(learner.values()), math.prod(generation.values())
  size = chips // plan.hosts + own
  weights = plan.resident["generation"]["weights"]
  cache = plan.stays("generation") - weights
  rows_of_chip = max(1, options["rows"] * learner["tensor"] // chips)
  state = plan.resident["learner"]
  kept = sum(state[kind] for kind in ("parameters", "optimizer", "stabilizers", "reference") if kind in state)
  beside = {side: max(p.beside or 0.0 for p in plan.programs if p.side == side) for side in plan.meshes}
  for count in range(1, size):
    if not _accepted(plan, count):
      continue
    learners = (size - count) * plan.hosts
    for fsdp in (
      n
      for n in range(1, learners + 1)
      if learners % n == 0 and (plan.request.slices == 1 or n <= learners // plan.request.slices)
    ):
      for tensor in (n for n in (1, 2, 4, 8) if count % n == 0):
        for slots in (options["slots"] * n // 4 for n in (1, 2, 4, 8, 16)):
          data = count // tensor
          if slots < options["samples"] or slots % data:
            continue
          split = learners // learner["tensor"]
          read = weights * generation["tensor"] / tensor
          held = cache * slots / options["slots"] * own / count
          decode = times[1] * (read + held) / (weights + cache)
          pace = _pace(plan, times[0] * chips / learners, decode, times[2] * own / count, times[3], slots)
          evaluator = read + held * count / (size - count) if "evaluator's cache" in state else 0.0
          yield Split(
            {
              "generation_devices": count,
              "fsdp": fsdp,
              "tensor": learner["tensor"],
              "generation_tensor": tensor,
              "slots": slots,
              "rows": rows_of_chip * split,
            },
            pace,
            kept * learner["fsdp"] / fsdp + evaluator + beside["learner"],
            read + held + beside["generation"],
          )


def _accepted(plan: Plan, count: int) -> bool:
  """Returns whether several hosts can be split so; on v5e and v6e the compiler refuses three of four chips."""
  return plan.hosts == 1 or plan.request.target.chip.name not in ("v5e", "v6e") or count in (1, 2)
