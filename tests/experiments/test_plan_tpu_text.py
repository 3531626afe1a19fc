"""Programs as TPUs' compiler writes them are counted right: here as texts, so that no compiler is needed."""

import types

import pytest

from experiments.plan import _hlo_costs
from experiments.plan._chips import parse_topology
from experiments.plan._summary import summarize


def total(operations, field="flops"):
  return sum(getattr(x, field) * x.times for x in operations)


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


def test_a_loop_whose_turns_were_joined_turns_less_often():
  program = TPU_PROGRAM.replace("S(6)} constant(1)", "S(6)} constant(2)")
  assert total(_hlo_costs.count_compiled(program).operations) == 3 * 2 * 64 * 128 * 256


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


#: Two sums: one along both dimensions of a slice, and one of which each chip keeps a part, with what fills it up.
SUMS_PROGRAM = """
%all-reduce-scatter (a: f32[1024,8192]) -> f32[280,8192] {
  %a = f32[1024,8192]{1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  %i = u32[] constant(0)
  %pad = f32[1120,8192]{1,0:T(8,128)} pad(%a, %zero), padding=0_96x0_0
  %sum = f32[1120,8192]{1,0:T(8,128)} all-reduce(%pad), replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, to_apply=%add
  ROOT %part = f32[280,8192]{1,0:T(8,128)} dynamic-slice(%sum, %i, %i), dynamic_slice_sizes={280,8192}
}

ENTRY %main (x: f32[1024,8192]) -> f32[280,8192] {
  %x = f32[1024,8192]{1,0:T(8,128)} parameter(0)
  %whole = f32[1024,8192]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, to_apply=%add, backend_config={"collective_algorithm_config":{"emitter":"RotatedPincerEmitter","strategy":"UniDirectionNDRingStrategy","debug":"\\nUniDirectionNDRingStrategy{colors:4 phases:2 cores:{4 4},{4 4},{4 4},{4 4}}"}}
  ROOT %y = f32[280,8192]{1,0:T(8,128)} fusion(%whole), kind=kCustom, calls=%all-reduce-scatter, backend_config={"collective_algorithm_config":{"emitter":"SingleInputAllReduceScatterFusion","strategy":"StrategyRing","debug":"\\nStrategyRing{colors:1 phases:1 cores:{4}}"}}
}
"""  # noqa: E501


def test_sums_go_along_several_dimensions_and_may_leave_parts():
  whole, part = found = _hlo_costs.count_compiled(SUMS_PROGRAM).exchanges
  assert (whole.kind, whole.sent, whole.links) == ("all-reduce", 2 * 15 / 16 * 2**25, 2)
  assert (part.kind, part.sent, part.links) == ("reduce-scatter", 3 * 4 * 280 * 8192, 1)
  chip = parse_topology("v5e:4x4").chip
  costs = summarize([], [], found, chip, [types.SimpleNamespace(process_index=0)] * 16, {})
  assert costs.exposed_seconds == pytest.approx((whole.sent / 2 + part.sent) / chip.link)


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
