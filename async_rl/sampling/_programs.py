"""The engine's compiled programs, by size, and the layout of their arguments on the mesh."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl._validation import check_multiple
from async_rl.models import ROWS
from async_rl.models import Cache
from async_rl.models import Policy
from async_rl.models import SharedPrompts
from async_rl.models import check_shared
from async_rl.models import param_shardings
from async_rl.models import row_parts
from async_rl.models import with_shardings
from async_rl.sampling import _decode
from async_rl.sampling._checksum import sum_part
from async_rl.sampling._checksum import weight_parts
from async_rl.sampling._prepare_weights import prepare_weights
from async_rl.sampling._sampler_config import SamplerConfig

#: Makes a loop one CUDA graph, so that the host is not asked between two decode steps whether another one follows.
_WHOLE_LOOPS = {
  "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
  "xla_gpu_graph_min_graph_size": 1,
}


def compiler_options(platform: str) -> dict[str, Any]:
  """Returns XLA's options for the engine's programs; none that XLA_FLAGS sets."""
  chosen = re.findall(r"--?(\w+)", os.environ.get("XLA_FLAGS", ""))  # names whole: some begin with another's
  return {name: x for name, x in _WHOLE_LOOPS.items() if platform == "gpu" and name not in chosen}


class Programs:
  """Compiles each program once, ahead of its first call.

  A compiled program accepts exactly the shapes, dtypes and shardings it was made for, and everything on its devices:
  a call can neither recompile nor transfer anything implicitly.

  Attributes:
    config: the sizes and the sampling distribution.
    shards: the number of devices over which the slots are split.
    params: the abstract weights that the programs take, from `prepare_weights`.
    raw_params: the abstract weights of `Policy.init`.
    whole: the sharding of arrays that every device holds whole.
    rows: the sharding of arrays whose leading axis is slots or prefixes.
    heads: the sharding of keys and values.
    cache: the sharding and memory layout of the cache.
    shapes: the numbers of slots and positions that the cache can have, from the one that costs least to decode.
    prompts: the number of positions of a shared prompt.

  Args:
    policy: the architecture.
    config: the sizes and the sampling distribution.
    stop_ids: the tokens that end a sample.
    mesh: the devices, with axes among ("data", "fsdp", "tensor").

  Raises:
    ValueError: if the mesh cannot divide the slots, or the backend of attention takes no shared prompts.
  """

  def __init__(self, policy: Policy, config: SamplerConfig, stop_ids: tuple[int, ...], mesh: Mesh):
    self._policy = dataclasses.replace(policy, mesh=mesh)
    backend = self._policy.cache_backend
    self.config = config
    if config.shares_prompts:
      check_shared(backend)
    self._stop_ids = stop_ids
    axes = tuple(axis for axis in ROWS if axis in mesh.axis_names)
    self.shards = row_parts(mesh)
    check_multiple("slots", config.slots, self.shards, "the generation mesh's data times fsdp")
    tensor = "tensor" in mesh.axis_names and policy.config.num_kv_heads % mesh.shape["tensor"] == 0
    self.whole = NamedSharding(mesh, PartitionSpec())
    self.rows = NamedSharding(mesh, PartitionSpec(axes))
    self.heads = NamedSharding(mesh, PartitionSpec(axes, "tensor" if tensor else None))
    self.cache = _cache_format(self.heads, backend)
    raw = policy.abstract()
    prepared = jax.eval_shape(functools.partial(prepare_weights, policy), raw)
    self.raw_params = with_shardings(raw, param_shardings(raw, mesh))
    self.param_shardings = param_shardings(prepared, mesh)
    self.params = with_shardings(prepared, self.param_shardings)
    self.shapes = config.cache_shapes(self.shards, filled_only=backend != "xla")
    self.prompts = config.prompt_lengths[-1]
    self._compiler_options = compiler_options(mesh.devices.flat[0].platform)
    self._compiled: dict[tuple[Any, ...], Any] = {}

  def __len__(self) -> int:
    """Returns the number of programs compiled so far."""
    return len(self._compiled)

  def compile_all(self, prefixes: tuple[int, ...], continued: bool) -> None:
    """Compiles every program that prefixes of these padded lengths need.

    Args:
      prefixes: the lengths.
      continued: whether some of them are of samples that have drawn tokens.
    """
    jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(self.prepare, ())]
    jobs += [(self.checksum, (name,)) for name in self.params]
    jobs += [(self.decode, (*shape, count)) for shape in self.shapes for count in self.prompt_counts(shape[0])]
    jobs += [(self.prefill, (prefix,)) for prefix in prefixes]
    resizes = set(itertools.permutations(self.shapes, 2))
    pairs = itertools.product(prefixes, self.shapes)
    if self.config.shares_prompts:
      counts = {count for rows, _ in self.shapes for count in self.prompt_counts(rows)}
      resizes.update(itertools.permutations([(count, self.prompts) for count in counts], 2))
      jobs += [(self.put_prompts, pair) for pair in itertools.product(prefixes, counts)]
      jobs += [(self.put_own, (n, *shape)) for n, shape in pairs if continued]
    else:
      jobs += [(self.put, (n, *shape)) for n, shape in pairs if n <= shape[1]]
    jobs += [(self.resize, pair) for pair in sorted(resizes)]
    # In threads, since the compiler releases the GIL; but on a GPU it times kernels, which must run alone.
    platform = self.whole.mesh.devices.flat[0].platform
    with concurrent.futures.ThreadPoolExecutor(1 if platform == "gpu" else None) as pool:
      for future in [pool.submit(compile, *sizes) for compile, sizes in jobs]:
        future.result()

  def prefill_rows(self, prefix: int) -> int:
    """Returns the number of prefixes in one prefill: as many as make `prefill_tokens`, at most one per group."""
    rows = max(1, min(self.config.prefill_tokens // prefix, self.config.slots // self.config.group_size))
    return -(-rows // self.shards) * self.shards

  def init_cache(self, slots: int, length: int) -> Cache:
    """Returns an empty cache. The program is not kept, since it runs once."""
    init = functools.partial(self._policy.init_cache, slots, length)
    return jax.jit(init, out_shardings=self.cache)()

  def prepare(self) -> Callable[..., Any]:
    """Returns the program of `prepare_weights`: raw params -> params."""
    function = functools.partial(prepare_weights, self._policy)
    jitted = jax.jit(function, out_shardings=self.param_shardings)
    return self._get(("prepare",), lambda: jitted.trace(self.raw_params))

  def checksum(self, name: str) -> Callable[..., Any]:
    """Returns the program of `sum_part` for the parts of params of this name: a part -> uint32 []."""
    return self._get(("checksum", name), lambda: self._trace_checksum(name))

  def prefill(self, prefix: int) -> Callable[..., Any]:
    """Returns the program of `_decode.prefill` at this padded length: params, tokens -> keys and values."""
    return self._get(("prefill", prefix), lambda: self._trace_prefill(prefix))

  def prompt_counts(self, rows: int) -> tuple[int, ...]:
    """Returns the numbers of shared prompts beside a cache of so many rows, ascending."""
    return self.config.prompt_counts(self.shards, rows)

  @property
  def usual_prompts(self) -> int:
    """Returns how many shared prompts there are beside the largest cache while slots are refilled."""
    counts = self.prompt_counts(self.shapes[-1][0])
    return counts[len(counts) // 2]

  def put(self, prefix: int, slots: int, length: int) -> Callable[..., Any]:
    """Returns the program of `_decode.put` at these sizes: cache (donated), new, rows, slots -> cache."""
    trace = functools.partial(self._trace_put, prefix, slots, length, self.config.group_size)
    return self._get(("put", prefix, slots, length), trace)

  def put_prompts(self, prefix: int, count: int) -> Callable[..., Any]:
    """Returns the program of `put` for so many shared prompts, of which a group has one on each of its devices."""
    copies = min(self.shards, self.config.group_size)
    trace = functools.partial(self._trace_put, prefix, count, self.prompts, copies)
    return self._get(("put_prompts", prefix, count), trace)

  def put_own(self, prefix: int, slots: int, length: int) -> Callable[..., Any]:
    """Returns the program of `put` for what follows a shared prompt; it also takes the starts."""
    trace = functools.partial(self._trace_put, prefix, slots, length, self.config.group_size, cut=True)
    return self._get(("put_own", prefix, slots, length), trace)

  def resize(self, old: tuple[int, int], new: tuple[int, int]) -> Callable[..., Any]:
    """Returns the program of `_decode.resize`: a layer's cache, rows -> a layer's cache."""
    jitted = jax.jit(functools.partial(_decode.resize, self.heads, length=new[1]), out_shardings=self.cache)
    trace = lambda: jitted.trace(self.layers(*old)[0], self._integers(new[:1], self.rows))
    return self._get(("resize", old, new), trace)

  def decode(self, slots: int, length: int, prompts: int = 0) -> Callable[..., Any]:
    """Returns the program of `_decode.decode_chunk`: params, cache (donated), slots, version, prompts -> cache, drawn.

    Args:
      slots: the number of rows of the cache.
      length: the number of its positions.
      prompts: the number of shared prompts; without any, the program takes `None` for them.
    """
    return self._get(("decode", slots, length, prompts), lambda: self.trace_decode(slots, length, prompts))

  def trace_longest(self) -> dict[str, Callable[[], jax.stages.Traced]]:
    """Returns functions that trace, from shapes alone, the programs of the longest prompts and the largest cache."""
    prefix, shape = self.config.prompt_lengths[-1], self.shapes[-1]
    count = self.usual_prompts
    put = (count, self.prompts, 1) if count else (*shape, self.config.group_size)
    return {
      "prefill": lambda: self._trace_prefill(prefix),
      "put": lambda: self._trace_put(prefix, *put),
      "decode": lambda: self.trace_decode(*shape, count),
    }

  def trace_decode(self, slots: int, length: int, prompts: int = 0) -> jax.stages.Traced:
    """Traces the program of `decode` from shapes alone."""
    function = functools.partial(_decode.decode_chunk, self._policy, self.config, self._stop_ids)
    state = with_shardings(_decode.no_slots(slots, pad_id=0), self.rows)
    jitted = jax.jit(function, donate_argnums=1, out_shardings=(self.cache, self.whole))
    shared = self._abstract_prompts(slots, prompts) if prompts else None
    return jitted.trace(self.params, self.layers(slots, length), state, self._integers((), self.whole), shared)

  def layers(self, slots: int, length: int) -> Cache:
    """Returns an abstract cache of this shape."""
    return self._layers(slots, length, self.cache)

  def _trace_checksum(self, name: str) -> jax.stages.Traced:
    part = next(part for other, part in weight_parts(self.params) if other == name)
    return jax.jit(sum_part, out_shardings=self.whole).trace(part)

  def _trace_prefill(self, prefix: int) -> jax.stages.Traced:
    tokens = self._integers((self.prefill_rows(prefix), prefix), self.rows)
    jitted = jax.jit(functools.partial(_decode.prefill, self._policy), out_shardings=self.heads)
    return jitted.trace(self.params, tokens)

  def _abstract_prompts(self, slots: int, count: int) -> SharedPrompts:
    each, members, row = [self._integers(s, self.rows) for s in ((count,), (count, self.config.group_size), (slots,))]
    return SharedPrompts(self.layers(count, self.prompts), each, members, row, row)

  def _trace_put(self, prefix: int, slots: int, length: int, copies: int, cut: bool = False) -> jax.stages.Traced:
    rows = self.prefill_rows(prefix)
    index = self._integers((rows * copies,), self.whole)
    prefixes = NamedSharding(self.heads.mesh, PartitionSpec(None, *self.heads.spec[1:]))
    jitted = jax.jit(functools.partial(_decode.put, prefixes), donate_argnums=0, out_shardings=self.cache)
    new = self._layers(rows, prefix, self.heads)
    return jitted.trace(self.layers(slots, length), new, *[index] * (3 if cut else 2))

  def _get(self, key: tuple[Any, ...], trace: Callable[[], jax.stages.Traced]) -> Callable[..., Any]:
    if key not in self._compiled:
      self._compiled[key] = trace().lower().compile(self._compiler_options)
    return self._compiled[key]

  def _integers(self, shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

  def _layers(self, rows: int, length: int, sharding: NamedSharding | Format) -> Cache:
    return with_shardings(jax.eval_shape(functools.partial(self._policy.init_cache, rows, length)), sharding)


def _cache_format(heads: NamedSharding, backend: str) -> NamedSharding | Format:
  """Returns how keys and values [B, N, S, d] lie in memory: position by position, or head by head.

  A decode step writes one position of every head. On TPUs the compiler wants that position's heads side by side, and so
  do the kernels for GPUs; where the cache comes in another order, each chunk copies it twice and holds it twice. XLA's
  products on GPUs and CPUs want each head in one piece.
  """
  if heads.mesh.devices.flat[0].platform == "tpu" or backend in ("triton", "cudnn"):
    return Format(Layout(major_to_minor=(0, 2, 1, 3)), heads)
  return heads
