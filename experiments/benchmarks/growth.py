"""How the cost of a token grows with the model, the length of sequences, the slots and the size of groups.

    python -m experiments.benchmarks.growth --topologies v5p:2x2x2 h200:8   # by the plan: any machine, about 10 minutes
    python -m experiments.benchmarks.growth --measure                       # one GPU with 80 GB
    python -m experiments.benchmarks.growth --measure --smoke               # any machine, seconds; checks that it runs

From Qwen3-0.6B's shape, 512 tokens of a sequence, half of them the completion, 256 slots and groups of 8, one of the
four is changed at a time: shapes of 0.1 to 8 billion parameters (SmolLM2-135M, Qwen3), 1,024 to 16,384 tokens, 16 to
1,024 slots, groups of 4 to 64. The cost is chip-microseconds of a trained completion token, those of the learner and
those of generation, prompts included, on chips that are kept busy.

By the plan, half of the chips of each host learn and half generate, slots are those of all hosts, a step has 512
samples and micro-batches of 16,384 tokens for each chip, and the parameters are split over the fewest chips that leave
half of their memory free. The programs are counted as they are traced, see `experiments.plan`: exchanges and
temporaries are left out. `--measure` takes steps of `learner_speed` with micro-batches of 32,768 tokens,
and decodes with `decode_speed`, on the first device. Where weights and cache would take more than three fifths of the
memory, it decodes with half of the slots, a quarter and so on (`decoded_slots`); what does not fit is left out, with
the reason.

Rows that the file has already are not measured again: a command that was cut off goes on.

Writes growth.json, with the bytes of a token in the cache and of the learner's state for every shape, and growth.png,
where points whose state and cache alone need more than the memory are hollow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from async_rl import models
from async_rl._paths import write_text
from experiments.benchmarks import decode_speed
from experiments.benchmarks import learner_speed
from experiments.plan import __main__ as command
from experiments.plan._balance import find_pace
from experiments.plan._chips import chip_of
from experiments.plan._chips import parse_topology
from experiments.plan._plan import Plan
from experiments.plan._plan import make_plan

SWEEPS: dict[str, tuple[Any, ...]] = {
  "model": ("smollm2-135m", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"),
  "length": (1024, 2048, 4096, 8192, 16_384),
  "slots": (16, 64, 256, 1024),
  "group": (4, 8, 16, 32, 64),
}
_TOKENS = 32_768  # of a measured micro-batch
_SAMPLES = 512  # of a planned step
_MICRO_BATCH = 16_384  # tokens of a chip, of a planned step
_STATE = 16  # bytes of a parameter: float32, its gradient and Adam's two moments


@dataclasses.dataclass(frozen=True)
class Point:
  """One workload: the shape, tokens of a sequence, slots of all hosts, samples of a group."""

  model: str = "qwen3-0.6b"
  length: int = 512
  slots: int = 256
  group: int = 8

  @property
  def half(self) -> int:
    """Returns the tokens of a prompt, and those of a completion."""
    return self.length // 2


def points() -> Iterator[tuple[str, Point]]:
  """Yields what is changed, and the point."""
  for name, values in SWEEPS.items():
    for value in values:
      yield name, dataclasses.replace(Point(), **{name: value})


def bytes_of(model: str) -> dict[str, int]:
  """Returns the parameters of a shape, the bytes of the learner's state and those of a token in the cache."""
  c = models.named(model)
  return {"parameters": c.num_params(), "state": _STATE * c.num_params(), "cache_per_token": bytes_of_token(c)}


def bytes_of_token(config: models.ModelConfig) -> int:
  """Returns the bytes of a token in the cache: keys and values in bfloat16."""
  return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


# By the plan.


def plan_of(point: Point, topology: str) -> Plan:
  """Returns the plan of the run that a point stands for.

  Raises:
    ValueError: if the run cannot be built.
  """
  target = parse_topology(topology)
  hosts = len({device.process_index for device in target.devices()})
  generation = target.chips // hosts // 2
  state = bytes_of(point.model)["state"]
  learners = target.chips - generation * hosts
  fsdp = next((n for n in (1, 2, 4, 8) if learners % n == 0 and 2 * state / n <= target.chip.hbm), learners)
  sizes: dict[str, Any] = {
    "model": point.model,
    "samples": point.group,
    "groups": _SAMPLES // point.group,
    "slots": point.slots // hosts,
    "max-prompt-tokens": point.half,
    "max-completion-tokens": point.half,
    "prompt-tokens": point.half,
    "completion-tokens": point.half,
    "rows": learners * max(1, _MICRO_BATCH // point.length),
    "row-tokens": point.length,
    "generation-devices": generation,
    "fsdp": fsdp,
    "eval-prompts": 0,
  }
  options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
  name, wanted, chosen = command.parse(["gsm8k", "--topology", topology, "--no-compile", *options])
  return make_plan(command.request_of(name, wanted, chosen), limit=600)


def planned(point: Point, topology: str) -> dict[str, Any]:
  """Returns the costs of a point by the plan; with an "error" where the run cannot be built."""
  try:
    plan = plan_of(point, topology)
  except ValueError as error:
    return {"error": str(error)}
  pace = find_pace(plan)
  if pace is None:
    return {"error": "; ".join(f"{p.name}: {p.problem}" for p in plan.programs if p.problem)}
  learners = math.prod(plan.meshes["learner"].values())
  options = plan.request.options
  trained = options["groups"] * options["samples"] * plan.request.completion_tokens
  return {
    "learner_us": round(1e6 * pace.learner * learners / trained, 3),
    "generation_us": round(1e6 * pace.generation * (plan.request.target.chips - learners) / trained, 3),
    "stays_GiB": {side: round(plan.stays(side) / 2**30, 2) for side in plan.resident},
    "fits": all(plan.fits(program) != "no" for program in plan.programs),
  }


# By measurement.


def measured(
  point: Point, tokens: int, chunk: int, config: models.ModelConfig, memory: float, learner_us: float | None
) -> dict[str, Any]:
  """Returns the costs of a point on the first device, as far as it has the memory.

  Args:
    point: the workload.
    tokens: the tokens of a learner's micro-batch.
    chunk: the decode steps of a chunk.
    config: the shape.
    memory: bytes of the device.
    learner_us: the learner's cost, where it is known.
  """
  found: dict[str, Any] = {}
  slots = fitting_slots(point, config, memory)

  def learner() -> float:
    return learner_us or _measure_learner(point, tokens, config)

  def generation() -> float:
    if slots < point.slots:
      found["decoded_slots"] = slots
    return _measure_generation(dataclasses.replace(point, slots=slots), chunk, config)

  for name, measure in (("learner_us", learner), ("generation_us", generation)):
    try:
      if name == "learner_us" and _STATE * config.num_params() > 0.9 * memory:
        raise MemoryError(f"its state needs {_STATE * config.num_params() / 2**30:.0f} of {memory / 2**30:.0f} GiB")
      found[name] = round(measure(), 3)
    except MemoryError as error:
      found[f"{name}_error"] = str(error)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      found[f"{name}_error"] = str(error).splitlines()[0][:200]
    jax.clear_caches()
  return found


def fitting_slots(point: Point, config: models.ModelConfig, memory: float) -> int:
  """Returns a point's slots, halved until weights and cache, in bfloat16, take three fifths of the memory at most."""
  weights = 2 * config.num_params()
  slot = point.length * bytes_of_token(config)
  slots = max(point.slots, point.group)
  while slots >= 2 * point.group and weights + slots * slot > 0.6 * memory:
    slots //= 2
  return slots


def _measure_learner(point: Point, tokens: int, config: models.ModelConfig) -> float:
  rows = max(1, tokens // point.length)
  sequences = max(8, rows)  # at least a group of that benchmark
  case = learner_speed.Case(sequences, point.half, point.half, rows, point.length, row_sequences=1)
  step = learner_speed.Step(models.Policy(config, remat="activations"), case)
  seconds = [step() for _ in range(6)][2:]
  return 1e6 * float(np.median(seconds)) / (sequences * point.half)


def _measure_generation(point: Point, chunk: int, config: models.ModelConfig) -> float:
  policy = models.Policy(config)
  params = decode_speed.random_weights(policy)
  case = decode_speed.Case(point.slots, point.half, point.length, end_to_end=True, group=point.group)
  row = decode_speed.measure(policy, params, case, chunk, chip_of(jax.devices()[0].device_kind).bandwidth)
  return 1e6 / row["end_to_end_tokens_per_s"]


# The results.


def plot(result: dict[str, Any], file: pathlib.Path) -> None:
  """Draws a panel for each of what is changed: cost of a token by where it arises, in a color for each device."""
  from matplotlib.figure import Figure

  sources, changed = (list(dict.fromkeys(row[key] for row in result["rows"])) for key in ("on", "changed"))
  figure = Figure(figsize=(1 + 3 * len(changed), 3.6), layout="constrained")
  titles = {
    "model": "parameters, billions",
    "length": "tokens of a sequence",
    "slots": "slots of all hosts",
    "group": "samples of a group",
  }
  for axis, name in zip(figure.subplots(1, len(changed), sharey=True, squeeze=False)[0], changed, strict=True):
    for i, source in enumerate(sources):
      rows = [row for row in result["rows"] if (row["on"], row["changed"]) == (source, name)]
      for cost, style in (("learner_us", "o-"), ("generation_us", "s--")):
        shown = [(_place(row, name), row[cost]) for row in rows if cost in row]
        if shown:
          label = f"{source}: {cost.removesuffix('_us')}"
          axis.plot(*zip(*shown, strict=True), style, color=f"C{i}", markersize=4, label=label)
          hollow = [(_place(row, name), row[cost]) for row in rows if not row.get("fits", True)]
          axis.plot(*np.array(hollow).reshape(-1, 2).T, style[0], color=f"C{i}", mfc="white", markersize=4, zorder=3)
    axis.set(xscale="log", yscale="log", xlabel=titles[name])
    ticks = {_place(row, name) for row in result["rows"] if row["changed"] == name}
    axis.set_xticks(sorted(ticks), [f"{x:.2g}" if x < 10 else f"{x:,.0f}" for x in sorted(ticks)], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.grid(linewidth=0.3, which="both")
  figure.axes[0].set_ylabel("chip-microseconds of a completion token")
  figure.axes[0].legend(fontsize=7)
  figure.savefig(file, dpi=110)


def _place(row: dict[str, Any], name: str) -> float:
  return models.named(row["model"]).num_params() / 1e9 if name == "model" else row[name]


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--topologies", nargs="*", default=[], help="slices to plan for, as v5p:2x2x2 or h200:8")
  parser.add_argument("--measure", action="store_true", help="measure on the first device")
  parser.add_argument("--only", nargs="+", choices=tuple(SWEEPS), default=tuple(SWEEPS), help="what is changed")
  parser.add_argument("--smoke", action="store_true", help="tiny models and lengths, to check that it measures")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("growth.json"))
  args = parser.parse_args(arguments)
  if not (args.topologies or args.measure):
    parser.error("nothing to do: give --topologies, --measure or both")
  rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
  result = {"shapes": {model: bytes_of(model) for model in SWEEPS["model"]}, "rows": rows}
  here = jax.devices()[0].device_kind + (", tiny" if args.smoke else "")  # whose rows nobody takes for measurements
  for on in [*args.topologies, *([here] if args.measure else [])]:
    for changed, point in points():
      what = {"on": on, "changed": changed, **dataclasses.asdict(point)}
      if changed in args.only and not any(what.items() <= row.items() for row in rows):
        others = [row for row in rows if row["on"] == on]
        rows.append(what | (planned(point, on) if on in args.topologies else _measured(point, args.smoke, others)))
        print(json.dumps(rows[-1]), flush=True)
        write_text(args.out, json.dumps(result, indent=1) + "\n")
  plot(result, args.out.with_suffix(".png"))


def _measured(point: Point, smoke: bool, others: list[dict[str, Any]]) -> dict[str, Any]:
  # The learner's cost depends on neither slots nor groups.
  same = (row.get("learner_us") for row in others if (row["model"], row["length"]) == (point.model, point.length))
  learner_us = next(filter(None, same), None)
  if smoke:
    small = dataclasses.replace(point, length=point.length // 16, slots=min(point.slots, 16), group=min(point.group, 8))
    return measured(small, 128, 8, decode_speed.SMOKE, 1e9, learner_us)
  memory = chip_of(jax.devices()[0].device_kind).hbm
  return measured(point, _TOKENS, 64, models.named(point.model), memory, learner_us)


if __name__ == "__main__":
  main()
