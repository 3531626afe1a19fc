"""The plan as text, and as values for JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from experiments.plan._advice import advise
from experiments.plan._balance import Pace
from experiments.plan._balance import Split
from experiments.plan._balance import best_split
from experiments.plan._balance import find_pace
from experiments.plan._plan import GIB
from experiments.plan._plan import Plan
from experiments.plan._plan import Program

_WIDTH = 118


def to_json(plan: Plan) -> str:
  """Returns everything that the text says, and more, as JSON."""
  split = best_split(plan)
  pace = find_pace(plan)
  values = dataclasses.asdict(plan) | {
    "hbm": plan.hbm,
    "fits": {program.name: plan.fits(program) for program in plan.programs},
    "seconds": {program.name: program.costs.seconds for program in plan.programs if program.costs},
    "pace": pace and dataclasses.asdict(pace),
    "best_split": split and dataclasses.asdict(split),
    "advice": advise(plan),
  }
  return json.dumps(values, indent=1)


def to_text(plan: Plan) -> str:
  """Returns the plan as lines of text."""
  lines = [*_head(plan), "", *_programs(plan), "", *_memory(plan), "", *_exchanges(plan)]
  advice = [f"  {line}" for line in advise(plan)]
  if advice:
    lines += ["", "What does not fit, and what would help:", *advice]
  return "\n".join([*lines, "", *_balance(plan)])


def _head(plan: Plan) -> Iterator[str]:
  target, request = plan.request.target, plan.request
  chip = target.chip
  model = f" with the shape of {request.model}" if request.model else ""
  yield (
    f"{request.config}{model}: {plan.parameters / 1e6:,.0f}M parameters, {plan.layers} layers, on {target} "
    f"({target.chips} chips, {plan.hosts} host{'s' if plan.hosts > 1 else ''})"
  )
  for side, mesh in plan.meshes.items():
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    place = f" of each of the {plan.samplers} hosts that only generate" if plan.samplers else " of each host"
    place += f", {plan.engines} engines of one chip each" if plan.engines > 1 else ""
    yield f"  {side:10} {axes}{'' if side == 'learner' else place}{', shared' if plan.colocated else ''}"
  yield (
    f"  a chip: {plan.hbm / GIB:.2f} GiB, {chip.flops / 1e12:.0f} TFLOP/s in bfloat16, "
    f"{chip.bandwidth / 1e9:.0f} GB/s, {chip.link / 1e9:.0f} GB/s to its neighbors"
  )
  yield f"  expected: prompts of {request.prompt_tokens:.0f} and completions of {request.completion_tokens:.0f} tokens"
  if plan.compiled:
    yield f"  compiled with {' and '.join(map(str, plan.compiled))} layers; the figures are extrapolated to all"
  counted = "products by shape, traffic as XLA would fuse it"
  if not request.compiles:
    hint = "" if target.has_compiler else "; install jax[cuda13] for its compiler, which needs no GPU"
    yield f"  not compiled: {counted}, temporaries unknown{hint}"
  elif not chip.is_tpu:
    yield f"  compiled for what programs need; {counted}, no exchanges"
  yield f"  times: rooflines at {chip.flops_share:.0%} of the products and {chip.bandwidth_share:.0%} of the bandwidth"


def _programs(plan: Plan) -> Iterator[str]:
  yield f"{'program':12}{'side':12}{'fits':>6}{'needs':>9}{'TFLOP':>9}{'GB':>9}{'sent GB':>9}{'ms':>10}  limit"
  for program in plan.programs:
    needs = "" if program.needed is None else f"{program.needed / GIB:.2f}"
    row = f"{program.name:12}{program.side:12}{plan.fits(program):>6}{needs:>9}"
    if program.costs is None:
      yield f"{row}  {_first_line(program.problem or '')}"[:_WIDTH]
      continue
    c = program.costs
    yield (
      f"{row}{c.flops / 1e12:9.3f}{c.nbytes / 1e9:9.2f}{sum(c.sent.values()) / 1e9:9.2f}{1e3 * c.seconds:10.2f}"
      f"  {_limit(plan, program)}"
    )
  if unread := [program.name for program in plan.programs if program.costs and program.costs.unread]:
    yield (
      f"not readable with this jaxlib, so counted before compilation and without exchanges: {', '.join(unread)}; "
      "install the libtpu that jax[tpu] names"
    )
  if plan.cache_reads:
    own, *others = (f"{nbytes / 1e9:.2f} GB with attention {name}" for name, nbytes in plan.cache_reads.items())
    yield f"a decode step reads of the cache {own}{''.join(f'; it would be {other}' for other in others)}"
  yield (
    f"needs: GiB of a chip with all that stays there; TFLOP, GB of memory traffic, GB sent and ms: of a chip, of one "
    f"call ({plan.request.options['decode_chunk']} tokens of every slot)"
  )


def _limit(plan: Plan, program: Program) -> str:
  c, chip = program.costs, plan.request.target.chip
  assert c is not None
  times = {
    "products": c.flops / (chip.flops * chip.flops_share),
    "memory": c.nbytes / (chip.bandwidth * chip.bandwidth_share),
    "exchanges": c.exposed_seconds + c.hidden_seconds,
  }
  return max(times, key=lambda name: times[name])


def _first_line(problem: str) -> str:
  return problem.strip().splitlines()[0]


def _memory(plan: Plan) -> Iterator[str]:
  yield f"memory of a chip, GiB of {plan.hbm / GIB:.2f}"
  for side, kinds in plan.resident.items():
    stays = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds.items() if size >= 2**20)
    yield f"  {side:10} stays: {stays or 'less than 1 MiB'}"
    for program in plan.programs:
      if program.side == side and program.costs is not None and program.beside is not None:
        c = program.costs
        rest = program.beside - c.temporaries - c.code
        yield (
          f"  {'':10} {program.name}: temporaries {c.temporaries / GIB:.2f}, code {c.code / GIB:.2f}, results, inputs "
          f"and padding {rest / GIB:.2f}"
        )


def _exchanges(plan: Plan) -> Iterator[str]:
  if not (plan.request.compiles and plan.request.target.chip.is_tpu):
    yield "exchanges: not counted"
    return
  yield "exchanges, MB that a chip sends in one call"
  none = True
  for program in plan.programs:
    parts = [] if program.costs is None else sorted(program.costs.sent.items(), key=lambda item: -item[1])
    shown = []
    for kind, sent in parts:
      name, reach = kind.split()
      where = {"host": "", "hosts": " between hosts", "slices": " between slices"}[reach]
      if sent >= 1e5:
        shown.append(f"{name}{where} {sent / 1e6:,.1f}")
    if shown:
      none = False
      yield f"  {program.name}: {', '.join(shown)}"
  if none:
    yield "  none of 0.1 MB or more"


def _balance(plan: Plan) -> Iterator[str]:
  pace = find_pace(plan)
  if pace is None:
    yield "No pace: a program was not compiled."
    return
  yield f"pace: {_describe(pace)}"
  bound = plan.request.options["max_lag"]
  if plan.colocated or plan.request.options["mode"] != "async":
    yield "  both sides take turns"
    return
  if pace.limit == "learner":
    yield f"  the learner is the limit: samples wait for it, and their lag grows to the bound, {bound}"
  else:
    yield f"  generation is the limit: the learner waits {1 - pace.learner / pace.step:.0%} of the time"
  if plan.samplers:
    return
  split = best_split(plan)
  if split is None:
    yield "  no split of these devices fits, as far as can be estimated"
    return
  yield f"best split, estimated: {_options(split)}"
  yield f"  {_describe(split.pace)}"
  yield (
    f"  memory: learner {split.learner_bytes / GIB:.2f}, generation {split.generation_bytes / GIB:.2f} GiB; "
    "plan it with these options to have it compiled"
  )


def _options(split: Split) -> str:
  return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in split.options.items())


def _describe(pace: Pace) -> str:
  return (
    f"learner {pace.learner:.2f} s, generation {pace.generation:.2f} s, a step {pace.step:.2f} s, "
    f"{pace.tokens:,.0f} tokens/s, a sample {pace.sample:.1f} s, mean lag about {pace.lag:.1f}"
  )
