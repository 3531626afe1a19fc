"""How often the loops of a compiled program turn."""

from __future__ import annotations

import math
import re

from experiments.plan import _hlo
from experiments.plan._hlo import Computation
from experiments.plan._hlo import Instruction
from experiments.plan._hlo import Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
  """Returns the turns of a `while` whose counter starts and ends at constants; `None` if they depend on data."""
  if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
    return int(match[1])
  condition = module.computations[loop.attribute("condition") or ""]
  test = _hlo.root(condition)
  if test.opcode != "compare" or test.attribute("direction") != "LT":
    return None
  start = computation.get(loop.operands[0])

  def value(name: str) -> int | None:
    x = condition[name]
    if x.opcode == "constant":
      return _constant(condition, name)
    if x.opcode == "get-tuple-element" and start is not None and start.opcode == "tuple":
      return _constant(computation, start.operands[int(x.attribute("index") or 0)])
    return None

  first, limit = map(value, test.operands)
  if first is None or limit is None:
    return None
  counter = int(condition[test.operands[0]].attribute("index") or 0)
  return max(0, math.ceil((limit - first) / _increment(module.computations[loop.attribute("body") or ""], counter)))


def _increment(body: Computation, counter: int) -> int:
  """Returns what a turn of a loop adds to its counter: more than 1 where the compiler has joined several turns."""
  result = _hlo.root(body)
  x = _origin(body, result.operands[counter]) if result.opcode == "tuple" else None
  if x is None or x.opcode != "add":
    return 1
  return next((value for name in x.operands if (value := _constant(body, name))), 1)


def _constant(computation: Computation, name: str) -> int | None:
  x = _origin(computation, name)
  match = re.match(r"(-?\d+)\)", x.text) if x is not None and x.opcode == "constant" else None
  return int(match[1]) if match else None


def _origin(computation: Computation, name: str) -> Instruction | None:
  """Returns the instruction whose value this one passes on, mostly itself; `None` if the computation lacks it."""
  x = computation.get(name)
  while x is not None and x.opcode in ("copy", "bitcast", "convert") and x.operands:
    x = computation.get(x.operands[0])
  return x
