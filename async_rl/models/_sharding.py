"""The axes of meshes, and those over which parameters are split, by ordered expressions that must cover everything."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

#: Mesh axes, outermost first: copies of the parameters, parameters split and gathered, and split matrix products.
AXES = ("data", "fsdp", "tensor")
#: Mesh axes over which rows (sequences, slots) are split.
ROWS = AXES[:2]
#: The most chips among which XLA for TPUs scatters a sum when they are all that the program runs on.
_LARGEST_RING = 8

#: First match wins. Specs are of one layer; stacked layers get a leading unsplit axis.
RULES: Sequence[tuple[str, PartitionSpec]] = (
  (r"ends/embed$", PartitionSpec("tensor", "fsdp")),
  (r"ends/head$", PartitionSpec("fsdp", "tensor")),
  (r"(q|k|v|gate|up)/kernel$", PartitionSpec("fsdp", "tensor")),
  (r"(q|k|v)/bias$", PartitionSpec("tensor")),
  (r"(o|down)/kernel$", PartitionSpec("tensor", "fsdp")),
  (r"scale$", PartitionSpec()),
  (r"^adapters/", PartitionSpec()),  # small
  (r"^value_head/", PartitionSpec()),
)


def named_mesh(devices: np.ndarray, names: Sequence[str] = AXES) -> Mesh:
  """Returns a mesh whose axes the compiler splits over by itself, of devices in an array with a dimension per axis."""
  return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def mesh_of_one(device: jax.Device, names: Sequence[str] = AXES) -> Mesh:
  """Returns the mesh of one device, all of whose axes have size 1."""
  return named_mesh(np.array([device]).reshape([1] * len(names)), names)


def row_parts(mesh: Mesh | None) -> int:
  """Returns the number of parts into which a mesh splits rows."""
  return 1 if mesh is None else math.prod(size for axis, size in mesh.shape.items() if axis in ROWS)


def scatter_groups(mesh: Mesh) -> list[list[list[int]] | None]:
  """Returns the exchanges, in order, by which the devices along "fsdp" scatter a sum.

  An exchange is a list of groups of positions along "fsdp"; the members of a group scatter among themselves. `None` is
  an exchange in one group of all.

  That one exchange is the answer but for one kind of program: one that runs on more than 8 chips which are a part of a
  TPU slice and extend along three dimensions of its torus, such as half of a v5p slice. If all chips of a program are
  to scatter there, XLA (libtpu 0.0.42) gives each of them the whole sum, around one ring, which sends twice as much. It
  scatters among a part of the program's chips, however. So the positions are taken for a grid, in which first the
  columns and then the rows scatter; every position ends with the part that one exchange would give it.
  """
  size = mesh.shape["fsdp"]
  inner = next(n for n in range(math.isqrt(size), size + 1) if size % n == 0)
  if size <= _LARGEST_RING or inner == size or size < mesh.size or not _is_part_of_torus(mesh):
    return [None]
  grid = np.arange(size).reshape(-1, inner)
  return [grid.T.tolist(), grid.tolist()]


def sums_whole(mesh: Mesh) -> bool:
  """Returns whether the devices along "fsdp" are a whole TPU slice of more than 8 chips.

  Asked to scatter a sum, XLA gives each of these chips all of it. It uses all dimensions of the slice at once, so that
  this takes no longer than scattering along one dimension after the other, though twice as much is sent.
  """
  chips = _chips_along_fsdp(mesh)
  return len(chips) > _LARGEST_RING and len(chips) == _chips_of_slice(chips)


def _is_part_of_torus(mesh: Mesh) -> bool:
  """Returns whether the devices along "fsdp" are a part of a TPU slice that extends along three dimensions of it."""
  chips = _chips_along_fsdp(mesh)
  return len(chips) < _chips_of_slice(chips) and bool(np.all(np.ptp([chip.coords for chip in chips], axis=0)))


def _chips_along_fsdp(mesh: Mesh) -> list[jax.Device]:
  devices = np.moveaxis(mesh.devices, mesh.axis_names.index("fsdp"), -1)
  return list(devices.reshape(-1, devices.shape[-1])[0])


def _chips_of_slice(chips: Sequence[jax.Device]) -> int:
  """Returns the number of chips of the TPU slice that all of some chips are in; 0 if there is none."""
  slices = {getattr(chip, "slice_index", 0) for chip in chips}
  if chips[0].platform != "tpu" or len(slices) > 1:
    return 0
  return sum(getattr(chip, "slice_index", 0) in slices for chip in chips[0].client.devices())


def path_name(path: tuple[Any, ...]) -> str:
  """Joins the names of a tree path by slashes: "layers/q/kernel"."""
  return "/".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))) for entry in path)


def param_specs(params: Any, rules: Sequence[tuple[str, PartitionSpec]] = RULES) -> Any:
  """Returns the PartitionSpecs of a parameter tree, stacked or not.

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
  """Returns the NamedShardings of a parameter tree; an axis that does not divide a dimension leaves it whole.

  Args:
    params: the tree of arrays or ShapeDtypeStructs.
    mesh: the devices, with axes among ("data", "fsdp", "tensor").
    rules: the ordered (regular expression, spec of one layer) pairs.
  """

  return jax.tree.map(lambda leaf, spec: fit_sharding(mesh, spec, leaf.shape), params, param_specs(params, rules))


def with_shardings(tree: Any, shardings: Any) -> Any:
  """Returns the shapes and dtypes of a tree, as ShapeDtypeStructs with shardings.

  Args:
    tree: the tree of arrays or ShapeDtypeStructs.
    shardings: a tree of shardings or layouts like `tree`, or one for all of its leaves.
  """
  if isinstance(shardings, NamedSharding | Format):
    shardings = jax.tree.map(lambda _: shardings, tree)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def fit_sharding(mesh: Mesh, spec: Sequence[str | tuple[str, ...] | None], shape: Sequence[int]) -> NamedSharding:
  """Returns `spec` on `mesh`, less the axes that the mesh lacks or that do not divide their dimension."""

  def fit(entry, size):
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    axes = tuple(axis for axis in axes if axis in mesh.axis_names)
    return axes if axes and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None

  return NamedSharding(mesh, PartitionSpec(*(fit(entry, size) for entry, size in zip(spec, shape, strict=False))))


def constrain(x: jax.Array, mesh: Mesh | None, *spec: str | tuple[str, ...] | None) -> jax.Array:
  """Asks the compiler to lay x out as `spec` on `mesh`; dimensions beyond `spec` are whole."""
  return x if mesh is None else jax.lax.with_sharding_constraint(x, fit_sharding(mesh, spec, x.shape))
