"""The plan's times against measured ones: learner and decode steps on the accelerator at hand.

    python -m experiments.benchmarks.predict            # one H100 or H200, about 5 minutes
    python -m experiments.benchmarks.predict --smoke    # any machine, seconds; checks that it runs
    cd experiments/benchmarks/results && python -m experiments.benchmarks.predict \\
      --recorded learner_speed_h200.json decode_speed_draw_h200.json    # any machine, a minute; measures nothing

Every step is predicted as `python -m experiments.plan --topology h100:2` does, from the program as it is traced for
GPUs and the chip's data sheet, and then measured: learner steps with AdamW and the effective-sample-size scaling, and
decode steps through the engine, its host work included. Qwen3-0.6B's shape, random weights, bfloat16. With `--recorded`
the measured times are those in files of `learner_speed`, of any of its shapes, and `decode_speed`. With `--memory` as
well, learner steps are compiled for that GPU, which need not be there, but JAX's CUDA plugin: a minute each.

Prints a row per step, predicted and measured milliseconds and the error of the prediction, with `--memory` the GiB that
a learner step needs beside its arguments and results, as compiled here and as recorded; and writes predict.json. The
aim is an error of at most 20 %. On a device that is not in the plan's table the predictions are those for an H100.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from async_rl import models
from async_rl import rollout
from async_rl import sampling
from experiments.benchmarks import decode_speed
from experiments.benchmarks import learner_speed
from experiments.plan._chips import Chip
from experiments.plan._chips import Topology
from experiments.plan._chips import chip_of
from experiments.plan._gpus import compiler_version
from experiments.plan._gpus import cudnn_as_there
from experiments.plan._jaxpr_costs import count_traced
from experiments.plan._request import head_chunks
from experiments.plan._summary import seconds_of

_SHAPE = "qwen3-0.6b"
_LEARNED = learner_speed.CASES[_SHAPE]
#: What the backward pass recomputes, and the case.
LEARNER_CASES = (
  ("activations", _LEARNED[0]),
  ("projections", _LEARNED[0]),
  ("activations", _LEARNED[2]),
  ("full", _LEARNED[2]),
  ("activations", _LEARNED[3]),
)
DECODE_CASES = (
  decode_speed.Case(64, 832),
  decode_speed.Case(64, 320),
  decode_speed.Case(256, 832),
  decode_speed.Case(256, 320),
  decode_speed.Case(512, 320, capacity=576),
)
SMOKE_LEARNER_CASES = (("activations", learner_speed.SMOKE_CASES[0]),)
SMOKE_DECODE_CASES = decode_speed.SMOKE_CASES[1:2]


def predict(
  trace: Callable[[jax.sharding.Mesh], jax.stages.Traced], chip: Chip, turns: Sequence[float], filled: float
) -> float:
  """Returns the seconds of a program of one GPU, which need not be there; see `count_traced`."""
  with cudnn_as_there():
    traced = trace(_one(chip))
  operations, kernels = count_traced(traced.jaxpr, turns, filled=filled)
  return seconds_of(operations, chip) + seconds_of(kernels, chip, kernels=True)


def compile_learner(policy: models.Policy, case: learner_speed.Case, chip: Chip) -> float:
  """Returns the GiB that a learner step of `learner_speed` needs beside its arguments and results."""
  with cudnn_as_there():
    lowered = learner_speed.make_learner(policy, case, _one(chip, compiled=True)).trace_step().lower()
  return lowered.compile().memory_analysis().temp_size_in_bytes / 2**30


def _one(chip: Chip, compiled: bool = False) -> jax.sharding.Mesh:
  return rollout.make_mesh(Topology(chip, (1,)).devices(compiled))


def predict_learner(policy: models.Policy, case: learner_speed.Case, chip: Chip) -> float:
  """Returns the seconds of a learner step of `learner_speed`."""
  length = case.prompt + case.completion
  micro_batches = math.ceil(case.sequences / (case.row_tokens // length) / case.rows)
  turns = (micro_batches, head_chunks(case.shape(), case.completion / length))
  return predict(lambda mesh: learner_speed.make_learner(policy, case, mesh).trace_step(), chip, turns, length)


def predict_decode(
  policy: models.Policy, case: decode_speed.Case, chunk: int, chip: Chip, computed: tuple[int, int], filled: float
) -> float:
  """Returns the seconds of a decode step of `decode_speed` on so many slots and positions, of which some are filled."""

  def trace(mesh: jax.sharding.Mesh) -> jax.stages.Traced:
    return sampling.Programs(policy, decode_speed.sampler_config(case, chunk), (), mesh).trace_decode(*computed)

  return predict(trace, chip, [chunk], filled) / chunk


def compare_learner(config: models.ModelConfig, remat: str, case: learner_speed.Case, chip: Chip) -> dict[str, Any]:
  """Returns the row of a learner step."""
  policy = models.Policy(config, remat=remat)
  predicted = predict_learner(policy, case, chip)
  step = learner_speed.Step(policy, case)
  seconds = [step() for _ in range(7)]
  return _row(_learner_name(case, step.micro_batches, remat), predicted, float(np.median(seconds[2:])))


def compare_decode(config: models.ModelConfig, case: decode_speed.Case, chunk: int, chip: Chip) -> dict[str, Any]:
  """Returns the row of a decode step."""
  policy = models.Policy(config)
  measured = decode_speed.measure(policy, decode_speed.random_weights(policy), case, chunk, chip.bandwidth)
  return _compare_recorded_decode(config, measured | {"attention": "auto"}, case, chunk, chip)


def compare_recorded(result: dict[str, Any], memory: bool = False) -> Iterator[dict[str, Any]]:
  """Yields the rows of a file of `learner_speed` or `decode_speed`, as far as their programs are today's.

  Args:
    result: what the file holds.
    memory: whether to compile learner steps.
  """
  chip = chip_of(result["device"])
  for row in result["rows"]:
    if "mfu" in row and row.get("version") != "before":
      shape = row.get("shape", _SHAPE)  # the first files name none
      learned = next(case for case in learner_speed.CASES[shape] if _describes(row, case))
      policy = models.Policy(models.named(shape), row.get("dtype", "bfloat16"), remat=row["remat"])
      name = _learner_name(learned, row["micro_batches"], row["remat"])
      compared = _row(name, predict_learner(policy, learned, chip), row["ms"][0] / 1e3)
      if memory:
        compared["compiled_GiB"] = round(compile_learner(policy, learned, chip), 1)
        compared["recorded_GiB"] = row["temporaries_GiB"]
      yield compared
    elif "computed" in row and not row.get("shared_prompts"):
      case = next(x for x in decode_speed.CASES if (x.slots, x.live or x.slots) == (row["slots"], row["live"]))
      yield _compare_recorded_decode(decode_speed.QWEN3_06B, row, case, 64, chip)


def _describes(row: dict[str, Any], case: learner_speed.Case) -> bool:
  sizes = (row["sequences"], row["prompt"], row["completion"], row["rows"])
  return sizes == (case.sequences, case.prompt, case.completion, f"{case.rows} x {case.row_tokens}")


def _compare_recorded_decode(
  config: models.ModelConfig, row: dict[str, Any], case: decode_speed.Case, chunk: int, chip: Chip
) -> dict[str, Any]:
  policy, (slots, positions) = models.Policy(config, attention=row["attention"]), row["computed"]
  filled = row["filled"] * row["live"] / slots  # of a free slot nothing
  predicted = predict_decode(policy, case, chunk, chip, (slots, positions), filled)
  name = f"decode {row['live']} of {slots} slots, {row['filled']} of {positions} positions, {row['attention']}"
  return _row(name, predicted, row["ms_per_step"] / 1e3)


def _learner_name(case: learner_speed.Case, micro_batches: int, remat: str) -> str:
  return f"learner {case.rows}x{case.row_tokens} x {micro_batches} remat {remat}"


def _row(name: str, predicted: float, measured: float) -> dict[str, Any]:
  return {
    "step": name,
    "predicted_ms": round(1e3 * predicted, 3),
    "measured_ms": round(1e3 * measured, 3),
    "error": round(predicted / measured - 1, 3),
  }


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
  parser.add_argument("--recorded", nargs="+", type=pathlib.Path, help="files of learner_speed and decode_speed")
  parser.add_argument("--memory", action="store_true", help="with --recorded, compile learner steps for what they need")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("predict.json"))
  args = parser.parse_args(arguments)
  if args.memory and not (args.recorded and compiler_version()):
    parser.error("--memory goes with --recorded, and needs JAX's CUDA plugin: install jax[cuda13]")
  found = [json.loads(path.read_text()) for path in args.recorded or ()]
  device = found[0]["device"] if found else jax.devices()[0].device_kind
  chip = chip_of(device)
  print(f"{device}, jax {jax.__version__}, predicted for {chip.name}")
  print(f"{'step':54}{'predicted ms':>14}{'measured ms':>14}{'error':>9}")
  rows = []
  recorded = itertools.chain(*(compare_recorded(result, args.memory) for result in found))
  for row in recorded if found else _measured(args.smoke, chip):
    rows.append(row)
    _print(row)
  result = {"device": device, "jax": jax.__version__, "chip": chip.name, "rows": rows}
  args.out.write_text(json.dumps(result, indent=1) + "\n")


def _measured(smoke: bool, chip: Chip) -> Iterator[dict[str, Any]]:
  config = decode_speed.SMOKE if smoke else decode_speed.QWEN3_06B
  for remat, learner_case in SMOKE_LEARNER_CASES if smoke else LEARNER_CASES:
    yield compare_learner(config, remat, learner_case, chip)
  for case in SMOKE_DECODE_CASES if smoke else DECODE_CASES:
    yield compare_decode(config, case, 8 if smoke else 64, chip)


def _print(row: dict[str, Any]) -> None:
  text = f"{row['step']:54}{row['predicted_ms']:14.3f}{row['measured_ms']:14.3f}{row['error']:9.1%}"
  if "compiled_GiB" in row:
    text += f"   {row['compiled_GiB']:.1f} GiB compiled, {row['recorded_GiB']:.1f} recorded"
  print(text, flush=True)


if __name__ == "__main__":
  main()
