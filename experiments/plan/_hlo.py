"""Reads the text of compiled programs: computations, their instructions and the shapes of these."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_BITS = {
  "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "s16": 16, "u16": 16, "bf16": 16,
  "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip


class Shape(NamedTuple):
  """One array.

  Attributes:
    dtype: the name of its type, such as "bf16".
    dims: its dimensions.
    layout: how it lies in memory, such as "{1,0:T(8,128)(2,1)S(1)}".
  """

  dtype: str
  dims: tuple[int, ...]
  layout: str

  @property
  def near(self) -> bool:
    """Returns whether it lies in a memory other than the chip's large one, such as a TPU's vector memory."""
    return "S(" in self.layout

  @property
  def nbytes(self) -> int:
    """Returns its bytes, with what fills up the tiles of a TPU; 0 for tokens."""
    return math.prod(self._padded()) * _BITS.get(self.dtype, 0) // 8

  def _padded(self) -> list[int]:
    """Returns the dimensions, those that lie side by side in memory filled up to whole tiles."""
    dims = list(self.dims)
    match = re.match(r"\{([\d,]*):T\(([\d,]+)\)", self.layout)
    if match is not None:
      tile = map(int, reversed(match[2].split(",")))
      for axis, size in zip(map(int, filter(None, match[1].split(","))), tile, strict=False):
        dims[axis] = -(-dims[axis] // size) * size
    return dims

  @property
  def hbm_bytes(self) -> int:
    """Returns its bytes in the chip's large memory."""
    return 0 if self.near else self.nbytes


class Instruction(NamedTuple):
  """One instruction.

  Attributes:
    name: its name, unique in its computation.
    opcode: its operation, such as "fusion".
    shapes: the arrays of its result; those of tuples side by side, nested ones too.
    operands: the names of its operands.
    text: what the parentheses after the opcode hold, and all attributes.
    is_root: whether it is the result of its computation.
  """

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  text: str
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """Returns the value of a simple attribute: a name without its %, a number or a word."""
    match = re.search(rf"[ ,]{name}=%?([\w.\-]+)", self.text)
    return match[1] if match else None


Computation = dict[str, Instruction]


class Module(NamedTuple):
  """A compiled program.

  Attributes:
    computations: the instructions of each computation in their order, by name.
    entry: the name of the computation that is called first.
  """

  computations: dict[str, Computation]
  entry: str


def parse(text: str) -> Module:
  """Returns the program of a text, from `as_text()`.

  Raises:
    ValueError: if the text has no entry.
  """
  computations: dict[str, Computation] = {}
  current: Computation | None = None
  entry = None
  for line in text.splitlines():
    if match := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
      current = computations.setdefault(match[2], {})
      entry = match[2] if match[1] else entry
    elif current is not None and (instruction := _instruction(line)):
      current[instruction.name] = instruction
  if entry is None:
    raise ValueError("The text is no compiled program: it has no ENTRY.")
  return Module(computations, entry)


def root(computation: Computation) -> Instruction:
  """Returns the result of a computation."""
  return next(instruction for instruction in computation.values() if instruction.is_root)


def parameters(computation: Computation) -> list[Instruction]:
  """Returns the parameters of a computation in their order."""
  found = [x for x in computation.values() if x.opcode == "parameter"]
  return sorted(found, key=lambda x: int(x.text.partition(")")[0]))


def called(instruction: Instruction) -> list[str]:
  """Returns the computations that an instruction names, whatever for."""
  names = re.findall(r"(?:calls|to_apply|body|condition|called_computations?)=\{?%?([\w.\-]+)", instruction.text)
  branches = re.findall(
    r"(?:branch_computations=\{|true_computation=|false_computation=)([^}]*?)[},]", instruction.text
  )
  return names + [
    name
    for group in re.findall(r"branch_computations=\{([^}]*)\}", instruction.text) or branches
    for name in re.findall(r"[\w.\-]+", group)
  ]


_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


def _instruction(line: str) -> Instruction | None:
  match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
  if match is None:
    return None
  start = match.end()
  end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
  operation = re.match(r"\s*([\w\-]+)\(", line[end:])
  if operation is None:
    return None
  inside = end + operation.end()
  close = _closing(line, inside - 1)
  shapes = tuple(
    Shape(dtype, tuple(map(int, filter(None, dims.split(",")))), layout)
    for dtype, dims, layout in _ARRAY.findall(line[start:end])
  )
  operands = tuple(re.findall(r"%([\w.\-]+)", line[inside:close]))
  return Instruction(match[2], operation[1], shapes, operands, line[inside:], bool(match[1]))


def _closing(line: str, start: int) -> int:
  """Returns the index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(line)):
    if line[i] == "(":
      depth += 1
    elif line[i] == ")":
      depth -= 1
      if depth == 0:
        return i
  return len(line)
