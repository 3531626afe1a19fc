"""What would make a program fit."""

from __future__ import annotations

import math

from experiments.plan._plan import GIB
from experiments.plan._plan import Plan
from experiments.plan._plan import Program


def advise(plan: Plan) -> list[str]:
  """Returns a sentence for each program that does not fit: by how much, and the options that would help."""
  lines = []
  for program in plan.programs:
    if program.problem is not None and program.needed is None:
      lines.append(f"{program.name} was not compiled: {program.problem.strip().splitlines()[0][:300]}")
    elif plan.fits(program) == "no":
      needed = program.needed if program.needed is not None else plan.stays(program.side)
      over = needed - plan.hbm
      remedies = _remedies(plan, program, over)
      lines.append(f"{program.name} needs {needed / GIB:.2f} GiB, {over / GIB:.2f} too many: {remedies}.")
  return lines


def _remedies(plan: Plan, program: Program, over: float) -> str:
  """Returns the options that save most on the side of a program, those that save enough first."""
  found: dict[str, float] = {}
  if program.side == "learner" or plan.colocated:
    found |= _learner_options(plan, program)
  if program.side == "generation" or plan.colocated:
    found |= _generation_options(plan, program, over)
  found = {option: saved for option, saved in found.items() if saved > 0.01 * plan.hbm}
  ordered = sorted(found.items(), key=lambda item: (item[1] < over, -item[1]))
  if not ordered:
    return "take more or larger chips"
  return "; ".join(
    f"{option} saves about {saved / GIB:.1f}{'' if saved >= over else ' (not enough alone)'}"
    for option, saved in ordered[:4]
  )


def _learner_options(plan: Plan, program: Program) -> dict[str, float]:
  options, mesh, kinds = plan.request.options, plan.meshes["learner"], plan.resident["learner"]
  state = sum(kinds.get(kind, 0.0) for kind in ("parameters", "optimizer", "stabilizers", "reference"))
  found = {}
  if mesh["data"] > 1:
    found[f"--fsdp {math.prod(mesh.values()) // mesh['tensor']}"] = state * (1 - 1 / mesh["data"])
  evaluator = sum(size for kind, size in kinds.items() if kind.startswith("evaluator"))
  if evaluator:
    found["--eval-prompts 0"] = evaluator
    if (cache := kinds.get("evaluator's cache", 0.0)) > 0 and options["slots"] >= 2 * options["samples"]:
      found[f"--slots {options['slots'] // 2}"] = cache / 2
  if not options.get("lora_rank") and "lora_rank" in options:
    found["--lora-rank 16"] = state * 0.8
  if program.costs is not None and program.name in ("step", "score"):
    least = mesh["data"] * mesh["fsdp"]
    if options["rows"] >= 2 * least:
      found[f"--rows {options['rows'] // 2}"] = program.costs.temporaries * 0.3
    if options.get("remat", "full") != "full":
      found["--remat full"] = program.costs.temporaries * 0.3
  elif program.name == "step" and options["rows"] >= 2 * mesh["data"] * mesh["fsdp"]:
    found[f"--rows {options['rows'] // 2}"] = max(0.0, (program.needed or 0.0) - state) * 0.3
  return found


def _generation_options(plan: Plan, program: Program, over: float) -> dict[str, float]:
  options, mesh, kinds = plan.request.options, plan.meshes["generation"], plan.resident["generation"]
  found = {}
  if mesh["data"] > 1 and mesh["data"] % 2 == 0:
    found[f"--generation-tensor {2 * mesh['tensor']}"] = kinds["weights"] / 2
  of_slots, slots = kinds["cache"] + kinds.get("cache's padding", 0.0), options["slots"]
  if program.name == "decode" and program.needed is not None:
    of_slots += max(0.0, program.needed - plan.stays("generation"))  # temporaries grow with them, too
  while slots // 2 >= options["samples"] and of_slots * (1 - slots / options["slots"]) < over:
    slots //= 2
  if slots < options["slots"]:
    found[f"--slots {slots}"] = of_slots * (1 - slots / options["slots"])
  return found
