"""What is counted of programs equals what one counts by hand: through loops, inside of fusions, along exchanges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from learning_helpers import make_mesh

from async_rl import models
from async_rl import rollout
from async_rl.models._fused_decode import rotate_store_and_attend
from async_rl.models._layers import Norms
from async_rl.models._layers import Rotation
from experiments.plan import _hlo
from experiments.plan import _hlo_costs
from experiments.plan import _jaxpr_costs
from experiments.plan._chips import parse_topology
from experiments.plan._gpus import cudnn_as_there

N = 64
PRODUCT = 2 * N**3
MATRIX = jax.ShapeDtypeStruct((N, N), jnp.float32)


def repeated(x, y):
  return jax.lax.scan(lambda x, _: (x @ y, None), x, None, length=5)[0]


def nested(x, y):
  return jax.lax.scan(lambda x, _: (repeated(x, y) @ y, None), x, None, length=3)[0]


def open_ended(x, y):
  """Turns as often as its data says."""
  return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e9, lambda x: x @ y, x)


def counted(x, y):
  return jax.lax.fori_loop(0, 7, lambda _, x: x @ y, x)


def recomputed(x, y):
  return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ y) @ y)(x)))(x)


def halved(x, y):
  return jax.lax.cond(jnp.sum(x) > 0, lambda: x @ y, lambda: x)


PROGRAMS = {
  repeated: 5,
  nested: 3 * 6,
  open_ended: 11,
  counted: 7,
  recomputed: 3,  # x @ y again, and two products of the backward pass
  halved: 0.5,
}


def total(operations, field="flops"):
  return sum(getattr(x, field) * x.times for x in operations)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_products_count_as_often_as_loops_turn(program):
  traced = jax.jit(program).trace(MATRIX, MATRIX)
  operations, kernels = _jaxpr_costs.count_traced(traced.jaxpr, turns=[11])
  assert total(operations) == PROGRAMS[program] * PRODUCT
  assert kernels == []
  compiled = _hlo_costs.count_compiled(traced.lower().compile().as_text(), turns=[11])
  assert total(compiled.operations) == PROGRAMS[program] * PRODUCT


def test_loops_within_loops_have_turns_of_their_own():
  def nested(x, y):
    grow = lambda _, x: jnp.tanh(x @ y)
    return jax.lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: jax.lax.fori_loop(0, x[1, 1].astype(int), grow, x), x)

  traced = jax.jit(nested).trace(MATRIX, MATRIX)
  text = traced.lower().compile().as_text()
  for turns, times in (([3, 5], 15), ([3], 9)):
    assert total(_jaxpr_costs.count_traced(traced.jaxpr, turns)[0]) == times * PRODUCT
    assert total(_hlo_costs.count_compiled(text, turns).operations) == times * PRODUCT


def test_traffic_of_a_loop_is_that_of_its_turns():
  traced = jax.jit(repeated).trace(MATRIX, MATRIX)
  operations, _ = _jaxpr_costs.count_traced(traced.jaxpr)
  assert total(operations, "nbytes") == 5 * 3 * 4 * N**2  # two factors and a product
  compiled = _hlo_costs.count_compiled(traced.lower().compile().as_text())
  assert 1 <= total(compiled.operations, "nbytes") / total(operations, "nbytes") < 2  # it copies the carry, too


def traffic(function, *shapes):
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return total(_jaxpr_costs.count_traced(jax.jit(function).trace(*arguments).jaxpr)[0], "nbytes") / 4


def test_joined_operations_store_nothing_between_them():
  assert traffic(lambda x: jnp.sin(x) * 2 + x, (N, N)) == 2 * N**2
  assert traffic(lambda x: jnp.sum(jnp.exp(x), axis=1), (N, N)) == N**2 + N
  # Two sums, one of which needs the other, and the result that needs both: three times the input is read.
  assert traffic(functools.partial(jax.nn.softmax, axis=1), (N, N)) == pytest.approx(4 * N**2, rel=0.1)
  # What a product reads is stored first.
  assert traffic(lambda x, y: jnp.sin(x) @ y, (N, N), (N, N)) == 2 * N**2 + 3 * N**2


def test_small_slices_and_updates_move_no_more_than_themselves():
  assert traffic(lambda x: x[3], (N, N)) == 2 * N
  assert traffic(lambda x, y: jax.lax.dynamic_update_slice(x, y, (0, 0)), (N, N), (1, N)) == 2 * N


def test_values_that_are_not_needed_cost_nothing():
  assert traffic(lambda x, y: (x @ y, jnp.sin(x))[1], (N, N), (N, N)) == 2 * N**2


def test_small_products_of_one_value_are_joined():
  """It is read once; of larger ones each is by itself, and so are products of different values."""

  def operations(function, n):
    traced = jax.jit(function).trace(*[jax.ShapeDtypeStruct((n, n), jnp.float32)] * 3)
    found = [x for x in _jaxpr_costs.count_traced(traced.jaxpr)[0] if x.flops]
    assert sum(x.flops for x in found) == 2 * 2 * n**3
    return [x.nbytes / (4 * n**2) for x in found]

  assert operations(lambda x, y, z: (x @ y, x @ z), N) == [5]
  assert operations(lambda x, y, z: (x @ y, z @ x), N) == [3, 3]
  assert operations(lambda x, y, z: (x @ y, x @ z), 2048) == [3, 3]


def test_an_attention_kernel_skips_what_no_token_sees():
  """Of four by four blocks, ten lie on the diagonal or below it; a block is two products."""
  rows, length, heads, width = 2, 2048, 4, 128
  q = jax.ShapeDtypeStruct((rows, length, heads, width), jnp.bfloat16)
  attend = functools.partial(models.self_attention, scale=1.0, backend="splash")
  traced = jax.jit(attend).trace(q, q, q, jax.ShapeDtypeStruct((rows, length), jnp.int32))
  operations, (kernel,) = _jaxpr_costs.count_traced(traced.jaxpr)
  assert kernel.flops * kernel.times == pytest.approx(rows * heads * 2 * 2 * length**2 * width * 10 / 16)
  assert total(operations) == 0
  square = rows * heads * 2 * length**2 * width * 10 / 16
  backward = jax.jit(jax.grad(lambda q, k, *rest: jnp.sum(attend(q, k, *rest).astype(jnp.float32)), (0, 1)))
  _, kernels = _jaxpr_costs.count_traced(backward.trace(q, q, q, jax.ShapeDtypeStruct((rows, length), jnp.int32)).jaxpr)
  assert [kernel.flops / square for kernel in kernels] == pytest.approx([2, 4, 3])  # output, keys and values, queries


def test_the_decode_kernel_reads_the_blocks_that_are_filled():
  """Half of the last block in vain; it multiplies the queries of eight rows with every block."""
  rows, length, heads, groups, width, filled = 16, 1024, 4, 2, 128, 300
  q = jax.ShapeDtypeStruct((rows, heads, width), jnp.bfloat16)
  cache = jax.ShapeDtypeStruct((rows, 2 * groups, length, width), jnp.bfloat16)
  attend = functools.partial(models.cache_attention, num_kv_heads=groups, scale=1.0, backend="ragged")
  traced = jax.jit(attend).trace(q, (cache,), jax.ShapeDtypeStruct((rows,), jnp.int32))
  read = filled + models.RAGGED_BLOCK / 2
  operations, (kernel,) = _jaxpr_costs.count_traced(traced.jaxpr, filled=filled)
  assert kernel.flops * kernel.times == 2 * 2 * rows * 8 * heads * width * read
  positions, queries = 2 * 2 * rows * groups * width, 2 * 2 * rows * heads * width  # bytes of each, and of results
  assert kernel.nbytes == pytest.approx(positions * read + queries, rel=0.01)
  _, (whole,) = _jaxpr_costs.count_traced(traced.jaxpr)
  assert whole.nbytes == pytest.approx(positions * length + queries, rel=0.01)
  assert total(operations) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_kernels_of_decode_steps_read_what_is_filled_and_move_no_cache(shared):
  rows, heads, groups, width, length, filled, prompts, prompt = 256, 4, 2, 128, 1024, 300, 128, 400
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  attend = lambda angles, prompts, *arrays: rotate_store_and_attend(
    *arrays, Rotation(Norms(), None, None, angles), scale=1.0, prompts=prompts
  )
  angles, cache = jax.ShapeDtypeStruct((rows, width // 2), jnp.float32), array(rows, groups, length, width)
  new = array(rows, heads, width), array(rows, groups, width), array(rows, groups, width)
  layers = (array(prompts, groups, prompt, width),) * 2
  sharing = models.SharedPrompts(layers, integers(prompts), integers(prompts, 4), integers(rows), integers(rows))
  traced = jax.jit(attend).trace(angles, sharing if shared else None, *new, (cache, cache), integers(rows))
  kernels, whole = (_jaxpr_costs.count_traced(traced.jaxpr, filled=n)[1] for n in (filled, None))
  position, token = 2 * 2 * groups * width, 2 * rows * (heads + 2 * groups) * width + 4 * rows * width  # bytes
  out, parts = 2 * rows * heads * width, 4 * rows * heads * (width + 1) * shared
  assert len(kernels) == 1 + shared
  assert kernels[-1].flops == 2 * 2 * rows * heads * width * filled
  assert kernels[-1].nbytes == pytest.approx(rows * position * filled + token + out + parts, rel=0.001)
  assert whole[-1].nbytes - kernels[-1].nbytes == rows * position * (length - filled)
  if shared:
    assert kernels[0].flops == 2 * 2 * prompts * 4 * heads * width * prompt
    assert kernels[0].nbytes == pytest.approx(prompts * position * prompt + token + parts, rel=0.001)


def test_cudnns_kernel_skips_what_no_token_sees():
  """Segments see half of themselves and half a block, a cache is read where it is filled. Two products, then five."""
  rows, length, heads, groups, width, segment = 2, 1024, 4, 2, 128, 256
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  attend = functools.partial(models.self_attention, scale=1.0, backend="cudnn", max_segments=8)
  mesh = rollout.make_mesh(parse_topology("h100:1").devices())
  q, kv = array(rows, length, heads, width), array(rows, length, groups, width)

  def loss(*qkv):
    return jnp.sum(attend(*qkv, jnp.zeros((rows, length), jnp.int32), mesh=mesh).astype(jnp.float32))

  with cudnn_as_there():
    packed = jax.jit(jax.grad(loss)).trace(q, kv, kv).jaxpr
    decode = jax.jit(functools.partial(models.cache_attention, num_kv_heads=groups, scale=1.0, backend="cudnn")).trace(
      array(rows, heads, width), (array(rows, groups, length, width),) * 2, jax.ShapeDtypeStruct((rows,), jnp.int32)
    )
  product = 2 * rows * length * heads * width
  forward, backward = _jaxpr_costs.count_traced(packed, filled=segment)[1]
  assert (forward.flops, backward.flops) == (2 * product * (256 + 128) / 2, 5 * product * (256 + 128) / 2)
  assert _jaxpr_costs.count_traced(packed)[1][0].flops == 2 * product * (1024 + 128) / 2
  (kernel,) = _jaxpr_costs.count_traced(decode.jaxpr, filled=segment)[1]
  assert kernel.flops == 2 * 2 * rows * heads * width * segment
  position, queries = 2 * 2 * rows * groups * width, 2 * 2 * rows * heads * width  # bytes
  assert kernel.nbytes == pytest.approx(position * segment + queries, rel=0.01)


def test_devices_share_the_work():
  mesh = make_mesh(data=4, tensor=2)
  rows, table = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec(None, "tensor"))
  x = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=rows)
  y = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=table)
  traced = jax.jit(lambda x, y: x @ y).trace(x, y)
  operations, _ = _jaxpr_costs.count_traced(traced.jaxpr, devices=8, shares=[1 / 4, 1 / 2])
  assert total(operations) == PRODUCT / 8
  assert total(operations, "nbytes") == 4 * N**2 * (1 / 4 + 1 / 2 + 1 / 8)
  assert total(_hlo_costs.count_compiled(traced.lower().compile().as_text()).operations) == PRODUCT / 8


def test_exchanges_count_as_often_as_loops_turn_and_know_their_groups():
  mesh = make_mesh(data=2, fsdp=4)
  shard = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  y = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=shard)

  def gather_and_sum(y):
    def body(total, _):
      part = jax.lax.all_gather(total, "fsdp", axis=1, tiled=True) @ jnp.ones((N, N // 4))
      return jax.lax.psum(part, "data"), None

    return jax.lax.scan(body, y, None, length=3)[0]

  spec = PartitionSpec(None, "fsdp")
  program = jax.jit(jax.shard_map(gather_and_sum, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
  found = _hlo_costs.count_compiled(program.lower(y).compile().as_text()).exchanges
  by_kind = {x.kind: x for x in found}
  gather, reduce = by_kind["all-gather"], by_kind["all-reduce"]
  assert (gather.times, gather.loops, gather.nbytes) == (3, 1, 4 * N**2)
  assert gather.sent == 4 * N**2 * 3 / 4  # three of four parts pass every device of a ring
  assert sorted(gather.groups) == [(0, 1, 2, 3), (4, 5, 6, 7)]
  assert (reduce.times, reduce.nbytes) == (3, 4 * N * N // 4)
  assert reduce.sent == reduce.nbytes  # there and back, halves
  assert reduce.joins(0, 4)
  assert not reduce.joins(0, 1)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
    ("replica_groups=mesh[a=2, b=2] {b}", ((0, 1), (2, 3))),
    ("replica_groups=mesh['part'=1,'shared 0'=2,'shared 1'=2] {'shared 0'}", ((0, 2), (1, 3))),
  ],
)
def test_groups_of_devices_are_read_in_every_form(text, expected):
  assert _hlo_costs._groups(f"all-gather(x), {text}, use_global_device_ids=true") == expected


def test_a_text_that_is_no_program_is_refused():
  with pytest.raises(ValueError, match="no compiled program"):
    _hlo.parse("HloModule nothing")


def test_a_step_of_the_policy_has_the_products_of_its_parameters():
  """Scoring T tokens takes 2 T products and sums per parameter of a matrix, and attention."""
  config = models.ModelConfig(
    vocab_size=64, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, tie_embeddings=False
  )
  policy = models.Policy(config, dtype="float32", attention="xla")
  rows = jax.ShapeDtypeStruct((2, 16), jnp.int32)
  score = functools.partial(models.score, policy)
  traced = jax.jit(lambda params, *x: score(params, *x).logprobs).trace(policy.abstract(), rows, rows, rows)
  matrices = [x for x in jax.tree.leaves_with_path(policy.abstract()) if "kernel" in str(x[0]) or "head" in str(x[0])]
  parameters = sum(np.prod(x.shape) for _, x in matrices)
  attention = 3 * 2 * 2 * 2 * 16**2 * 4 * 8
  assert total(_jaxpr_costs.count_traced(traced.jaxpr)[0]) == 2 * 32 * parameters + attention


@pytest.mark.parametrize(
  ("array", "nbytes"),
  [
    ("bf16[128,8,576,64]{3,1,2,0:T(8,128)(2,1)}", 2 * 128 * 8 * 576 * 128),  # half of every line is empty
    ("f32[4,512]{0,1:T(8,128)}", 4 * 128 * 512),
    ("s32[100]{0:T(128)S(1)}", 4 * 128),
    ("pred[]{:T(512)}", 1),
    ("f32[3,5]{1,0}", 4 * 3 * 5),
  ],
)
def test_arrays_fill_whole_tiles(array, nbytes):
  module = _hlo.parse(f"\nENTRY %main (a: {array}) -> {array} {{\n  ROOT %a = {array} parameter(0)\n}}\n")
  (shape,) = _hlo.root(module.computations["main"]).shapes
  assert shape.nbytes == nbytes
  assert shape.near == ("S(1)" in array)
