"""The way of weights from the learner mesh to a generation mesh, without a whole copy on any learner device.

The learner's devices cast what they hold (`stage`), blocks are copied from device to device (`copy`), and the
generation devices gather them (`gather`). Layers travel stacked, in few large arrays, and are unstacked on arrival.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl.models import Params
from async_rl.models import as_used
from async_rl.rollout._weight_link import WeightLink
from async_rl.rollout._weight_route import Route

Array = jax.Array
#: The pieces of each array, on the learner mesh.
Staged = list[list[Array]]
#: The waves in which each array arrived, on the generation mesh, in groups of arrays.
Arrived = list[list[list[Array]]]

#: Bytes that the generation devices gather at a time, but one array at least: so much they hold twice for a moment.
_GROUP_BYTES = 2**29


class WeightPush:
  """Moves parameters to the devices of a sampler and into its form, that of `sampling.prepare_weights`.

  Args:
    abstract: the parameters, or some of their parts, layers stacked, as ShapeDtypeStructs with shardings on the learner
      mesh.
    dtype: the compute dtype.
    targets: the sampler's NamedShardings of these parts; parts with layers are lists of layers.
    link: the way to the processes that sample, where others learn; `None` where every process does both.

  Attributes:
    nbytes: the bytes of the arrays that travel, each counted once.
  """

  def __init__(self, abstract: Params, dtype: str, targets: Params, link: WeightLink | None = None):
    self._channel = None if link is None else link.open()
    self._depths = {part: len(layers) for part, layers in targets.items() if isinstance(layers, list)}
    cast = functools.partial(as_used, dtype=dtype)
    arrays, self._tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(cast, abstract))
    unstacked = [targets[part][0] if part in self._depths else targets[part] for part in sorted(abstract)]
    self._targets = jax.tree.leaves(unstacked)
    self._layers = [self._depths.get(path[0].key) for path, _ in arrays]
    ends = zip(jax.tree.leaves(abstract), self._targets, self._layers, strict=True)
    self._routes = [
      Route(x.shape, source.sharding, _of_stack(target) if layers else target)
      for (_, x), (source, target, layers) in zip(arrays, ends, strict=True)
    ]
    self._abstract = abstract
    self._dtypes = [x.dtype for _, x in arrays]
    sizes = [x.size * x.dtype.itemsize for _, x in arrays]
    self.nbytes = sum(sizes)
    self._groups = _group(sizes, _GROUP_BYTES)
    self._stage = jax.jit(
      lambda params: [route.cut(x) for route, x in zip(self._routes, jax.tree.leaves(cast(params)), strict=True)],
      out_shardings=[route.staging for route in self._routes],
    )
    self._gather = [
      jax.jit(functools.partial(self._join, group), out_shardings=[self._targets[i] for i in group])
      for group in self._groups
    ]

  def stage(self, params: Params) -> Staged:
    """Starts the cast on the learner mesh, a program of all processes; the result shares no memory with `params`."""
    return self._stage(params)

  def copy(self, staged: Staged) -> Arrived:
    """Starts the copies of this process's blocks to its generation devices. Launches no program.

    Where other processes learn, it starts to pull their blocks; where others sample, it offers them this one's.
    """

    def blocks() -> list[list[list[Array]]]:
      return [route.blocks(pieces) for route, pieces in zip(self._routes, staged, strict=True)]

    moved: Any
    if self._channel is None:
      found = blocks()
      devices = [[route.devices] * len(waves) for route, waves in zip(self._routes, found, strict=True)]
      moved = jax.device_put(found, devices)
    else:
      wanted = [route.abstract_blocks(dtype) for route, dtype in zip(self._routes, self._dtypes, strict=True)]
      moved = self._channel.carry(blocks, wanted) or [None] * len(wanted)
    arrived = zip(self._routes, moved, self._dtypes, strict=True)
    arrays = [route.arrive(waves, dtype) for route, waves, dtype in arrived]
    return [[arrays[i] for i in group] for group in self._groups]

  def gather(self, arrived: Arrived) -> Params:
    """Starts the programs on the generation mesh that make the sampler's weights of the result of `copy`.

    They communicate, so that only the thread that launches the sampler's programs may call this. Empties `arrived`
    group by group, so that the memory of one serves the next.
    """
    layers = []
    for program in self._gather:
      layers += program(arrived.pop(0))
    tree = jax.tree.unflatten(self._tree, layers)
    return {part: _unstack(tree[part], self._depths[part]) if part in self._depths else tree[part] for part in tree}

  def trace(self) -> dict[str, Callable[[], jax.stages.Traced]]:
    """Returns functions that trace the programs of a push from shapes alone: "stage", and "gather" of every group."""

    def trace_gather(program: Any, group: Sequence[int]) -> jax.stages.Traced:
      return program.trace([self._routes[i].abstract_arrived(self._dtypes[i]) for i in group])

    gathers = {
      "gather" if len(self._groups) == 1 else f"gather {i}": functools.partial(trace_gather, program, group)
      for i, (program, group) in enumerate(zip(self._gather, self._groups, strict=True))
    }
    return {"stage": lambda: self._stage.trace(self._abstract), **gathers}

  def _join(self, group: Sequence[int], arrived: list[list[Array]]) -> list[Any]:
    """Returns every array of a group, or the list of its layers. Traceable."""
    joined = [self._routes[i].join(waves) for i, waves in zip(group, arrived, strict=True)]
    depths = [self._layers[i] for i in group]
    return [x if depth is None else [x[i] for i in range(depth)] for x, depth in zip(joined, depths, strict=True)]


def _of_stack(layer: NamedSharding) -> NamedSharding:
  """Returns the sharding of stacked layers that are laid out like one layer."""
  return NamedSharding(layer.mesh, PartitionSpec(None, *layer.spec))


def _unstack(part: Any, depth: int) -> list[Any]:
  """Turns a tree of lists into a list of trees."""
  return [
    jax.tree.map(lambda layers, i=i: layers[i], part, is_leaf=lambda x: isinstance(x, list)) for i in range(depth)
  ]


def _group(sizes: Sequence[int], limit: int) -> list[list[int]]:
  """Returns the indices of `sizes` in order, in groups of at most `limit` in all, or of one."""
  groups: list[list[int]] = []
  total = limit
  for i, size in enumerate(sizes):
    if total + size > limit:
      groups.append([])
      total = 0
    groups[-1].append(i)
    total += size
  return groups
