"""Reads the collectives of a compiled program from its text."""

import math
import re
from typing import NamedTuple

import numpy as np

_SIZES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}


class Collective(NamedTuple):
  """An exchange between devices.

  Attributes:
    kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
    loops: the number of loops around it.
    nbytes: the bytes of its result on one device.
    groups: the devices that exchange with each other, by their positions in the mesh; empty for permutations.
  """

  kind: str
  loops: int
  nbytes: int
  groups: tuple[tuple[int, ...], ...]

  def joins(self, a, b):
    """Whether two devices are in one group."""
    return any(a in group and b in group for group in self.groups)


def read_collectives(text):
  """Returns every `Collective` of a compiled program, from its `as_text()`."""
  bodies, entry = _computations(text)
  loops = {}

  def visit(name, depth):
    if loops.get(name, -1) >= depth:
      return
    loops[name] = depth
    for line in bodies[name]:
      for role, called in re.findall(r"(\w+)=%([\w.\-]+)", line):
        if called in bodies:
          visit(called, depth + (role == "body"))
      for called in re.findall(r"%([\w.\-]+)", "".join(re.findall(r"branch_computations=\{[^}]*\}", line))):
        visit(called, depth)

  visit(entry, 0)
  kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
  found = []
  for name, depth in loops.items():
    for line in bodies[name]:
      match = re.match(rf"\s*(?:ROOT )?%[\w.\-]+ = (.*?) ({kinds})(?:-start)?\(", line)
      if match:
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        nbytes = sum(_SIZES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in arrays)
        found.append(Collective(match[2], depth, nbytes, _groups(line)))
  return found


def _computations(text):
  """Returns the lines of each computation by name, and the name of the one that is called first."""
  bodies, entry, name = {}, None, None
  for line in text.splitlines():
    if match := re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line):
      name = match[2]
      bodies[name] = []
      entry = name if match[1] else entry
    elif name is not None:
      bodies[name].append(line)
  return bodies, entry


def _groups(line):
  if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
  if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
    shape, of, order = (list(map(int, part.split(","))) if part else None for part in match.groups())
    ids = np.arange(math.prod(of)).reshape(of).transpose(order)
    return tuple(map(tuple, ids.reshape(shape).tolist()))
  if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
    axes = {name: int(size) for name, size in re.findall(r"(\w+)'?=(\d+)", match[1])}
    sizes = list(axes.values())
    joined = [list(axes).index(name) for name in re.findall(r"\w+", match[2])]
    ids = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), joined, range(-len(joined), 0))
    return tuple(map(tuple, ids.reshape(-1, math.prod(sizes[axis] for axis in joined)).tolist()))
  return ()
