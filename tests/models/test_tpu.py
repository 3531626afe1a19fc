"""What can be said of TPUs without one: programs compile for them. Runs where `libtpu` is installed."""

import functools
import importlib.metadata
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.layout import Layout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import shape_of
from studies import tpu_splits
from tiny import tiny

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import runtime
from async_rl import sampling
from async_rl.models import _sharding
from experiments.plan._hlo_costs import count_compiled


def test_a_sharded_policy_compiles_for_tpus(tpu_chips):
  mesh = rollout.make_mesh(tpu_chips("v5e:2x2"), fsdp=2, tensor=2)
  config = models.ModelConfig(
    vocab_size=256, d_model=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64, d_ff=128,
    sliding_window=100, global_every=2,
  )  # fmt: skip
  policy = models.Policy(config, mesh=mesh, remat="attention")
  shardings = models.param_shardings(policy.abstract(), mesh)
  params = models.with_shardings(policy.abstract(), shardings)
  rows = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(models.ROWS)))
  loss = lambda p, *x: jnp.mean(models.score(policy, p, *x).logprobs)
  program = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, rows, rows, rows).compile().as_text()
  # Forward, dq and dkv for each kind of layer, and no forward again: remat="attention" kept what it gave.
  assert program.count('custom_call_target="tpu_custom_call"') == 6


BIG_TABLE = models.ModelConfig(
  vocab_size=65_536, d_model=256, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64, d_ff=128,
)  # fmt: skip
TABLE_BYTES = 2 * BIG_TABLE.vocab_size * BIG_TABLE.d_model


#: The oldest libtpu known to hoist gathers of tables; 0.0.42, which came with jax 0.10, does not.
HOISTING_LIBTPU = (0, 0, 52)


@pytest.mark.parametrize(
  "lora", [None, pytest.param(models.LoRA(rank=4), marks=pytest.mark.slow)], ids=["weights", "adapters"]
)
def test_gradients_cross_the_data_axis_once_and_tables_are_gathered_once(tpu_chips, lora):
  """Nothing that is whole is summed, and nothing of a table is gathered in the loop of micro-batches."""
  mesh = rollout.make_mesh(tpu_chips("v5e:2x2"), fsdp=2)
  policy = models.Policy(BIG_TABLE, attention="xla", lora=lora)
  learner = make_learner(shape_of(rows=4, row_tokens=32), mesh, optax.sgd(0.1), policy, head_chunk=32)
  batch = models.with_shardings(learning.pack(make_groups(), learner.shape), learner.batch_shardings)
  found = count_compiled(learner._step.lower(learner.abstract(), batch, None).compile().as_text()).exchanges
  assert not [x for x in found if x.loops and x.joins(0, 2)]
  trained = jax.tree.leaves(models.split_trainable(learner.abstract().params)[0])
  parts = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in trained)
  once = [x for x in found if not x.loops and x.joins(0, 2) and not x.joins(0, 1)]
  planes = 10 * learner.shape.sequences * 128  # four, for the metrics; completions are padded to whole tiles
  assert parts <= sum(x.nbytes for x in once if x.kind == "all-reduce") <= 1.1 * parts + planes
  assert max(x.nbytes for x in found if x.kind == "all-reduce" and x.joins(0, 1)) < TABLE_BYTES // 2
  if tuple(map(int, importlib.metadata.version("libtpu").split(".")[:3])) < HOISTING_LIBTPU:
    return
  gathers = [x for x in found if x.kind == "all-gather" and x.nbytes >= TABLE_BYTES // 2]
  assert [x.loops for x in gathers] == [0]


@pytest.mark.slow
def test_exact_norms_of_packed_rows_exchange_no_gradient(tpu_chips):
  """Only what is as small as a batch is summed beside the gradient itself, and nothing of it in the loops of layers."""
  mesh = rollout.make_mesh(tpu_chips("v5e:2x2"), fsdp=2)
  summed = {}
  for advantages in ("grpo", "opob"):
    objective = learning.objective("sequence_tis", advantages=advantages)
    learner = make_learner(
      shape_of(rows=4, row_tokens=32, row_sequences=3), mesh, optax.sgd(0.1),
      models.Policy(BIG_TABLE, attention="xla"), objective, head_chunk=32, exact_norms="packed",
    )  # fmt: skip
    batch = models.with_shardings(learning.pack(make_groups(), learner.shape), learner.batch_shardings)
    found = count_compiled(learner._step.lower(learner.abstract(), batch, None).compile().as_text()).exchanges
    summed[advantages] = sum(x.nbytes for x in found if x.kind in ("all-reduce", "reduce-scatter"))
  assert summed["grpo"] < summed["opob"] < summed["grpo"] + TABLE_BYTES // 100


@pytest.mark.parametrize(("topology", "exchanges"), [("v5p:2x4x4", 2), ("v6e:4x8", 1)])
def test_sixteen_chips_scatter_the_gradient_of_the_table(tpu_chips, topology, exchanges):
  """Half of a slice: no chip is given all of the gradient, nor do tiles hold less than they can."""
  chips, rows = tpu_chips(topology), PartitionSpec("fsdp")
  mesh = rollout.make_meshes(2, fsdp=16, devices=chips).learner
  policy = models.Policy(BIG_TABLE, mesh=mesh, remat="full")

  def abstract(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

  def gradient(table, hidden, targets):
    loss = lambda table: jnp.sum(models.token_stats(policy, 1.0, 32, hidden, table.T, targets).logprobs)
    return with_layout_constraint(jax.grad(loss)(table), Layout((0, 1)))  # as where it is added to that of look-ups

  width = BIG_TABLE.d_model
  table = abstract((BIG_TABLE.vocab_size, width), jnp.float32, PartitionSpec(None, "fsdp"))
  inputs = abstract((16, 32, width), jnp.bfloat16, rows), abstract((16, 32), jnp.int32, rows)
  program = jax.jit(gradient, out_shardings=table.sharding).lower(table, *inputs).compile()
  sums = [x for x in count_compiled(program.as_text()).exchanges if x.kind in ("all-reduce", "reduce-scatter")]
  assert [x.kind for x in sums] == ["reduce-scatter"] * exchanges
  assert sum(x.sent for x in sums) == 2 * TABLE_BYTES * 15 / 16
  whole = rollout.make_mesh(chips, fsdp=32)  # whose chips sum along all dimensions of the slice at once
  assert _sharding.scatter_groups(whole) == [None]
  assert [_sharding.sums_whole(x) for x in (mesh, whole, rollout.make_mesh(chips, fsdp=16))] == [False, True, False]


@pytest.mark.slow
def test_between_slices_goes_one_sum_of_gradients_a_step_and_nothing_else(tpu_chips):
  """Learners are data parallel over two slices, each of which samples: no push and nothing of sampling crosses."""
  chips = tpu_chips("v5e:2x2", num_slices=2)
  experiment = tiny(mode="async", generation_devices=0, fsdp=4, policy=models.Policy(BIG_TABLE, attention="xla"))
  trace = runtime.trace_run(experiment, chips)
  assert [{chip.slice_index for chip in row.flat} for row in trace.meshes.learner.devices] == [{0}, {1}]
  crossing = {name: exchanges_between_slices(program) for name, program in trace.programs.items()}
  step = crossing.pop("step")
  assert {"stage", "gather", "prefill", "put", "decode"} <= set(crossing)
  assert not any(crossing.values())
  assert {(x.kind, x.loops) for x in step} == {("all-reduce", 0)}
  parameters = runtime.bytes_per_device(trace.programs["stage"].resident)
  assert parameters <= sum(x.nbytes for x in step) <= 1.01 * parameters  # with log-probabilities for the metrics
  # Where the weights themselves lie in both slices, a push has to bring them together.
  spread = tiny(mode="async", generation_devices=0, fsdp=8, policy=experiment.policy)
  stage = exchanges_between_slices(runtime.trace_run(spread, chips).programs["stage"])
  assert {x.kind for x in stage} == {"all-gather"}
  assert sum(x.nbytes for x in stage) == pytest.approx(parameters / 2, rel=0.01)  # of half as many, in two bytes


def exchanges_between_slices(program):
  compiled = program.trace().lower().compile()
  return [x for x in count_compiled(compiled.as_text()).exchanges if x.between_slices]


@pytest.mark.parametrize(
  ("hosts", "generation", "fsdp", "parts"),
  [(1, 4, 4, 1), (2, 2, 4, 2), (2, 2, 2, 1), (2, 1, 2, 1), (2, 1, 3, 1), (2, 1, 6, 2)],
)
def test_learner_chips_stage_their_own_part_of_a_push(tpu_chips, hosts, generation, fsdp, parts):
  """Qwen3-0.6B from one host or two; where one lacks parts, each chip also takes those of a chip of the other."""
  bounds = {"chips_per_host_bounds": (2, 4 // hosts, 1)}
  meshes = rollout.make_meshes(generation, fsdp=fsdp, devices=tpu_chips("v5e:2x4", **bounds))
  policy = models.Policy(models.named("qwen3-0.6b"))
  abstract = models.with_shardings(policy.abstract(), models.param_shardings(policy.abstract(), meshes.learner))
  prepared = jax.eval_shape(functools.partial(sampling.prepare_weights, policy), policy.abstract())
  push = rollout.WeightPush(abstract, policy.dtype, models.param_shardings(prepared, meshes.generation))
  program = push._stage.lower(abstract).compile()
  memory = program.memory_analysis()
  own = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(abstract))
  assert memory.output_size_in_bytes <= 1.01 * parts * 2 * own
  if parts == 1:
    assert memory.temp_size_in_bytes == 0
    assert count_compiled(program.as_text()).exchanges == []


def test_the_checksum_of_a_samplers_weights_reads_them_once(tpu_chips):
  """Nothing is copied, nor widened in memory; one sum of a few numbers joins the chips."""
  mesh = rollout.make_mesh(tpu_chips("v5e:2x2"), tensor=2)
  config = sampling.SamplerConfig(slots=8, group_size=2, max_prompt_tokens=32, max_new_tokens=32, chunk=4)
  programs = sampling.Programs(models.Policy(models.named("qwen3-0.6b")), config, (1,), mesh)
  for name in programs.params:
    program = programs.checksum(name)
    costs, memory = count_compiled(program.as_text()), program.memory_analysis()
    assert sum(x.nbytes * x.times for x in costs.operations) < 1.01 * memory.argument_size_in_bytes
    assert memory.temp_size_in_bytes < 0.1 * memory.argument_size_in_bytes
    assert [x.kind for x in costs.exchanges] == ["all-reduce"]
    assert costs.exchanges[0].nbytes < 100


@pytest.mark.parametrize(
  ("topology", "hosts", "chips", "refusals"),
  [
    ("v5e:2x4 one host", 1, 8, []),
    ("v6e:4x4", 4, 4, ["v6e:4x4, 4 hosts, 3 of 4 chips of every host generate"]),
    ("v5p:2x2x2", 2, 4, []),
  ],
)
def test_the_compiler_accepts_the_splits_of_slices(topology, hosts, chips, refusals):
  """Of more slices, `python tests/studies/tpu_splits.py` shows it."""
  pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")
  outcomes = tpu_splits.outcomes(topology)
  assert len(outcomes) == chips - 1 + hosts - 1
  assert [split for split, outcome in outcomes.items() if outcome == "refused"] == refusals
  assert set(outcomes.values()) <= {"refused", "learns and generates"}
