"""Two processes of four devices each: their meshes, the weights between these, and checkpoints in a bucket."""

import subprocess

from hosts_program import start_processes

PROGRAM = """
import functools, sys
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

from async_rl import models, sampling
from async_rl.recording._checkpoint import Checkpointer
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._weight_store import WeightStore
from async_rl.types import TrainState

# Weights split within a host or over both in the learner, and over this host's devices, or not at all, in the sampler.
config = models.ModelConfig(vocab_size=16, d_model=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=16)
policy = models.Policy(config)
values = jax.device_get(jax.jit(policy.init)(jax.random.key(0)))
expected = jax.jit(functools.partial(sampling.prepare_weights, policy))(values)
put = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
for fsdp, tensor, generation_tensor in ((2, 1, 2), (2, 2, 1), (4, 1, 2)):
  meshes = make_meshes(2, fsdp=fsdp, tensor=tensor, generation_tensor=generation_tensor)
  assert [d.process_index for d in meshes.learner.devices.flat] == [0, 0, 1, 1]
  assert {d.process_index for d in meshes.generation.devices.flat} == {process}
  shardings = models.param_shardings(expected, meshes.generation)
  params = jax.tree.map(put, values, models.param_shardings(values, meshes.learner))
  store = WeightStore(policy, shardings, meshes.learner)
  store.publish(3, params)
  version, got = store.latest()
  assert version == 3
  assert jax.tree.map(lambda x: x.sharding, got) == shardings
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  push = store._trained_push
  for x, pieces in zip(jax.tree.leaves(params), push.stage(params)):
    hosts = 2 if fsdp * tensor == 4 and not x.is_fully_replicated else 1  # that this one lacks blocks of
    assert sum(piece.addressable_shards[0].data.size for piece in pieces) == hosts * x.addressable_shards[0].data.size
  store.close()
state = TrainState(params, (), put(np.int32(3), NamedSharding(meshes.learner, P())))

# Arrays are saved once, host state by each process; in a bucket, where runs of several hosts have their folder.
checkpointer = Checkpointer(folder, keep=1, fingerprint={})
checkpointer.save(3, state, {"process": process, "rows": np.arange(process)})
checkpointer.close()
checkpointer = Checkpointer(folder, keep=1, fingerprint={})
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
restored, hosts = checkpointer.restore(abstract)
assert [host["process"] for host in hosts] == [0, 1]
assert [len(host["rows"]) for host in hosts] == [0, 1]
for shard in restored.params["ends"]["embed"].addressable_shards:
  np.testing.assert_array_equal(shard.data, values["ends"]["embed"][shard.index])
checkpointer.close()
print("done")
"""


def test_two_processes(bucket):
  processes = start_processes(
    lambda i, port: ["-c", PROGRAM, str(i), port, bucket.path("checkpoints")], 2, 4, subprocess.PIPE
  )
  try:
    outputs = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (output, errors) in zip(processes, outputs):
    assert process.returncode == 0, errors
    assert output.endswith("done\n")
