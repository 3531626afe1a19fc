"""What a program costs on one chip, in figures that grow linearly with the number of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from experiments.plan._chips import Chip
from experiments.plan._hlo_costs import Exchange
from experiments.plan._hlo_costs import Operation

#: How far an exchange reaches.
REACHES = ("host", "hosts", "slices")


@dataclasses.dataclass(frozen=True)
class Summary:
  """The costs of a program on one chip. All figures are of one call.

  Attributes:
    flops: the products and sums of matrices, those of kernels included.
    float32_flops: those of them with factors in float32.
    nbytes: the bytes read from and written to the chip's memory.
    local_seconds: the time of all operations for which the chip waits, each as long as its products or bytes take.
    traffic_seconds: the time of all bytes, also those that are copied while the chip does other work.
    sent: the bytes that a chip sends, by kind of exchange and how far it reaches: "all-gather host".
    exposed_seconds: the time of exchanges for which the chip waits.
    hidden_seconds: the time of exchanges that other work can hide.
    arguments: the bytes of its arguments; with those below, 0 where no compiler was at hand.
    outputs: the bytes of its results.
    aliased: the bytes of results that lie where arguments did.
    temporaries: the bytes of everything between.
    code: the bytes of the program itself.
    loop_gathers: the bytes of the largest all-gather inside of a loop.
    unread: 1 if the compiled program could not be read, so that the traced one was counted, without exchanges.
  """

  flops: float = 0
  float32_flops: float = 0
  nbytes: float = 0
  local_seconds: float = 0
  traffic_seconds: float = 0
  sent: dict[str, float] = dataclasses.field(default_factory=dict)
  exposed_seconds: float = 0
  hidden_seconds: float = 0
  arguments: float = 0
  outputs: float = 0
  aliased: float = 0
  temporaries: float = 0
  code: float = 0
  loop_gathers: float = 0
  unread: float = 0

  @property
  def seconds(self) -> float:
    """Returns the time of a call: hidden copies and exchanges take none unless they take longer than all else."""
    return self.exposed_seconds + max(self.local_seconds, self.traffic_seconds, self.hidden_seconds)

  @property
  def sum_of_memory(self) -> float:
    """Returns the bytes that it needs while it runs, its arguments included."""
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def seconds_of(operations: Iterable[Operation], chip: Chip, *, kernels: bool = False) -> float:
  """Returns the time of operations for which the chip waits, one after the other."""
  flops = chip.flops * (chip.kernel_share if kernels else chip.flops_share)
  bandwidth = chip.bandwidth * chip.bandwidth_share
  return sum(x.times * max(x.flops / flops, x.nbytes / bandwidth, chip.launch) for x in operations if not x.hidden)


def summarize(
  operations: Sequence[Operation],
  kernels: Sequence[Operation],
  exchanges: Sequence[Exchange],
  chip: Chip,
  devices: Sequence[Any],
  memory: dict[str, float],
) -> Summary:
  """Returns the costs of a program.

  Args:
    operations: its operations outside of kernels.
    kernels: its kernels.
    exchanges: what its devices send each other.
    chip: the chip.
    devices: the devices of its mesh, in order.
    memory: the fields of `Summary` that tell of memory.
  """
  sent: dict[str, float] = {}
  exposed = hidden = 0.0
  for x in exchanges:
    reach = _reach(x, devices)
    sent[f"{x.kind} {reach}"] = sent.get(f"{x.kind} {reach}", 0.0) + x.sent * x.times
    seconds = x.times * x.sent / (chip.network if reach == "slices" else chip.link * x.links)
    exposed, hidden = (exposed, hidden + seconds) if x.hidden else (exposed + seconds, hidden)
  everything = (*operations, *kernels)
  return Summary(
    flops=sum(x.flops * x.times for x in everything),
    float32_flops=sum(x.flops * x.times for x in operations if x.dtype in ("f32", "float32")),
    nbytes=sum(x.nbytes * x.times for x in everything),
    local_seconds=seconds_of(operations, chip) + seconds_of(kernels, chip, kernels=True),
    traffic_seconds=sum(x.nbytes * x.times for x in everything) / (chip.bandwidth * chip.bandwidth_share),
    sent=sent,
    exposed_seconds=exposed,
    hidden_seconds=hidden,
    loop_gathers=max((x.nbytes for x in exchanges if x.loops and x.kind == "all-gather"), default=0),
    **memory,
  )


def _reach(exchange: Exchange, devices: Sequence[Any]) -> str:
  """Returns how far an exchange reaches: within a host, between hosts of a slice, or between slices."""
  if exchange.between_slices:
    return "slices"
  for group in exchange.groups or (tuple(range(len(devices))),):
    if len({devices[i].process_index for i in group}) > 1:
      return "hosts"
  return "host"


def extrapolate(small: Summary, large: Summary, layers: tuple[int, int], wanted: int) -> Summary:
  """Returns the costs at `wanted` layers from those at two smaller numbers of layers.

  Times, products and bytes grow by the same with every layer; the compiler's plan of what lies where in memory may
  change between two depths, so that temporaries are at least those of both.
  """
  steps = (wanted - layers[0]) / (layers[1] - layers[0])

  def along(a: float, b: float) -> float:
    return max(0.0, a + (b - a) * steps)

  values: dict[str, Any] = {}
  for field in dataclasses.fields(Summary):
    a, b = getattr(small, field.name), getattr(large, field.name)
    if field.name == "sent":
      values["sent"] = {key: along(a.get(key, 0.0), b.get(key, 0.0)) for key in {*a, *b}}
    elif field.name in ("loop_gathers", "unread"):
      values[field.name] = max(a, b)
    elif field.name == "temporaries":
      values[field.name] = max(a, b, along(a, b))
    else:
      values[field.name] = along(a, b)
  return Summary(**values)
