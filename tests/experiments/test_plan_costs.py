"""What is counted of programs equals what one counts by hand: through loops, inside of fusions, along exchanges."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from learning_helpers import make_mesh

from async_rl import models
from async_rl import rollout
from experiments.plan import _hlo
from experiments.plan import _hlo_costs
from experiments.plan import _jaxpr_costs
from experiments.plan._chips import parse_topology
from experiments.plan._gpus import cudnn_as_there
from experiments.plan._summary import summarize

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


#: As TPUs compile what goes between slices; the chips of slice n are numbered from n times 100000.
SLICES_PROGRAM = """
HloModule program, is_scheduled=true

ENTRY %main (x: f32[2,128]) -> f32[2,128] {
  %x = f32[2,128]{1,0:T(2,128)} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[2,128]{1,0:T(2,128)}, u32[], token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[2,128]{1,0:T(2,128)}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[2,128]{1,0:T(2,128)}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %recv.1 = (f32[2,128]{1,0:T(2,128)}, u32[], token[]) recv(%after-all), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={{100000,100001,200000,200001}},_xla_megascale_transfer_type="ALL_TO_ALL"}
  %recv-done.1 = (f32[2,128]{1,0:T(2,128)}, token[]) recv-done(%recv.1), channel_id=3, is_host_transfer=true
  ROOT %y = f32[2,128]{1,0:T(2,128)} get-tuple-element(%recv-done), index=0
}
"""  # noqa: E501


def test_what_goes_between_slices_takes_the_network():
  reduce, swap = found = _hlo_costs.count_compiled(SLICES_PROGRAM).exchanges
  assert (reduce.kind, reduce.groups, reduce.nbytes) == ("all-reduce", ((1, 2, 3),), 1024)
  assert (swap.kind, swap.groups, swap.nbytes) == ("all-to-all", ((1, 2),), 1024)
  assert not reduce.joins(1, 2)  # positions in a slice, not slices
  chip = parse_topology("v5e:2x2").chip
  costs = summarize([], [], found, chip, [types.SimpleNamespace(process_index=0)] * 4, {})
  assert costs.sent == {"all-reduce slices": 1024 * 4 / 3, "all-to-all slices": 512}
  assert costs.exposed_seconds == pytest.approx((1024 * 4 / 3 + 512) / chip.network)


#: As TPUs compile them: memory space 1 is on the chip, products are convolutions, loops have no known trip count.
TPU_PROGRAM = """
HloModule program, is_scheduled=true

%fused (param_0: bf16[8,128,256], param_1: s32[], param_2: bf16[64,128]) -> bf16[64,256] {
  %param_0 = bf16[8,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  %param_2 = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %slice = bf16[1,128,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0, %param_1, %param_1, %param_1), dynamic_slice_sizes={1,128,256}
  %bitcast = bf16[128,256]{1,0:T(8,128)(2,1)} bitcast(%slice)
  ROOT %convolution = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} convolution(%param_2, %bitcast), dim_labels=bf_io->bf
}

%body (carry: (s32[], bf16[64,128], bf16[8,128,256], bf16[64,256])) -> (s32[], bf16[64,128], bf16[8,128,256], bf16[64,256]) {
  %carry = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128,256]{2,1,0:T(8,128)(2,1)}, bf16[64,256]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %one = s32[]{:T(128)S(6)} constant(1)
  %count = s32[]{:T(128)} add(%i, %one)
  %x = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%carry), index=1
  %layers = bf16[8,128,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=2
  %fusion = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} fusion(%layers, %i, %x), kind=kOutput, calls=%fused
  %permute-start = (bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %permute-done = bf16[64,128]{1,0:S(1)} collective-permute-done(%permute-start)
  ROOT %next = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128,256]{2,1,0:T(8,128)(2,1)}, bf16[64,256]{1,0:T(8,128)(2,1)S(1)}) tuple(%count, %permute-done, %layers, %fusion)
}

%condition (carry.1: (s32[], bf16[64,128], bf16[8,128,256], bf16[64,256])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128,256]{2,1,0:T(8,128)(2,1)}, bf16[64,256]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(8)
  %i.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: bf16[64,128], layers.1: bf16[8,128,256]) -> bf16[64,256] {
  %a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %layers.1 = bf16[8,128,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[]{:T(128)} constant(2)
  %copy-start = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a)
  %copy-done = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %buffer = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128,256]{2,1,0:T(8,128)(2,1)}, bf16[64,256]{1,0:T(8,128)(2,1)S(1)}) tuple(%zero, %copy-done, %layers.1, %buffer)
  %while = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128,256]{2,1,0:T(8,128)(2,1)}, bf16[64,256]{1,0:T(8,128)(2,1)S(1)}) while(%init), condition=%condition, body=%body
  %out = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while), index=3
  ROOT %copy = bf16[64,256]{1,0:T(8,128)(2,1)} copy(%out)
}
"""  # noqa: E501


def test_tpu_programs_are_read_to_the_byte():
  """A loop from 2 to 8 over stacked layers, of which each turn reads one; the rest stays on the chip."""
  costs = _hlo_costs.count_compiled(TPU_PROGRAM)
  assert total(costs.operations) == 6 * 2 * 64 * 128 * 256
  assert {x.dtype for x in costs.operations if x.flops} == {"bf16"}
  layer, first, last = 2 * 128 * 256, 2 * 64 * 128, 2 * 64 * 256
  assert total(costs.operations, "nbytes") == 6 * (layer + 4) + first + last  # and the index
  (permute,) = costs.exchanges
  assert (permute.kind, permute.times, permute.sent, permute.hidden) == ("collective-permute", 6, first, True)


def test_a_tpu_counts_and_copies_ahead_while_it_does_other_work():
  """Loop counters are a scalar core's, so that their instructions take no time; of copies the bytes alone count."""
  operations = _hlo_costs.count_compiled(TPU_PROGRAM).operations
  assert [x.times for x in operations if not x.hidden] == [1, 6]  # the copy of the result, and a turn's product
  assert [x.nbytes for x in operations if x.hidden] == [2 * 64 * 128]
  chip = parse_topology("v5e:2x2").chip
  costs = summarize(operations, [], [], chip, [], {})
  assert costs.seconds == costs.local_seconds == pytest.approx(7 * chip.launch)
  large = [x._replace(nbytes=2**30) for x in operations]  # whoever copies much waits for that at last
  costs = summarize(large, [], [], chip, [], {})
  assert costs.seconds == costs.traffic_seconds == pytest.approx(8 * 2**30 / (chip.bandwidth * chip.bandwidth_share))


#: An exchange that is spread over a product: each of its fusions gathers by its text, and hands on the semaphore.
SPREAD_PROGRAM = """
%start (a: bf16[64,128]) -> (bf16[512,128], u32[]) {
  %a = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather = bf16[512,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%a), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %begun = (bf16[512,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion (b: bf16[512,128], c: u32[], d: bf16[64,128]) -> (bf16[64,128], bf16[512,128], u32[]) {
  %b = bf16[512,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %c = u32[]{:S(2)} parameter(1)
  %d = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %more = bf16[512,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%d), replica_groups=[1,8]<=[8], dimensions={0}
  %other = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} add(%d, %d)
  ROOT %result = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[512,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) tuple(%other, %more, %c)
}

ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {
  %x = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %first = (bf16[512,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%start
  %whole = bf16[512,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%first), index=0
  %semaphore = u32[]{:S(2)} get-tuple-element(%first), index=1
  %second = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[512,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%whole, %semaphore, %x), kind=kLoop, calls=%async_collective_fusion
  ROOT %y = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%second), index=0
}
"""  # noqa: E501


def test_an_exchange_that_is_spread_over_products_counts_once():
  (gather,) = _hlo_costs.count_compiled(SPREAD_PROGRAM).exchanges
  assert (gather.kind, gather.nbytes, gather.hidden) == ("all-gather", 2 * 512 * 128, True)
  assert gather.sent == 2 * 448 * 128


@pytest.mark.parametrize(
  ("window", "data", "kernel", "labels", "out", "products"),
  [
    # A batch of 4 products [8, 16] x [16, 32] as one convolution, whose taps fall on data once per output.
    ("window={size=4 pad=3_3 rhs_reversal=1}", "1,8,16", "4,16,32", "0bf_0io->0bf", "4,8,32", 4 * 8 * 16 * 32),
    ("window={size=4 stride=3 pad=0_0 lhs_dilate=4}", "4,8,16", "4,16,32", "0bf_0io->0bf", "4,8,32", 4 * 8 * 16 * 32),
    # A sum over 4 parts of a split axis.
    ("window={size=4}", "4,8,16", "4,16,32", "0bf_0io->0bf", "1,8,32", 4 * 8 * 16 * 32),
  ],
)
def test_products_as_convolutions_count_where_they_fall_on_data(window, data, kernel, labels, out, products):
  text = f"""
ENTRY %main (a: bf16[{data}], b: bf16[{kernel}]) -> bf16[{out}] {{
  %a = bf16[{data}]{{2,1,0}} parameter(0)
  %b = bf16[{kernel}]{{2,1,0}} parameter(1)
  ROOT %c = bf16[{out}]{{2,1,0}} convolution(%a, %b), {window}, dim_labels={labels}
}}
"""
  assert total(_hlo_costs.count_compiled(text).operations) == 2 * products


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
