"""What accelerators can do by their data sheets, and the devices of a topology that need not be there."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from async_rl._suggestions import suggestion
from experiments.plan._gpus import StandIn
from experiments.plan._gpus import compiler_version
from experiments.plan._gpus import described


@dataclasses.dataclass(frozen=True)
class Chip:
  """An accelerator. Rates are those of its data sheet; all bytes are powers of ten per second.

  Attributes:
    name: the name in a topology.
    hbm: the bytes of its memory that programs may use.
    flops: the products and sums of bfloat16 per second.
    bandwidth: the bytes per second to and from its memory.
    link: the bytes per second that it sends to its neighbors, both ways, along one dimension of a slice.
    network: the bytes per second that it sends to other slices, its part of its host's network.
    flops_share: the share of `flops` that large products reach.
    kernel_share: the share of `flops` that attention kernels reach.
    bandwidth_share: the share of `bandwidth` that large copies reach.
    launch: the seconds that an operation takes at least.
    source: where the figures are from.
  """

  name: str
  hbm: float
  flops: float
  bandwidth: float
  link: float
  network: float
  flops_share: float
  kernel_share: float
  bandwidth_share: float
  launch: float
  source: str

  @property
  def is_tpu(self) -> bool:
    """Returns whether programs for it are compiled by libtpu."""
    return not self.name.startswith("h")


#: Nothing was measured on TPUs yet: their shares are guesses. Those of the H100 are a copy and a product of 8192 cubed.
_CLOUD = "docs.cloud.google.com/tpu/docs/{}; shares and seconds are assumed"
_NVIDIA = "NVIDIA's data sheet; shares measured with JAX 0.11 on an H100: a copy, and a product of 8192 cubed"
#: HBM is what libtpu 0.0.52 lets a program use where this is known, and otherwise that of the data sheet.
CHIPS = {
  chip.name: chip
  for chip in (
    Chip("v4", 32e9, 275e12, 1.2e12, 100e9, 6.25e9, 0.8, 0.4, 0.85, 1e-6, _CLOUD.format("v4")),
    Chip("v5e", 15.75 * 2**30, 197e12, 819e9, 100e9, 3.125e9, 0.8, 0.4, 0.85, 1e-6, _CLOUD.format("v5e")),
    Chip("v5p", 95e9, 459e12, 2.765e12, 200e9, 6.25e9, 0.8, 0.4, 0.85, 1e-6, _CLOUD.format("v5p")),
    Chip("v6e", 31.25 * 2**30, 918e12, 1.64e12, 200e9, 12.5e9, 0.8, 0.4, 0.85, 1e-6, _CLOUD.format("v6e")),
    Chip("tpu7x", 192e9, 2307e12, 7.38e12, 200e9, 12.5e9, 0.8, 0.4, 0.85, 1e-6, _CLOUD.format("tpu7x")),
    Chip("h100", 80e9, 989e12, 3.35e12, 450e9, 50e9, 0.77, 0.4, 0.88, 2.5e-6, _NVIDIA),
    Chip("h200", 141e9, 989e12, 4.8e12, 450e9, 50e9, 0.77, 0.4, 0.88, 2.5e-6, _NVIDIA),
  )
}


def chip_of(kind: str) -> Chip:
  """Returns the data sheet of a kind of device, as JAX names it, an H100's if it has none."""
  return next((chip for name, chip in CHIPS.items() if name in kind.lower()), CHIPS["h100"])


@dataclasses.dataclass(frozen=True)
class Topology:
  """The accelerators to plan for.

  Attributes:
    chip: the kind of accelerator.
    shape: the sizes of a slice in chips; one number for GPUs.
    slices: the number of slices.
    hosts: the number of hosts of a slice; `None` for the default: one for up to eight v5e or v6e chips, and for GPUs.
  """

  chip: Chip
  shape: tuple[int, ...]
  slices: int = 1
  hosts: int | None = None

  def __str__(self) -> str:
    shape = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
    return shape if self.slices == 1 else f"{self.slices} slices of {shape}"

  @property
  def chips(self) -> int:
    """Returns the number of chips of all slices."""
    return math.prod(self.shape) * self.slices

  @property
  def has_compiler(self) -> bool:
    """Returns whether programs for it can be compiled; for TPUs by libtpu, without which it has no devices."""
    return self.chip.is_tpu or compiler_version() is not None

  def devices(self, compiled: bool = False) -> list[Any]:
    """Returns the devices; those of TPUs from libtpu, in place of GPUs what stands for them in tracing.

    Args:
      compiled: whether programs for GPUs will be compiled, if `has_compiler`.

    Raises:
      ValueError: if the topology does not exist.
      ImportError: if it is one of TPUs and libtpu is missing.
    """
    if not self.chip.is_tpu:
      kind = f"NVIDIA {self.chip.name.upper()}"
      if compiled:
        return described(kind, self.chips, self.chip.hbm, self.chip.bandwidth)
      return [StandIn(number, kind) for number in range(self.chips)]
    try:
      import libtpu  # noqa: F401
    except ImportError as error:
      raise ImportError(
        f"{self} needs the package libtpu, which has the chips and the compiler of TPUs, also with --no-compile; "
        "install async_rl[tpu]."
      ) from error
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
    if bounds := self._host_bounds():
      options["chips_per_host_bounds"] = bounds
    name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
    try:
      return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except Exception as error:
      raise ValueError(f"libtpu knows no topology {name} ({options or 'default'}): {str(error)[:300]}") from error

  def _host_bounds(self) -> tuple[int, ...] | None:
    """Returns the chips of a host in each dimension where libtpu's default, at most 2 x 2, is not meant."""
    if len(self.shape) != 2:
      return None
    if self.hosts == 1 or (self.hosts is None and self.slices == 1 and math.prod(self.shape) <= 8):
      return (*self.shape, 1)
    return None


def parse_topology(text: str, slices: int = 1, hosts: int | None = None) -> Topology:
  """Returns the topology of a text such as "v5e:4x4", "v5p:2x2x2" or "h100:2".

  Raises:
    ValueError: if the text is of another form, names no known accelerator or has a size of 0.
  """
  match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", text)
  if match is None:
    raise ValueError(f"*topology* must look like v5e:4x4, v5p:2x2x2 or h100:2, got topology={text!r}.")
  kind, shape = match[1], tuple(map(int, match[2].split("x")))
  if kind not in CHIPS:
    raise ValueError(f"unknown accelerator {kind!r}: {suggestion(kind, CHIPS)}")
  if min(shape) < 1:
    raise ValueError(
      f"*topology* must have sizes of at least 1, got topology={text!r}; one chip is {kind}:"
      f"{'x'.join('1' * len(shape))}."
    )
  if slices < 1 or (slices > 1 and not CHIPS[kind].is_tpu):
    raise ValueError(f"*slices* must be at least 1, and 1 for GPUs, got slices={slices}.")
  if hosts not in (None, 1) and not (len(shape) == 2 and math.prod(shape) == 4 * hosts):
    raise ValueError(f"*hosts* must be 1, or a quarter of a slice's {math.prod(shape)} chips, got hosts={hosts}.")
  return Topology(CHIPS[kind], shape, slices, hosts)
