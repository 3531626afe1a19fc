"""The chips of a TPU slice that can learn together while the others generate, by their coordinates.

The learner is one program over some chips of every host, or over all chips of some hosts. The chips of v4 and v5p form
three-dimensional tori, and their compiler takes any set of them. Those of v5e and v6e lie in a plane, where it refuses
many sets, such as all even rows. The sets below are accepted by libtpu 0.0.42 for slices of 1 to 16 hosts:
`tests/studies/tpu_splits.py` compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

D = TypeVar("D", bound=Any)  # a jax.Device of a TPU


def choose_learners(hosts: Sequence[Sequence[D]], count: int) -> list[list[D]] | None:
  """Returns `count` chips of every host that can learn together, or `None` if the compiler accepts no such set.

  The other chips of a host can generate together.

  Args:
    hosts: the chips of each host in order of id, equally many on every host.
    count: the number of chips of a host that learn.
  """
  chips = hosts[0]
  if "lite" not in chips[0].device_kind:
    return [list(host[:count]) for host in hosts]
  if len({getattr(chip, "slice_index", 0) for host in hosts for chip in host}) > 1:
    return None  # only all chips of several slices together
  if len(hosts) == 1:
    # The compiler aborts on six chips of eight that form a rectangle.
    return [list(chips[1:7] if (len(chips), count) == (8, 6) else chips[:count])]
  if len(chips) != 4 or (chips[0].device_kind == "TPU v5 lite" and len(hosts) > 4):
    return None  # on larger v5e slices, the other chips of a host could not generate together
  rule = _rule(hosts, count)
  return rule and [[chip for chip in host if rule(chip)] for host in hosts]


def takes_hosts(hosts: Sequence[Sequence[D]], count: int) -> bool:
  """Returns whether all chips but those of the last `count` hosts can learn together, and those of each host generate.

  Args:
    hosts: the chips of each host, equally many on every host.
    count: the number of hosts that generate.
  """
  chips = hosts[0]
  if len({getattr(chip, "slice_index", 0) for host in hosts for chip in host}) > 1:
    return False
  if "lite" not in chips[0].device_kind or len(hosts) <= 4:
    return True
  # The compiler takes no part of larger v5e slices; on larger v6e ones it aborts on three quarters.
  return chips[0].device_kind != "TPU v5 lite" and 2 * count == len(hosts)


def takes_one_host(hosts: Sequence[Sequence[D]]) -> bool:
  """Returns whether the compiler makes programs for the chips of one host, so that they can generate together."""
  slices = {getattr(chip, "slice_index", 0) for host in hosts for chip in host}
  return hosts[0][0].device_kind != "TPU v5 lite" or len(hosts) <= 4 * len(slices)


def _rule(hosts: Sequence[Sequence[Any]], count: int) -> Callable[[Any], bool] | None:
  """Returns the function that tells whether a chip learns, for several hosts of two by two chips."""
  if count == 3:
    return _in_even_row_or_column
  for axis in (0, 1):
    if count == 2 and max(chip.coords[axis] for host in hosts for chip in host) == 3:
      return functools.partial(_in_middle, axis=axis)
  return None


def _in_middle(chip: Any, axis: int) -> bool:
  """Whether a chip is in the middle of the four rows or columns: one rectangle with half of every host."""
  return chip.coords[axis] in (1, 2)


def _in_even_row_or_column(chip: Any) -> bool:
  return 0 in (chip.coords[0] % 2, chip.coords[1] % 2)
