"""Counts the operations and the memory traffic of a traced program, for chips whose compiler is not at hand.

Products count by their shapes, kernels by what they compute block by block. For the traffic, the program is cut as XLA
would fuse it: elementwise operations and sums over an axis join their neighbors, so that values between them are never
stored; products, kernels, sorts and updates read and write memory. Loops count as often as they turn.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jax.extend import core

from experiments.plan._hlo_costs import Operation

#: Primitives that join no others, beside loops and branches.
_ALONE = {
  "dot_general", "conv_general_dilated", "pallas_call", "sort", "top_k", "cumsum", "cumlogsumexp", "cummax", "cumprod",
  "gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice", "psum", "psum_invariant", "all_gather",
  "all_gather_invariant", "reduce_scatter", "all_to_all", "ppermute", "random_bits", "rng_bit_generator",
  "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper",
}  # fmt: skip
#: The products of cuDNN's attention, forward and backward, each of all queries with all keys that these see.
_CUDNN_PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
#: Queries and keys that cuDNN's kernels are taken to compute at a time, also what is hidden of a diagonal block.
_CUDNN_BLOCK = 128
#: XLA joins products of one value with several matrices if each moves at most this number of bytes.
_JOINED_PRODUCT = 2**25
_LOOPS = {"scan", "while", "cond", "shard_map"}
#: Primitives that move nothing: they give a value another shape, or say how it lies.
_VIEWS = {
  "reshape", "squeeze", "expand_dims", "transpose", "sharding_constraint", "optimization_barrier", "stop_gradient",
  "name", "pvary", "pcast", "layout_constraint",
}  # fmt: skip
_SLICES = {"dynamic_slice", "gather", "slice"}
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}


class _Value:
  """A value of the program.

  Attributes:
    nbytes: its bytes on one device.
  """

  def __init__(self, aval: Any, share: float):
    self.nbytes = _nbytes(aval) * share
    self.share = share


class _Step(NamedTuple):
  """An equation, with the values that it reads and makes."""

  eqn: Any
  reads: list[_Value]
  makes: list[_Value]

  @property
  def name(self) -> str:
    return self.eqn.primitive.name

  @property
  def alone(self) -> bool:
    """Returns whether it joins no others: small slices are read from memory alone, halves with what needs them."""
    if self.name == "slice":
      return 2 * self.makes[0].nbytes < self.reads[0].nbytes
    return self.name in _ALONE or self.name in _LOOPS


def count_traced(
  jaxpr: core.ClosedJaxpr,
  turns: Sequence[float] = (1,),
  *,
  devices: int = 1,
  shares: Sequence[float] | None = None,
  filled: float | None = None,
) -> tuple[list[Operation], list[Operation]]:
  """Counts a traced program on one of its devices, over which its values are assumed to be split evenly.

  Args:
    jaxpr: the program, such as `jax.jit(function).trace(...).jaxpr`.
    turns: the turns of loops whose number depends on data, the outermost first; the last holds further in, too.
    devices: the number of devices that the program runs on.
    shares: the share of each argument that a device holds; `None` for all of it on one device.
    filled: the mean of the filled positions of a row of a cache, or of the tokens of a packed row's segment, for
      kernels that skip all others; `None` for whole rows.

  Returns:
    The operations outside of kernels, and the kernels.
  """
  found: tuple[list[Operation], list[Operation]] = ([], [])
  arguments = [
    _Value(v.aval, share) for v, share in zip(jaxpr.jaxpr.invars, shares or [1.0] * len(jaxpr.in_avals), strict=True)
  ]
  _count(jaxpr.jaxpr, arguments, _Scope(1.0, tuple(turns), 1 / devices, filled), found)
  return found


class _Scope(NamedTuple):
  """Where an equation stands.

  Attributes:
    times: the times that it runs.
    turns: the turns of loops whose number depends on data, of this depth and of those further in.
    share: the share of a computed value that a device holds.
    filled: the filled positions of a row of a cache, or the tokens of a segment; `None` for whole rows.
  """

  times: float
  turns: tuple[float, ...]
  share: float
  filled: float | None


def _count(jaxpr: Any, arguments: list[_Value], scope: _Scope, found: tuple[list[Operation], list[Operation]]) -> None:
  env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
  steps = list(_inline(jaxpr, env, scope.share))
  results = {env[v] for v in jaxpr.outvars if isinstance(v, core.Var)}
  steps = _alive(steps, results)
  found[0].extend(_fusions(steps, results, scope.times))
  products: dict[Any, list[Operation]] = collections.defaultdict(list)
  for step in steps:
    if step.name in _LOOPS:
      for inner, operands, within in _bodies(step, scope):
        _count(inner, operands, within, found)
    elif step.name == "pallas_call":
      found[1].append(_kernel(step, scope))
    elif step.name in _CUDNN_PRODUCTS:
      found[1].append(_cudnn_kernel(step, scope))
    elif step.alone:
      operation = _operation(step, scope)
      if step.name == "dot_general" and operation.nbytes <= _JOINED_PRODUCT:
        products[step.reads[0], str(step.eqn.params["dimension_numbers"])].append(operation)
      else:
        found[0].append(operation)
  found[0].extend(_joined_product(value, parts) for (value, _), parts in products.items())


def _inline(jaxpr: Any, env: dict[Any, Any], share: float) -> Iterator[_Step]:
  """Yields the equations of a jaxpr and, in place of calls, those of what is called."""
  for v in jaxpr.constvars:
    env[v] = _Value(v.aval, 1.0)
  for eqn in jaxpr.eqns:
    reads = [env[v] for v in eqn.invars if isinstance(v, core.Var)]
    callee = _callee(eqn)
    if callee is not None:
      inside = {
        v: env[x] if isinstance(x, core.Var) else _Value(v.aval, 0.0)
        for v, x in zip(callee.invars, eqn.invars, strict=True)
      }
      yield from _inline(callee, inside, share)
      for v, x in zip(eqn.outvars, callee.outvars, strict=True):
        env[v] = inside[x] if isinstance(x, core.Var) else _Value(v.aval, 0.0)
    elif eqn.primitive.name in _VIEWS and len(reads) == len(eqn.outvars):
      env.update(zip(eqn.outvars, reads, strict=True))
    else:
      makes = [_Value(v.aval, share) for v in eqn.outvars]
      env.update(zip(eqn.outvars, makes, strict=True))
      yield _Step(eqn, reads, makes)


def _callee(eqn: Any) -> Any:
  """Returns the jaxpr that an equation calls once, as if it stood in its place; `None` if it calls none."""
  if eqn.primitive.name in _LOOPS or eqn.primitive.name == "pallas_call":
    return None
  for key in ("jaxpr", "call_jaxpr"):
    if (inner := eqn.params.get(key)) is not None:
      return getattr(inner, "jaxpr", inner)
  return None


def _alive(steps: list[_Step], results: set[_Value]) -> list[_Step]:
  """Returns the equations on which the results depend."""
  wanted, alive = set(results), []
  for step in reversed(steps):
    if not wanted.isdisjoint(step.makes):
      wanted.update(step.reads)
      alive.append(step)
  return alive[::-1]


def _bodies(step: _Step, scope: _Scope) -> Iterator[tuple[Any, list[_Value], _Scope]]:
  """Yields the jaxprs inside of a loop, a branch or a program of single devices, with their arguments."""
  params = step.eqn.params
  operands = {
    v: value for v, value in zip([v for v in step.eqn.invars if isinstance(v, core.Var)], step.reads, strict=True)
  }

  def arguments(inner: Any, given: Sequence[Any], share: float | None = None) -> list[_Value]:
    return [
      _Value(v.aval, share if share is not None else operands[x].share if isinstance(x, core.Var) else 0.0)
      for v, x in zip(inner.invars, given, strict=True)
    ]

  if step.name == "scan":
    inner = params["jaxpr"].jaxpr
    yield inner, arguments(inner, step.eqn.invars), scope._replace(times=scope.times * params["length"])
  elif step.name == "while":
    inner, skipped = params["body_jaxpr"].jaxpr, params["cond_nconsts"]
    within = scope._replace(times=scope.times * scope.turns[0], turns=scope.turns[1:] or scope.turns)
    yield inner, arguments(inner, step.eqn.invars[skipped:]), within
  elif step.name == "cond":
    for branch in params["branches"]:
      times = scope.times / len(params["branches"])
      yield branch.jaxpr, arguments(branch.jaxpr, step.eqn.invars[1:]), scope._replace(times=times)
  else:  # shard_map, whose shapes are those of one device
    inner = params["jaxpr"]
    yield inner, arguments(inner, step.eqn.invars, 1.0), scope._replace(share=1.0)


# Operations on their own.


def _operation(step: _Step, scope: _Scope) -> Operation:
  nbytes = sum(x.nbytes for x in (*step.reads, *step.makes))
  if step.name in _SLICES:
    nbytes = 2 * sum(x.nbytes for x in step.makes)
  elif step.name in _UPDATES:
    nbytes = 2 * _nbytes(step.eqn.invars[_UPDATES[step.name]].aval) * scope.share
  dtype = step.eqn.invars[0].aval.dtype.name if step.name == "dot_general" else ""
  return Operation(product_flops(step.eqn) * scope.share, nbytes, scope.times, dtype)


def _joined_product(value: _Value, parts: list[Operation]) -> Operation:
  """Counts products of one value with several matrices as the one into which XLA joins them: it is read once."""
  again = (len(parts) - 1) * value.nbytes
  return parts[0]._replace(flops=sum(x.flops for x in parts), nbytes=sum(x.nbytes for x in parts) - again)


def product_flops(eqn: Any) -> float:
  """Returns the products and sums of an equation that multiplies matrices; 0 for others."""
  if eqn.primitive.name != "dot_general":
    return 0.0
  contracted = eqn.params["dimension_numbers"][0][0]
  return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)


def _kernel(step: _Step, scope: _Scope) -> Operation:
  """Counts a kernel: the products of a block, times the blocks that are computed."""
  params = step.eqn.params
  name = str(params.get("name"))
  if "ragged_paged" in name:
    return _ragged_kernel(step, scope)
  if name in ("rotate_store_and_attend", "attend_to_prompts"):
    return _attention_to_cache(step, scope)
  grid = params["grid_mapping"].grid
  blocks = math.prod(grid)
  # Blocks of queries and of keys come last, but with the heads between them where gradients of keys are summed.
  if "splash" in name and grid[-1] == grid[-3 if "dkv" in name else -2]:
    blocks *= (grid[-1] + 1) / (2 * grid[-1])  # blocks above the diagonal are skipped
  flops = sum(product_flops(eqn) for eqn in _all_eqns(params["jaxpr"]))
  nbytes = sum(x.nbytes for x in (*step.reads, *step.makes))
  return Operation(flops * blocks, nbytes, scope.times, "bfloat16")


def _ragged_kernel(step: _Step, scope: _Scope) -> Operation:
  """Counts the kernel of decode steps on TPUs: it reads the filled blocks of a row, half of the last in vain."""
  inputs = [v.aval for v in step.eqn.invars]
  rows, pages = inputs[1].shape
  cache = inputs[-1]  # [rows * pages, page, heads, width]
  buffer = next(v.aval.shape for v in step.eqn.params["jaxpr"].invars if len(v.aval.shape) == 5)
  block, length = buffer[1] * buffer[2], pages * cache.shape[1]  # of the cache, or of a window
  read = length if scope.filled is None else min(length, scope.filled + block / 2)
  position = _nbytes(cache) / (cache.shape[0] * cache.shape[1])
  flops = sum(product_flops(eqn) for eqn in _all_eqns(step.eqn.params["jaxpr"])) * cache.shape[2] / buffer[3]
  others = sum(x.nbytes for x in (*step.reads, *step.makes)) - _nbytes(cache)
  return Operation(flops * rows * read / block, others + rows * read * position, scope.times, "bfloat16")


def _attention_to_cache(step: _Step, scope: _Scope) -> Operation:
  """Counts a kernel of decode steps on GPUs: two products with what is filled of a row, or with a shared prompt."""
  cache = step.eqn.invars[-1].aval  # values [rows, S, N, d], as keys before them
  rows, length, _, width = cache.shape
  heads = step.eqn.outvars[0].aval.shape[-2]
  others = sum(x.nbytes for x in (*step.reads, *step.makes)) - 2 * _nbytes(cache)
  queries, filled = rows * heads, length if scope.filled is None else min(length, scope.filled)
  if str(step.eqn.params["name"]) == "attend_to_prompts":
    queries, filled = queries * step.eqn.invars[1].aval.shape[1], length
  else:
    others -= 2 * _nbytes(cache)  # is returned, too, with one entry of a row that is new
  return Operation(
    2 * 2.0 * queries * width * filled, others + 2 * _nbytes(cache) * filled / length, scope.times, "bfloat16"
  )


def _cudnn_kernel(step: _Step, scope: _Scope) -> Operation:
  """Counts cuDNN's attention: the blocks of keys that some query of a block sees, and the filled part of a cache."""
  q, k, _, _, _, _, starts = (v.aval for v in step.eqn.invars[:7])  # [B, T, H, d], [B, S, N, d]
  rows, queries, heads, width = q.shape
  mask, window = step.eqn.params["mask_type"].name, step.eqn.params["sliding_window_length"]
  filled = queries == 1 or starts.size > 0  # a cache, or packed segments
  length = min(k.shape[1], scope.filled) if filled and scope.filled is not None else k.shape[1]
  seen = min(length, (length + _CUDNN_BLOCK) / 2) if "CAUSAL" in mask else length
  seen = seen if window is None else min(seen, window + _CUDNN_BLOCK / 2)
  flops = _CUDNN_PRODUCTS[step.name] * 2.0 * rows * queries * heads * width * seen
  nbytes = sum(x.nbytes for x in (*step.reads, *step.makes))
  if queries == 1:  # of keys and values the filled part alone is read
    nbytes -= 2 * _nbytes(k) * (1 - length / k.shape[1])
  return Operation(flops, nbytes, scope.times, q.dtype.name)


def _all_eqns(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a kernel; of loops inside it, those of one turn times their length."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in eqn.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if isinstance(inner, core.Jaxpr):
          for _ in range(eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1):
            yield from _all_eqns(inner)


# Operations that XLA joins.


def _fusions(steps: list[_Step], results: set[_Value], times: float) -> list[Operation]:
  """Returns the joined operations: each reads what is stored in memory and writes what will be.

  A sum has to end before what depends on it begins, so that operations join only on the same side of all sums; values
  that both sides need are computed twice.
  """
  maker = {value: i for i, step in enumerate(steps) for value in step.makes}
  stored = results | {value for step in steps if step.alone for value in (*step.reads, *step.makes)}
  stored |= {value for step in steps if _is_sum(step) for value in step.makes}
  level: dict[int, int] = {}
  group = list(range(len(steps)))

  def find(i: int) -> int:
    while group[i] != i:
      group[i] = group[group[i]]
      i = group[i]
    return i

  for i, step in enumerate(steps):
    level[i] = max(
      (level[maker[x]] + (_is_sum(steps[maker[x]]) or steps[maker[x]].alone) for x in step.reads if x in maker),
      default=0,
    )
    for x in step.reads:
      if not step.alone and x in maker and x not in stored and level[maker[x]] == level[i]:
        group[find(maker[x])] = find(i)

  def sources(value: _Value) -> set[_Value]:
    """Returns the stored values from which a value is computed."""
    if value in stored or value not in maker:
      return {value}
    return set().union(*(sources(x) for x in steps[maker[value]].reads))

  read: dict[int, set[_Value]] = collections.defaultdict(set)
  written: dict[int, set[_Value]] = collections.defaultdict(set)
  for i, step in enumerate(steps):
    if step.alone:
      continue
    for x in step.reads:
      inside = x in maker and x not in stored and find(maker[x]) == find(i)
      read[find(i)] |= set() if inside else sources(x)
    written[find(i)] |= stored.intersection(step.makes)
  moved = [sum(x.nbytes for x in written[g]) + sum(x.nbytes for x in read[g]) for g in written if written[g]]
  return [Operation(0.0, nbytes, times) for nbytes in moved if nbytes]


def _is_sum(step: _Step) -> bool:
  return step.name.startswith("reduce_") or step.name in ("argmax", "argmin")


def _nbytes(aval: Any) -> float:
  dtype = getattr(aval, "dtype", None)
  return math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 0)
