"""The pace of both sides of a run, the lag to expect, and the split of the devices that balances them.

Programs run one after the other on each side, at the times of their rooflines. Other splits are estimated from the
programs of this one: the learner's work is divided by its chips, decoding reads the weights and each slot's cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

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
  options = plan.request.options
  slots, shards = options["slots"] // plan.engines, plan.meshes["generation"]["data"] // plan.engines
  rows = max(1, min(options["prefill_tokens"] // options["max_prompt_tokens"], slots // options["samples"]))
  rows = math.ceil(rows / shards) * shards * plan.engines
  prompts = options["groups"] / (plan.samplers or plan.hosts)
  prefill = prompts / rows * (seconds["prefill"] + seconds["put"])
  return seconds["step"] + seconds["stage"], seconds["decode"] / options["decode_chunk"], prefill, seconds["gather"]


def _pace(plan: Plan, learner: float, decode: float, prefill: float, gather: float, slots: int | None = None) -> Pace:
  options, length = plan.request.options, plan.request.completion_tokens
  slots = slots or options["slots"]
  batch = options["groups"] * options["samples"]
  share = batch / (plan.samplers or plan.hosts)
  drawing = min(slots * OCCUPANCY, share * (1 + _lag_bound(options)))
  generation = share * length / drawing * decode + prefill + gather
  together = plan.colocated or options["mode"] != "async"
  step = learner + generation if together else max(learner, generation)
  limit = "learner" if learner >= generation else "generation"
  bound = _lag_bound(options)
  lag = 0.0 if bound == 0 else float(bound) if limit == "learner" else min(bound, length * decode / 2 / step + 0.5)
  return Pace(learner, generation, step, batch * length / step, length * decode, lag, limit)


def _lag_bound(options: dict[str, Any]) -> int:
  return 0 if options["mode"] == "sync" else options["max_lag"]


def best_split(plan: Plan) -> Split | None:
  """Returns the split of every host that trains most tokens per second of those that fit.

  `None` if a program is missing, or the plan has hosts that only learn, from which no other split can be estimated.
  """
  times = _times(plan)
  if times is None or plan.colocated or plan.samplers:
    return None
  splits = (_estimate(plan, times, candidate) for candidate in _candidates(plan))
  fitting = [split for split in splits if max(split.learner_bytes, split.generation_bytes) <= plan.hbm]
  return max(fitting, key=lambda split: (split.pace.tokens, -split.options["slots"]), default=None)


class _Candidate(NamedTuple):
  """A way to divide the devices of a host, before it is known to fit.

  Attributes:
    generation: the chips of a host that generate.
    learners: the chips of all hosts that learn.
    fsdp: the size of the learner's fsdp axis.
    tensor: the size of the generation meshes' tensor axis.
    slots: the slots of a host.
  """

  generation: int
  learners: int
  fsdp: int
  tensor: int
  slots: int


def _candidates(plan: Plan) -> Iterator[_Candidate]:
  options = plan.request.options
  powers = [2**n for n in range(12)]  # they divide the widths of models; what does not leaves parameters whole
  size = _chips_of_host(plan)
  for generation in range(1, size):
    if not _accepted(plan, generation):
      continue
    learners = (size - generation) * plan.hosts // plan.meshes["learner"]["tensor"]
    for fsdp in (n for n in powers if learners % n == 0):
      for tensor in (n for n in powers if generation % n == 0):
        for wanted in (options["slots"] * n // 4 for n in powers[:5]):
          slots = wanted - wanted % (generation // tensor)
          if slots >= options["samples"]:
            yield _Candidate(generation, learners, fsdp, tensor, slots)


def _chips_of_host(plan: Plan) -> int:
  return math.prod(plan.meshes["learner"].values()) // plan.hosts + math.prod(plan.meshes["generation"].values())


def _accepted(plan: Plan, generation: int) -> bool:
  """Returns whether several hosts can be split so; on v5e and v6e the compiler refuses three of four chips."""
  return plan.hosts == 1 or plan.request.target.chip.name not in ("v5e", "v6e") or generation in (1, 2)


def _estimate(plan: Plan, times: tuple[float, float, float, float], candidate: _Candidate) -> Split:
  """Returns a split with its pace and memory, from the programs of the plan's own."""
  options, learner, generation = plan.request.options, plan.meshes["learner"], plan.meshes["generation"]
  own, row_devices = math.prod(generation.values()), learner["data"] * learner["fsdp"]
  state, weights = plan.resident["learner"], plan.resident["generation"]["weights"]
  cache = plan.stays("generation") - weights
  kept = sum(state[kind] for kind in ("parameters", "optimizer", "stabilizers", "reference") if kind in state)
  beside = {side: max(p.beside or 0.0 for p in plan.programs if p.side == side) for side in plan.meshes}
  read = weights * generation["tensor"] / candidate.tensor
  held = cache * candidate.slots / options["slots"] * own / candidate.generation
  step, decode, prefill, gather = times
  decode *= (read + plan.read_share * held) / (weights + plan.read_share * cache)
  pace = _pace(
    plan, step * row_devices / candidate.learners, decode, prefill * own / candidate.generation, gather, candidate.slots
  )
  evaluator = read + held * candidate.generation / (_chips_of_host(plan) - candidate.generation)
  chosen = {
    "generation_devices": candidate.generation,
    "fsdp": candidate.fsdp,
    "tensor": learner["tensor"],
    "generation_tensor": candidate.tensor,
    "slots": candidate.slots,
    "rows": max(1, options["rows"] // row_devices) * candidate.learners,
  }
  return Split(
    chosen,
    pace,
    kept * learner["fsdp"] / candidate.fsdp + (evaluator if "evaluator's cache" in state else 0.0) + beside["learner"],
    read + held + beside["generation"],
  )
