"""Compiles the programs of runs for TPU slices and checks what would make them slow or large there.

Command: python tests/studies/tpu_gate.py [part of a case's name]    (needs the package libtpu, and no TPU)
Hardware and time: two CPU cores, about 40 minutes; `tests/experiments/test_plan_tpu.py` runs the fast part.
Result: a line per case, "ok" or what is wrong; the exit status is 1 if anything is.

The runs are the quickstart, and GSM8K with the shape of Llama-3.2-1B, two layers of it. The slices are v5e and v6e:
eight chips on one host, on two, and twice eight as two slices. Checked: every program compiles; decoding gathers no
parameters; donated state and cache are updated in place; where bfloat16 was asked no product is in float32.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

from experiments.plan import __main__ as command  # noqa: E402
from experiments.plan._measure_all import measure_all  # noqa: E402

#: Two slices learn and generate on all chips: the compiler takes no part of several slices.
PLACES = {
  "one host": ("--topology", "{}:2x4"),
  "two hosts": ("--topology", "{}:2x4", "--hosts", "2"),
  "two slices": ("--topology", "{}:2x4", "--slices", "2", "--generation-devices", "0"),
}
RUNS = {
  "quickstart": ("quickstart",),
  "1B": (
    *("gsm8k", "--model", "llama-3.2-1b", "--fsdp", "4", "--groups", "8", "--samples", "8"),
    *("--slots", "32", "--rows", "16", "--row-tokens", "640", "--eval-prompts", "0"),
  ),
}
CASES = {
  f"{run}, {chip}, {place}": (*arguments, *(part.format(chip) for part in where))
  for run, arguments in RUNS.items()
  for chip in ("v5e", "v6e")
  for place, where in PLACES.items()
}


class Check(NamedTuple):
  """The programs of a case that the project's check compiles; none for all."""

  case: str
  programs: tuple[str, ...] = ()


#: Compiled by the project's check, in about a minute. Of steps, which take the longest, two.
FAST = (
  Check("quickstart, v5e, one host", ("stage", "gather", "prefill", "put", "decode")),
  Check("quickstart, v6e, two hosts", ("step",)),
  Check("quickstart, v5e, two slices", ("step",)),
  Check("1B, v5e, two hosts", ("decode", "put")),
)
#: Likewise with `tests/run.sh --slow`.
SLOW = (Check("quickstart, v5e, one host", ("step",)), Check("1B, v6e, one host", ("decode",)))


def find_faults(case: str, programs: tuple[str, ...] = ()) -> list[str]:
  """Returns a sentence for everything that is wrong with the programs of a case."""
  name, wanted, options = command.parse(list(CASES[case]))
  request = command.request_of(name, wanted, options)
  if request.model is not None:
    request = dataclasses.replace(request, layers=2)
  head, results = measure_all(request, 1800, programs)
  kept = head["resident"]["generation"]
  faults = []
  for program, result in results.items():
    if "error" in result:
      faults.append(f"{program} does not compile: {result['error'][:300]}")
      continue
    costs, in_place = result["costs"], {"step": result["resident"], "put": result["resident"], "decode": kept["cache"]}
    if costs["aliased"] < in_place.get(program, 0):
      faults.append(f"{program} copies: {in_place[program]:,} bytes are donated, {costs['aliased']:,} updated in place")
    if costs["float32_flops"] and request.options.get("dtype") == "bfloat16":
      faults.append(f"{program} has {costs['float32_flops'] / costs['flops']:.1%} of its products in float32")
    moved = costs["loop_gathers"] + costs["sent"].get("collective-permute host", 0)
    if program == "decode" and moved > 0.01 * kept["weights"]:
      faults.append(f"decode gathers {moved:,.0f} bytes, the weights are {kept['weights']:,}")
  return faults


def main() -> int:
  failed = False
  for case in CASES:
    if not all(part in case for part in sys.argv[1:]):
      continue
    faults = find_faults(case)
    failed |= bool(faults)
    print(f"{case}: {'; '.join(faults) or 'ok'}", flush=True)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
