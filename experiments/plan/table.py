"""Plans GSM8K with every size of Qwen3 on TPU slices of several sizes: `python -m experiments.plan.table`.

    python -m experiments.plan.table                     # compiles with 2 and 3 layers: hours on two cores
    python -m experiments.plan.table --no-compile        # counts traced programs of all layers: about 10 minutes
    python -m experiments.plan.table --only qwen3-0.6b v5e:4x4

Writes a JSON file, row by row, and prints two tables: a row for each model on each slice, and a row for each model with
a cell for each slice. Rows that the file has stay, unless they are asked for and were only counted, or compiled in
vain: so the table can be compiled bit by bit.

Groups of 16 samples with prompts of 160 and completions of 128 tokens in the mean, 320 and 256 at most; AdamW in
float32; `remat full`; no evaluation. The learner splits its parameters over all of its chips, or over the largest power
of two that divides their number. Generation takes half of each host's chips, or a quarter on v6e. The weights are split
over the fewest generation chips of which they fill less than half, held twice as in a push, and slots fill half of what
then remains. Where the compiler takes no part of a slice, all chips do both, and each generates by itself with all of
the weights. What was not compiled is without temporaries and exchanges.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from async_rl import models
from async_rl._paths import write_text
from experiments.plan import __main__ as command
from experiments.plan._balance import find_pace
from experiments.plan._chips import Topology
from experiments.plan._chips import parse_topology
from experiments.plan._plan import GIB
from experiments.plan._plan import Plan
from experiments.plan._plan import make_plan

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
#: The slices, with the chips of each host that generate; 0: all chips do both.
SLICES = {"v5e:4x4": 2, "v5e:8x8": 0, "v5e:16x16": 0, "v5p:2x4x4": 2, "v6e:8x8": 1}
_SAMPLES, _POSITIONS, _CHIPS_OF_HOST = 16, 576, 4


def choose_options(model: str, topology: Topology, generation: int) -> list[str]:
  """Returns the options of a run, by the rules that the table states."""
  config = models.named(model)
  weights = 2 * 2 * config.num_params()  # in bfloat16, the old ones and the new ones
  own = generation or _CHIPS_OF_HOST
  engines = 1 if generation else own
  hosts = topology.chips // _CHIPS_OF_HOST
  learners = topology.chips - generation * hosts
  room = topology.chip.hbm - (16 * config.num_params() / learners if generation == 0 else 0)
  splits = [n for n in (1, 2, 4) if own % (engines * n) == 0]
  tensor = next((n for n in splits if weights / n < 0.5 * room), splits[-1])
  slot = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * _POSITIONS / own
  least = _SAMPLES * engines
  fitting = [n for n in (16, 32, 64, 128, 256, 512) if n >= least and n * slot < 0.5 * (room - weights / tensor)]
  return [
    *("--groups", str(max(32, hosts)), "--samples", str(_SAMPLES), "--slots", str(max(fitting, default=least))),
    *("--generation-devices", str(generation), "--generation-tensor", str(tensor), "--fsdp", str(learners & -learners)),
    *("--rows", str(learners), "--remat", "full", "--eval-prompts", "0", "--max-lag", "2"),
  ]


def plan_row(model: str, name: str, generation: int, *, compiles: bool, limit: float) -> dict[str, Any]:
  """Returns the row of a model on a slice."""
  options = choose_options(model, parse_topology(name), generation)
  arguments = ["gsm8k", "--topology", name, "--model", model, *options, *([] if compiles else ["--no-compile"])]
  config, wanted, chosen = command.parse(arguments)
  row: dict[str, Any] = {"model": model, "slice": name, "options": " ".join(options), "compiled": compiles}
  try:
    plan = make_plan(command.request_of(config, wanted, chosen), limit, (2, 3) if compiles else None)
  except ValueError as error:
    return row | {"error": str(error)}
  return row | _figures(plan)


def _figures(plan: Plan) -> dict[str, Any]:
  pace = find_pace(plan)
  needs = {
    side: max((p.needed or plan.stays(side) for p in plan.programs if p.side == side), default=plan.stays(side))
    for side in plan.resident
  }
  chips = plan.request.target.chips
  return {
    "parameters": plan.parameters,
    "needs_GiB": {side: round(need / GIB, 2) for side, need in needs.items()},
    "hbm_GiB": round(plan.hbm / GIB, 2),
    "fits": all(plan.fits(program) != "no" for program in plan.programs),
    "problems": {p.name: p.problem.splitlines()[0][:200] for p in plan.programs if p.problem},
    "learner_s": pace and round(pace.learner, 3),
    "generation_s": pace and round(pace.generation, 3),
    "step_s": pace and round(pace.step, 3),
    "tokens_per_s": pace and round(pace.tokens),
    "chip_hours_per_100_steps": pace and round(pace.step * 100 * chips / 3600, 2),
  }


def to_text(rows: list[dict[str, Any]]) -> str:
  """Returns the table as Markdown."""
  lines = [
    "| model | slice | by | slots, tensor | learner, generation, GiB of a chip's | learner s | generation s | "
    "tokens/s | chip-hours of 100 steps |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    start = f"| {row['model']} | {row['slice']} | {'compiled' if row['compiled'] else 'counted'} |"
    if "error" in row:
      lines.append(f"{start} {row['error'][:120]} | | | | | |")
      continue
    options = dict(zip(row["options"].split()[::2], row["options"].split()[1::2], strict=True))
    needs, mark = row["needs_GiB"], "" if row["fits"] else " **no**"
    memory = f"{needs['learner']}, {needs['generation']} of {row['hbm_GiB']}{mark}"
    figures = [row["learner_s"], row["generation_s"], row["tokens_per_s"], row["chip_hours_per_100_steps"]]
    shown = " | ".join("–" if x is None or not row["fits"] else f"{x:,}" for x in figures)
    lines.append(f"{start} {options['--slots']}, {options['--generation-tensor']} | {memory} | {shown} |")
  return "\n".join(lines)


def to_overview(rows: list[dict[str, Any]]) -> str:
  """Returns a row for each model, with its tokens per second and chip-hours of 100 steps on each slice, as Markdown.

  What was compiled is bold. Of what does not fit, the cell tells the memory that the side in need of most needs.
  """
  cells = {(row["model"], row["slice"]): _overview_cell(row) for row in rows}
  lines = [f"| model | {' | '.join(f'`{name}`' for name in SLICES)} |", "|---" * (len(SLICES) + 1) + "|"]
  for model in MODELS:
    if any((model, name) in cells for name in SLICES):
      lines.append(f"| {model} | {' | '.join(cells.get((model, name), '') for name in SLICES)} |")
  return "\n".join(lines)


def _overview_cell(row: dict[str, Any]) -> str:
  if "error" in row:
    return "–"
  if not row["fits"]:
    text = f"needs {max(row['needs_GiB'].values()):.1f} of {row['hbm_GiB']} GiB"
  elif row["step_s"] is None:
    return "–"
  else:
    tokens = row["tokens_per_s"] / 1000
    text = f"{tokens:.{0 if tokens >= 100 else 1}f}k, {row['chip_hours_per_100_steps']:.2f}"
  return f"**{text}**" if row["compiled"] else text


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m experiments.plan.table", description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--only", nargs="+", default=[], help="models and slices; by default all")
  parser.add_argument("--no-compile", action="store_true", help="count traced programs")
  parser.add_argument("--limit", type=float, default=1800, help="seconds that the compilation of a program may take")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("plan_table.json"))
  args = parser.parse_args(arguments)
  unknown = [name for name in args.only if name not in (*MODELS, *SLICES)]
  if unknown:
    parser.error(f"no such model or slice: {', '.join(unknown)}; there are {', '.join((*MODELS, *SLICES))}")
  rows = {(row["model"], row["slice"]): row for row in json.loads(args.out.read_text())} if args.out.exists() else {}
  for model in [name for name in MODELS if name in args.only or not set(MODELS) & set(args.only)]:
    for name, generation in SLICES.items():
      old = rows.get((model, name))
      if (name not in args.only and set(SLICES) & set(args.only)) or (old and _is_compiled(old)):
        continue
      row = plan_row(model, name, generation, compiles=not args.no_compile, limit=args.limit)
      print(json.dumps(row), file=sys.stderr, flush=True)
      if old is None or args.no_compile or _is_compiled(row):
        rows[model, name] = row
      write_text(args.out, json.dumps(list(rows.values()), indent=1) + "\n")
  print(to_text(list(rows.values())), to_overview(list(rows.values())), sep="\n\n")
  return 0


def _is_compiled(row: dict[str, Any]) -> bool:
  """Returns whether all that a row tells was compiled, or what was compiled is known not to fit."""
  return row["compiled"] and "error" not in row and (row["step_s"] is not None or not row["fits"])


if __name__ == "__main__":
  sys.exit(main())
