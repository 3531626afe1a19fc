"""Plans a run: `python -m experiments.plan CONFIG --topology v5e:4x4 [--slices 2] [options of the config]`.

Compiles the programs of the run for accelerators that are not there, and prints what fits, what takes how long, and
which split of the devices balances learning and generation. TPUs need the package libtpu (async_rl[tpu]), also with
--no-compile; the compiler of GPUs is in jax[cuda13].
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import tyro

from async_rl._validation import check_number
from async_rl.runtime import flatten
from experiments import configs
from experiments.plan._chips import CHIPS
from experiments.plan._chips import parse_topology
from experiments.plan._plan import make_plan
from experiments.plan._plan_report import to_json
from experiments.plan._plan_report import to_text
from experiments.plan._request import Request
from experiments.plan._shapes import with_model


@dataclasses.dataclass(frozen=True)
class PlanOptions:
  """What to plan for."""

  #: The accelerators of a slice by kind and shape, such as v5e:4x4, v5p:2x2x2 or h100:2.
  topology: str
  #: Slices of that shape, joined by the data center's network.
  slices: int = 1
  #: Hosts of a slice; None: one for up to eight v5e or v6e chips, otherwise one for four chips.
  hosts: int | None = None
  #: Public model whose shape replaces the config's pretrained weights, such as qwen3-0.6b; none need be fetched then.
  model: str | None = None
  #: Compile with these two numbers of layers, 2 or more, and extrapolate to all: saves most of the time of deep models.
  depths: tuple[int, int] | None = None
  #: Compile, for GPUs where JAX's CUDA plugin is installed; without, traced programs are counted, whose TPUs are still
  #: libtpu's: in seconds, but without temporaries and exchanges.
  compile: bool = True
  #: Mean length of prompts to expect; None: half of the longest.
  prompt_tokens: float | None = None
  #: Mean length of completions to expect; None: half of the longest.
  completion_tokens: float | None = None
  #: Seconds that the compilation of a program may take.
  limit: float = 900.0
  #: Print everything as JSON.
  json: bool = False

  def __post_init__(self):
    parse_topology(self.topology, self.slices, self.hosts)
    check_number("limit", self.limit, above=0, remedy="leave it out for 900 seconds")
    if self.depths is not None and not 2 <= self.depths[0] < self.depths[1]:  # a loop of one turn is none
      raise ValueError(f"*depths* must be two ascending numbers of layers from 2 on, got depths={self.depths}.")


def _usage() -> str:
  chips = ", ".join(CHIPS)
  lines = ["usage: python -m experiments.plan CONFIG --topology v5e:4x4 [--option value ...]", "", "configs:"]
  lines += [f"  {name:18}{configs.load(name).description}" for name in configs.NAMES]
  lines += ["", f"accelerators: {chips}", "CONFIG --help lists the options of a plan, and those of the config."]
  return "\n".join(lines)


def parse(arguments: list[str]) -> tuple[str, PlanOptions, Any]:
  """Returns the config's name, the options of the plan and those of the run of a command line.

  Raises:
    ValueError: if there is no such config, or an option of the plan means nothing.
    SystemExit: after help was printed, or an option was refused.
  """
  if not arguments or arguments[0] in ("-h", "--help"):
    print(_usage(), file=sys.stdout if arguments else sys.stderr)
    sys.exit(0 if arguments else 2)
  name, *rest = arguments
  config = configs.load(name)
  both = dataclasses.make_dataclass(
    "Arguments",
    [("plan", PlanOptions), ("run", type(config.defaults), dataclasses.field(default=config.defaults))],
  )
  flat = (tyro.conf.OmitArgPrefixes,)
  prog = f"python -m experiments.plan {name}"
  parsed: Any = tyro.cli(both, args=rest, prog=prog, description=config.description, config=flat)
  return config.name, parsed.plan, parsed.run


def request_of(name: str, wanted: PlanOptions, options: Any) -> Request:
  """Returns the request of a command line.

  Raises:
    ValueError: if options contradict each other, a mean length is none of the run, or there is no such model.
  """
  if wanted.model is not None:
    with_model(options, wanted.model)
  limits = options.rollout
  lengths = {}
  for option in ("prompt_tokens", "completion_tokens"):
    mean, longest = getattr(wanted, option), getattr(limits, f"max_{option}")
    if mean is not None:
      remedy = f"leave it out for half of the longest, or raise max_{option}"
      check_number(option, mean, at_least=1, at_most=longest, remedy=remedy)
    lengths[option] = longest / 2 if mean is None else mean
  return Request(
    config=name,
    options=flatten(options),
    topology=wanted.topology,
    slices=wanted.slices,
    hosts=wanted.hosts,
    model=wanted.model,
    **lengths,
    compiled=wanted.compile,
  )


def main(arguments: list[str] | None = None) -> int:
  try:
    name, wanted, options = parse(sys.argv[1:] if arguments is None else arguments)
    plan = make_plan(request_of(name, wanted, options), wanted.limit, wanted.depths)
  except (ValueError, ImportError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(to_json(plan) if wanted.json else to_text(plan))
  return 0 if all(plan.fits(program) != "no" and program.problem is None for program in plan.programs) else 1


if __name__ == "__main__":
  sys.exit(main())
