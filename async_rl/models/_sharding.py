"""Which mesh axis each parameter is split over, by ordered regular expressions that must cover everything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

#: First match wins. Specs are of one layer; stacked layers get a leading unsplit axis.
RULES: Sequence[tuple[str, PartitionSpec]] = (
  (r"ends/embed$", PartitionSpec("tensor", "fsdp")),
  (r"ends/head$", PartitionSpec("fsdp", "tensor")),
  (r"(q|k|v|gate|up)/kernel$", PartitionSpec("fsdp", "tensor")),
  (r"(q|k|v)/bias$", PartitionSpec("tensor")),
  (r"(o|down)/kernel$", PartitionSpec("tensor", "fsdp")),
  (r"scale$", PartitionSpec()),
)


def path_name(path: tuple[Any, ...]) -> str:
  """A tree path as names joined by slashes: "layers/q/kernel"."""
  return "/".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))) for entry in path)


def param_specs(params: Any, rules: Sequence[tuple[str, PartitionSpec]] = RULES) -> Any:
  """PartitionSpecs of a parameter tree, stacked or not.

  Raises:
    ValueError: if no rule matches a parameter; the message names it.
  """

  def spec(path, leaf):
    name = path_name(path)
    for pattern, found in rules:
      if re.search(pattern, name):
        stacked = name.startswith("layers/") and not re.match(r"layers/\d+/", name)
        return PartitionSpec(None, *found) if stacked else found
    raise ValueError(f"No sharding rule matches parameter {name!r} of shape {leaf.shape}; add one to RULES.")

  return jax.tree_util.tree_map_with_path(spec, params)


def param_shardings(params: Any, mesh: Mesh, rules: Sequence[tuple[str, PartitionSpec]] = RULES) -> Any:
  """NamedShardings of a parameter tree on `mesh`. An axis that does not divide a dimension leaves it whole.

  Args:
    params: arrays or ShapeDtypeStructs.
    mesh: with axes among ("data", "fsdp", "tensor").
    rules: ordered (regular expression, spec of one layer) pairs.
  """

  def sharding(leaf, spec):
    fits = [a if a in mesh.axis_names and size % mesh.shape[a] == 0 else None for a, size in zip(spec, leaf.shape)]
    return NamedSharding(mesh, PartitionSpec(*fits))

  return jax.tree.map(sharding, params, param_specs(params, rules))
