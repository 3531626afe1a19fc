"""TPU slices by the names that JAX, the Cloud TPU API, Compute Engine and GKE have for them."""

from __future__ import annotations

import dataclasses
import math

from async_rl._suggestions import suggestion


@dataclasses.dataclass(frozen=True)
class Generation:
  """The names of a TPU generation.

  Attributes:
    accelerator: the prefix of the accelerator types, such as "v5litepod" of "v5litepod-16".
    units_per_chip: the units that accelerator types count for a chip: 2 where they count cores.
    runtime: the software version of the Cloud TPU API; `None` where this API does not know the generation.
    machine: the prefix of the machine types of Compute Engine and GKE.
    image: the image family of Compute Engine.
    node_label: the value of GKE's node label `cloud.google.com/gke-tpu-accelerator`.
    flat: whether slices are rectangles of up to 16 by 16 chips and not three-dimensional.
  """

  accelerator: str
  units_per_chip: int
  runtime: str | None
  machine: str
  image: str
  node_label: str
  flat: bool


_IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
GENERATIONS = {
  "v5e": Generation("v5litepod", 1, "v2-alpha-tpuv5-lite", "ct5lp-hightpu", _IMAGE, "tpu-v5-lite-podslice", flat=True),
  "v6e": Generation("v6e", 1, "v2-alpha-tpuv6e", "ct6e-standard", _IMAGE, "tpu-v6e-slice", flat=True),
  "v5p": Generation("v5p", 2, "v2-alpha-tpuv5", "ct5p-hightpu", _IMAGE, "tpu-v5p-slice", flat=False),
  "tpu7x": Generation("tpu7x", 2, None, "tpu7x-standard", "ubuntu-accel-2404-amd64-tpu-tpu7x", "tpu7x", flat=False),
}
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
#: The three-dimensional shapes that an accelerator type stands for; others must be named by their shape, too.
_USUAL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")


@dataclasses.dataclass(frozen=True)
class Topology:
  """A TPU slice.

  Attributes:
    generation: the name of the generation, a key of `GENERATIONS`.
    shape: the chips in each direction, such as "4x4".
  """

  generation: str
  shape: str

  @classmethod
  def parse(cls, name: str) -> Topology:
    """Returns the slice that JAX calls `name`, such as "v5e:4x4".

    Raises:
      ValueError: if there is no such slice.
    """
    generation, _, shape = name.partition(":")
    if generation not in GENERATIONS:
      raise ValueError(
        f"*topology* must be a generation and a shape such as v5e:4x4, got topology={name!r}: "
        f"{suggestion(generation, GENERATIONS)}"
      )
    flat = GENERATIONS[generation].flat
    if shape not in _FLAT if flat else not _is_cuboid(shape):
      shapes = ", ".join(_FLAT) if flat else f"{', '.join(_USUAL[:6])} or other multiples of 4 in ascending order"
      raise ValueError(f"*topology* must name a slice, got topology={name!r}; those of {generation} are {shapes}.")
    return cls(generation, shape)

  def __str__(self) -> str:
    return f"{self.generation}:{self.shape}"

  @property
  def names(self) -> Generation:
    """Returns the names of the generation."""
    return GENERATIONS[self.generation]

  @property
  def chips(self) -> int:
    """Returns the number of chips."""
    return math.prod(map(int, self.shape.split("x")))

  @property
  def chips_per_host(self) -> int:
    """Returns the number of chips of a host: a flat slice of up to eight chips is one host."""
    return self.chips if self.names.flat and self.chips <= 8 else 4

  @property
  def hosts(self) -> int:
    """Returns the number of hosts."""
    return self.chips // self.chips_per_host

  @property
  def accelerator_type(self) -> str:
    """Returns the name by the number of chips or cores, such as "v5litepod-16"."""
    return f"{self.names.accelerator}-{self.chips * self.names.units_per_chip}"

  @property
  def is_usual(self) -> bool:
    """Returns whether the accelerator type alone stands for this shape."""
    return self.names.flat or self.shape in _USUAL

  @property
  def machine_type(self) -> str:
    """Returns the machine type of a host, such as "ct5lp-hightpu-4t"."""
    return f"{self.names.machine}-{self.chips_per_host}t"


def _is_cuboid(shape: str) -> bool:
  """Returns whether three-dimensional slices of this shape exist."""
  sides = [int(side) if side.isdigit() else 0 for side in shape.split("x")]
  return shape in _USUAL or (len(sides) == 3 and sides == sorted(sides) and all(s and s % 4 == 0 for s in sides))
