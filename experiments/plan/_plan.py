"""The plan of a run: what each program needs and takes, and whether it fits."""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from typing import Literal

from experiments.plan._measure_all import measure_all
from experiments.plan._request import Request
from experiments.plan._summary import Summary
from experiments.plan._summary import extrapolate

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Program:
  """One program of the run.

  Attributes:
    name: its name.
    side: the devices that it runs on, "learner" or "generation".
    costs: what it costs on one chip; `None` if it was not compiled.
    needed: the bytes of a chip's memory while it runs, with all that stays there; `None` if unknown. Of what was not
      compiled, the least that is certain, if that is too much already.
    beside: those of them that neither stay nor are its arguments: temporaries, results, padding and code.
    problem: why it was not compiled; `None` if it was.
    seconds: the time that the compiler took.
  """

  name: str
  side: str
  costs: Summary | None
  needed: float | None
  beside: float | None
  problem: str | None
  seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """The plan of a run.

  Attributes:
    request: what was asked for.
    layers: the number of layers of the model.
    compiled: the numbers of layers that were compiled, if these are others; figures are then extrapolated.
    parameters: the number of parameters of the model.
    meshes: the sizes of the axes of the mesh of each side.
    hosts: the number of hosts.
    colocated: whether both sides share their devices.
    resident: for each side, the bytes that a chip holds all the time, by kind; padding aside.
    cache_reads: the bytes of the cache that a decode step reads on a TPU chip, by backend of attention, the one that
      the run uses first.
    programs: the programs.
    samplers: the number of hosts that only generate, while the others only learn; 0 if all do both.
    engines: the number of engines of a host that generates: its chips, where the compiler takes each alone, or 1.
  """

  request: Request
  layers: int
  compiled: tuple[int, ...]
  parameters: int
  meshes: dict[str, dict[str, int]]
  hosts: int
  colocated: bool
  resident: dict[str, dict[str, float]]
  cache_reads: dict[str, float]
  programs: list[Program]
  samplers: int = 0
  engines: int = 1

  @property
  def hbm(self) -> float:
    """Returns the bytes of a chip's memory."""
    return self.request.target.chip.hbm

  def program(self, name: str) -> Program:
    """Returns a program by its name."""
    return next(program for program in self.programs if program.name == name)

  @property
  def read_share(self) -> float:
    """Returns the share of the cache that a decode step reads."""
    reads = list(self.cache_reads.values())
    return reads[0] / max(reads) if reads else 1.0

  def stays(self, side: str) -> float:
    """Returns the bytes that stay in the memory of a chip of one side; of both, where they share their devices."""
    sides = self.resident if self.colocated else {side: self.resident[side]}
    return sum(sum(kinds.values()) for kinds in sides.values())

  def fits(self, program: Program) -> Literal["yes", "no", "unknown"]:
    """Returns whether a program fits into a chip's memory."""
    if program.needed is None:
      return "no" if self.stays(program.side) > self.hbm else "unknown"
    return "yes" if program.needed <= self.hbm else "no"


#: The programs of a weight push. Which arrays they take together depends on the depth; their compilation takes seconds.
_PUSH = ("stage", "gather")


def make_plan(request: Request, limit: float, depths: tuple[int, int] | None = None) -> Plan:
  """Makes the plan of a run.

  Args:
    request: the run and the devices.
    limit: the seconds that the compilation of a program may take.
    depths: two numbers of layers to compile with, from which the figures of all layers follow, other than those of the
      weight push, which is compiled as it is; `None` compiles everything as it is.

  Raises:
    ValueError: if the run cannot be built; with the reason.
  """
  if depths is None:
    head, results = measure_all(request, limit)
    return _assemble(request, head, {(head["layers"],): [results]})
  head, push = measure_all(request, limit, _PUSH)
  others = tuple(name for name in head["programs"] if name not in push)
  shallow = [measure_all(dataclasses.replace(request, layers=depth), limit, others)[1] for depth in depths]
  return _assemble(request, head, {(head["layers"],): [push], depths: shallow})


def _along(a: float, b: float, depths: tuple[int, int], wanted: int) -> float:
  return a + (b - a) * (wanted - depths[0]) / (depths[1] - depths[0])


def _assemble(request: Request, head: dict[str, Any], measured: dict[tuple[int, ...], list[dict[str, Any]]]) -> Plan:
  """Returns the plan of what was measured.

  Args:
    request: the run and the devices.
    head: what stays in memory, and the names of the programs.
    measured: the results by program, with each of one or two numbers of layers.
  """
  plan = Plan(
    request,
    head["layers"],
    next((depths for depths in measured if len(depths) == 2), ()),
    head["parameters"],
    head["meshes"],
    head["hosts"],
    head["colocated"],
    head["resident"],
    head["cache_reads"],
    [],
    head["samplers"],
    head["engines"],
  )
  found = {
    name: ([results[name] for results in all_results], depths)
    for depths, all_results in measured.items()
    for name in all_results[0]
    if all(name in results for results in all_results)
  }
  decoding, depths = found.get("decode", ([], ()))
  if decoding and all("costs" in x for x in decoding):
    _fill_up(plan, [(x["costs"]["arguments"], x["resident"]) for x in decoding], depths)
  plan.programs.extend(_program(plan, name, *found[name]) for name in head["programs"] if name in found)
  return plan


def _fill_up(plan: Plan, decoding: list[tuple[float, float]], depths: tuple[int, ...]) -> None:
  """Adds what fills up the tiles of weights and caches: decoding takes both, as they lie in memory.

  Args:
    plan: the plan, whose sizes are those of shapes.
    decoding: the bytes of the arguments of decoding, and those of the shapes of weights and cache, for each depth.
    depths: the numbers of layers.
  """
  padding = [arguments - shapes for arguments, shapes in decoding]
  total = padding[0] if len(depths) == 1 else _along(padding[0], padding[1], (depths[0], depths[1]), plan.layers)
  if total <= 0.01 * sum(plan.resident["generation"].values()):
    return
  cache = plan.resident["generation"]["cache"]
  for side in plan.resident.values():
    for kind in [kind for kind in side if kind.endswith("cache")]:
      side[f"{kind}'s padding"] = total * side[kind] / cache


def _program(plan: Plan, name: str, results: list[dict[str, Any]], depths: tuple[int, ...]) -> Program:
  side, seconds = results[0].get("side", ""), sum(x.get("seconds", 0.0) for x in results)
  if problems := [x["error"] for x in results if "error" in x]:
    needed = used_memory(problems[0]) if len(results) == 1 else None
    if needed is not None:  # with what stays there beside its arguments
      needed += plan.stays(side) - results[0]["resident"]
    return Program(name, side or _side(name), None, needed, None, problems[0], seconds)
  costs = [Summary(**x["costs"]) for x in results]
  resident, makes = results[0]["resident"], results[0]["makes"]
  total = costs[0]
  if len(depths) == 2:
    pair, wanted = (depths[0], depths[1]), plan.layers
    total = extrapolate(costs[0], costs[1], pair, wanted)
    resident = _along(resident, results[1]["resident"], pair, wanted)
    makes = None if makes is None else _along(makes, results[1]["makes"], pair, wanted)
  if not total.arguments:
    least = plan.stays(side) + (makes or 0.0)
    return Program(name, side, total, least if least > plan.hbm else None, None, None, seconds)
  resident += plan.resident["generation"].get("cache's padding", 0.0) if name == "decode" else 0.0
  own = total.sum_of_memory - min(resident, total.arguments)  # a prefill leaves out weights that it does not use
  beside = max(0.0, own + max(0.0, (makes or 0.0) - total.outputs))
  return Program(name, side, total, plan.stays(side) + beside, beside, None, seconds)


def _side(name: str) -> str:
  return "learner" if name in ("step", "score", "stage") else "generation"


def used_memory(problem: str) -> float | None:
  """Returns the bytes that the compiler said a program needs, if that was its problem."""
  words = (
    r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm|required for HLO temporaries \(([\d.]+)([KMG])\) exceeds available HBM"
  )
  match = re.search(words, problem)
  if match is None:
    return None
  size, unit = match[1] or match[3], match[2] or match[4]
  return float(size) * {"K": 2**10, "M": 2**20, "G": 2**30}[unit]
