"""Counts the operations, the memory traffic and the exchanges of a compiled program, right through its loops.

XLA's own cost analysis counts the body of a loop once. Here every instruction counts as often as the loops around it
turn. Of a loop whose turns depend on data the caller says how often it turns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.plan import _hlo
from experiments.plan._hlo import Computation
from experiments.plan._hlo import Instruction
from experiments.plan._hlo import Module
from experiments.plan._hlo_loops import trip_count

#: Instructions that neither compute nor move anything.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
  "opt-barrier", "while", "conditional", "call", "domain", "add-dependency",
}  # fmt: skip
#: Custom calls that are no work of their own.
_FREE_CALLS = {"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "PartialReduce"}
#: The target of kernels written in Pallas, whose text does not tell what they compute.
KERNEL = "tpu_custom_call"
_SLICES = ("dynamic-slice", "slice", "gather")
#: Instructions that change their first operand in place, and which operand they write into it.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


class Operation(NamedTuple):
  """One instruction of the program, as often as it runs.

  Attributes:
    flops: its products and sums of matrices, on one device.
    nbytes: the bytes that it reads from and writes to the device's memory.
    times: the times that it runs.
    dtype: the type of the factors of its largest product, "" if it has none.
    hidden: whether the device goes on meanwhile, as while it copies ahead what is needed later.
  """

  flops: float
  nbytes: float
  times: float
  dtype: str = ""
  hidden: bool = False


class Exchange(NamedTuple):
  """One kind of exchange between devices, as often as it runs.

  Attributes:
    kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
    nbytes: the bytes of its result on one device.
    times: the times that it runs.
    loops: the number of loops around it.
    groups: the devices that exchange with each other, by their positions in the mesh, of a program of several slices in
      the part of the mesh that is of one; pairs for permutations. Between slices: the slices.
    hidden: whether the device goes on meanwhile.
    between_slices: whether it goes through the hosts and the network between TPU slices.
    links: the dimensions of a slice along which it goes at once.
  """

  kind: str
  nbytes: int
  times: float
  loops: int
  groups: tuple[tuple[int, ...], ...]
  hidden: bool
  between_slices: bool = False
  links: float = 1.0

  @property
  def sent(self) -> float:
    """Returns the bytes that a device sends along a ring, each time."""
    n = max((len(group) for group in self.groups), default=1)
    if self.kind == "collective-permute":
      return self.nbytes
    if self.kind == "reduce-scatter":
      return self.nbytes * (n - 1)
    return self.nbytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)

  def joins(self, a: int, b: int) -> bool:
    """Returns whether two devices of a slice are in one group."""
    return not self.between_slices and any(a in group and b in group for group in self.groups)


class Costs(NamedTuple):
  """What a program does on one device.

  Attributes:
    operations: the instructions outside of kernels.
    exchanges: what devices send each other.
  """

  operations: list[Operation]
  exchanges: list[Exchange]


def count_compiled(text: str, turns: Sequence[float] = (1,)) -> Costs:
  """Counts a compiled program.

  Args:
    text: the program, from `as_text()`.
    turns: the turns of loops whose number depends on data, the outermost first; the last holds further in, too.
  """
  module = _hlo.parse(text)
  operations: list[Operation] = []
  exchanges: list[Exchange] = []
  for name, times, loops in _visits(module, module.entry, 1.0, 0, tuple(turns)):
    computation = module.computations[name]
    for x in computation.values():
      if not _continues(computation, x):
        exchanges += _exchanges(module, x, times, loops)
      if x.opcode in _FREE or x.opcode.endswith("-done") or _is_free_call(x) or _is_of_numbers(computation, x):
        continue
      flops, dtype = _flops(module, computation, x)
      nbytes = _bytes(module, computation, x)
      if flops or nbytes:
        operations.append(Operation(flops, nbytes, times, dtype, hidden=x.opcode.endswith("-start") and not flops))
  return Costs(operations, exchanges)


def _visits(
  module: Module, name: str, times: float, loops: int, turns: tuple[float, ...]
) -> Iterator[tuple[str, float, int]]:
  """Yields every computation whose instructions run on their own, how often it runs, and the loops around it."""
  yield name, times, loops
  for x in module.computations[name].values():
    if x.opcode == "while":
      body, condition = x.attribute("body"), x.attribute("condition")
      assert body is not None
      assert condition is not None
      known = trip_count(module, module.computations[name], x)
      rounds, within = (turns[0], turns[1:] or turns) if known is None else (known, turns)
      yield from _visits(module, body, times * rounds, loops + 1, within)
    elif x.opcode == "conditional":
      branches = _hlo.called(x)
      for branch in branches:
        yield from _visits(module, branch, times / len(branches), loops, turns)
    elif x.opcode in ("call", "async-start"):
      for callee in _hlo.called(x):
        yield from _visits(module, callee, times, loops, turns)


def _is_free_call(x: Instruction) -> bool:
  if x.opcode != "custom-call":
    return False
  target = re.search(r'custom_call_target="([^"]*)"', x.text)
  return target is not None and (target[1] in _FREE_CALLS or target[1] == KERNEL)


def _is_of_numbers(computation: Computation, x: Instruction) -> bool:
  """Returns whether it computes numbers from numbers, such as a loop's counter: a core of its own does so meanwhile."""
  operands = (computation[name].shapes for name in x.operands if name in computation)
  return not any(shape.dims for shapes in (x.shapes, *operands) for shape in shapes)


# Products.


def _flops(module: Module, computation: Computation, x: Instruction) -> tuple[float, str]:
  """Returns the products and sums of an instruction, and the type of the factors of the largest product."""
  if x.opcode == "convolution":
    return _convolution(computation, x)
  if x.opcode == "dot":
    return _dot(computation, x)
  if x.opcode not in ("fusion", "async-start"):
    return 0.0, ""
  total, largest, dtype = 0.0, 0.0, ""
  for callee in _hlo.called(x):
    inside = module.computations[callee]
    for y in inside.values():
      flops, kind = _flops(module, inside, y)
      total += flops
      if flops > largest:
        largest, dtype = flops, kind
  return total, dtype


def _dot(computation: Computation, x: Instruction) -> tuple[float, str]:
  factor = computation[x.operands[0]].shapes[0]
  dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.text)
  contracted = math.prod(factor.dims[int(i)] for i in dims[1].split(",") if i) if dims else 1
  return 2.0 * math.prod(x.shapes[0].dims) * contracted, _product_type(computation, x)


def _convolution(computation: Computation, x: Instruction) -> tuple[float, str]:
  """Counts the products that fall on data: TPUs run products of batches as convolutions with padding or dilation."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.text)
  assert labels is not None
  data, kernel, out = (dict(zip(names, shape.dims, strict=True)) for names, shape in (
    (labels[1], computation[x.operands[0]].shapes[0]),
    (labels[2], computation[x.operands[1]].shapes[0]),
    (labels[3], x.shapes[0]),
  ))  # fmt: skip
  window = _window(x.text)
  spatial = sorted(name for name in out if name.isdigit())
  positions = math.prod(_positions(data[d], kernel[d], out[d], window, int(d)) for d in spatial)
  groups = int(x.attribute("batch_group_count") or 1)
  return 2.0 * out["b"] / groups * out["f"] * kernel["i"] * positions, _product_type(computation, x)


def _window(text: str) -> dict[str, list[str]]:
  match = re.search(r"window=\{([^}]*)\}", text)
  return {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-]+)", match[1])} if match else {}


def _positions(size: int, taps: int, outputs: int, window: dict[str, list[str]], d: int) -> int:
  """Returns the number of pairs of an output and a tap that fall on data, in one dimension."""

  def entry(key: str, default: str) -> str:
    return window[key][d] if key in window else default

  low = int(entry("pad", "0_0").split("_")[0])
  stride, spread = int(entry("stride", "1")), int(entry("lhs_dilate", "1"))
  at = np.arange(outputs)[:, None] * stride + np.arange(taps)[None] * int(entry("rhs_dilate", "1")) - low
  return int(np.sum((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)))


def _product_type(computation: Computation, x: Instruction) -> str:
  types = {computation[name].shapes[0].dtype for name in x.operands[:2]}
  return "f32" if "f32" in types else min(types)


# Memory.


def _bytes(module: Module, computation: Computation, x: Instruction) -> float:
  """Returns the bytes that an instruction reads from and writes to the device's memory."""
  operands = [computation[name].shapes for name in x.operands if name in computation]
  if x.opcode == "fusion":
    return _fusion_bytes(module, x, operands)
  written = sum(shape.hbm_bytes for shape in x.shapes)
  if x.opcode.endswith("-start"):  # the result holds destination and source, either of which may be near
    arrays = [shape for shape in x.shapes if shape.dims]
    moved = min((shape.nbytes for shape in arrays), default=0)
    return moved * sum(not shape.near for shape in arrays[:2])
  if x.opcode in _SLICES:
    return written + (0 if operands[0][0].near else x.shapes[0].nbytes)
  if x.opcode in _UPDATES:
    update = operands[_UPDATES[x.opcode]][0]
    return update.hbm_bytes + (0 if x.shapes[0].near else update.nbytes)
  return written + sum(shape.hbm_bytes for shapes in operands for shape in shapes)


def _fusion_bytes(module: Module, x: Instruction, operands: list[tuple[_hlo.Shape, ...]]) -> float:
  inside = module.computations[x.attribute("calls") or ""]
  read = 0.0
  for parameter, shapes in zip(_hlo.parameters(inside), operands, strict=False):
    if not all(shape.near for shape in shapes):
      read += _read(module, inside, parameter.name)
  result = _hlo.root(inside)
  parts = [inside[name] for name in result.operands] if result.opcode == "tuple" else [result]
  if len(parts) != len(x.shapes):
    return read + sum(shape.hbm_bytes for shape in x.shapes)
  return read + sum(
    _written(module, inside, part) for part, shape in zip(parts, x.shapes, strict=True) if not shape.near
  )


def _read(module: Module, computation: Computation, name: str) -> float:
  """Returns the bytes that a fused computation reads of one of its parameters: slices of it, or all."""
  whole = sum(shape.nbytes for shape in computation[name].shapes)
  total = 0.0
  for user in computation.values():
    if name not in user.operands:
      continue
    if user.opcode in _SLICES and user.operands[0] == name:
      total += user.shapes[0].nbytes
    elif user.opcode in _UPDATES and user.operands[0] == name:
      continue  # in place
    elif user.opcode in ("bitcast", "reshape") and not user.is_root:
      total += _read(module, computation, user.name)
    elif user.opcode == "fusion":
      inside = module.computations[user.attribute("calls") or ""]
      for parameter, operand in zip(_hlo.parameters(inside), user.operands, strict=False):
        total += _read(module, inside, parameter.name) if operand == name else 0
    else:
      return whole
  return min(total, whole)


def _written(module: Module, computation: Computation, x: Instruction) -> float:
  """Returns the bytes that a fused computation writes of one of its results: an update in place, or all."""
  if x.opcode == "bitcast":
    return _written(module, computation, computation[x.operands[0]])
  if x.opcode in _UPDATES:
    return computation[x.operands[_UPDATES[x.opcode]]].shapes[0].nbytes
  if x.opcode == "fusion":
    inside = module.computations[x.attribute("calls") or ""]
    return _written(module, inside, _hlo.root(inside)) if len(x.shapes) == 1 else sum(s.nbytes for s in x.shapes)
  return sum(shape.nbytes for shape in x.shapes)


# Exchanges.

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
#: The ids of the chips of TPU slice n, counted from 1, begin with n times this.
_SLICE_IDS = 100_000


def _continues(computation: Computation, x: Instruction) -> bool:
  """Returns whether a fusion carries on an exchange that another one began: it takes the semaphores of that one.

  A TPU's compiler spreads one exchange over the products that hide it, each of which has all of it in its text.
  """
  operands = (computation[name].shapes for name in x.operands if name in computation)
  return x.opcode == "fusion" and any("S(2)" in shape.layout for shapes in operands for shape in shapes)


def _exchanges(module: Module, x: Instruction, times: float, loops: int) -> Iterator[Exchange]:
  """Yields the exchanges of an instruction, those inside of fusions too."""
  if x.opcode == "recv" and (between := _between_slices(x)):
    yield between._replace(times=times, loops=loops)
  kind = x.opcode.removesuffix("-start")
  if kind in _KINDS:
    shapes = x.shapes[: max(1, len(x.shapes) // 2)] if x.opcode.endswith("-start") and len(x.shapes) > 1 else x.shapes
    if kind == "all-gather" and x.opcode.endswith("-start"):
      shapes = x.shapes[len(x.shapes) // 2 :]  # operands come first
    elif kind == "collective-permute":
      shapes = x.shapes[:1]
    nbytes = sum(shape.nbytes for shape in shapes)
    yield Exchange(kind, nbytes, times, loops, _groups(x.text), x.opcode != kind, links=_links(x))
  elif x.opcode == "fusion":
    for callee in _hlo.called(x):
      inside = module.computations[callee]
      hidden = any("AsyncCollectiveStart" in y.text for y in inside.values())
      result = _hlo.root(inside)
      for y in inside.values():
        for exchange in _exchanges(module, y, times, loops):
          if exchange.kind == "all-reduce" and result.opcode == "dynamic-slice" and result.operands[0] == y.name:
            exchange = exchange._replace(kind="reduce-scatter", nbytes=result.shapes[0].nbytes)
          yield exchange._replace(hidden=exchange.hidden or hidden)


def _links(x: Instruction) -> float:
  """Returns the dimensions of a slice along which a sum goes at once: one for each of its colors.

  Colors that go one way only share a dimension with those that go the other.
  """
  match = re.search(r'"strategy":"(\w+)".*?\{colors:(\d+)', x.text)
  return 1.0 if match is None else max(1.0, int(match[2]) / (2 if "UniDirection" in match[1] else 1))


def _between_slices(x: Instruction) -> Exchange | None:
  """Returns the exchange between TPU slices whose end `x` is.

  The compiler leaves no collective there: a chip sends to its host, and receives what the hosts made of it.
  """
  match = re.search(r'_xla_megascale_target="?\{(.*?)[}"].*_xla_megascale_transfer_type="(\w+)"', x.text)
  if match is None:
    return None
  listed = [int(number) for number in re.findall(r"\d+", match[1])]  # slices, or chips, which count from 100000 in each
  slices = {number // _SLICE_IDS if number >= _SLICE_IDS else number for number in listed}
  kind = match[2].lower().replace("_", "-")
  kind = kind if kind in _KINDS else "collective-permute"
  return Exchange(kind, x.shapes[0].nbytes, 1, 0, (tuple(sorted(slices)),), hidden=False, between_slices=True)


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
  if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
  if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    shape, of, order = (list(map(int, part.split(","))) if part else None for part in match.groups())
    assert shape is not None
    assert of is not None
    ids = np.arange(math.prod(of)).reshape(of).transpose(order)
    return tuple(map(tuple, ids.reshape(shape).tolist()))
  if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):
    axes = {name: int(size) for name, size in re.findall(r"\s*'?([^',=]+)'?=(\d+)", match[1])}
    sizes = list(axes.values())
    joined = [list(axes).index(name) for name in re.findall(r"\s*'?([^',]+)'?", match[2])]
    ids = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), joined, range(-len(joined), 0))
    return tuple(map(tuple, ids.reshape(-1, math.prod(sizes[axis] for axis in joined)).tolist()))
  return ()
