"""Two processes of four devices each: every host its own generation mesh, one learner mesh over both."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import pathlib, sys
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

process, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

from async_rl.recording._checkpoint import Checkpointer
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._weight_store import WeightStore
from async_rl.types import TrainState

meshes = make_meshes(2, fsdp=2, tensor=1)
assert [d.process_index for d in meshes.learner.devices.flat] == [0, 0, 1, 1]
assert {d.process_index for d in meshes.generation.devices.flat} == {process}

# Split over both hosts in the learner, and over this host's devices, or not at all, in the sampler.
values = np.arange(24, dtype=np.float32).reshape(4, 6)
put = lambda mesh, x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
state = TrainState({"w": put(meshes.learner, values, P(("data", "fsdp")))}, (), put(meshes.learner, np.int32(3), P()))
for generation, spec in ((make_meshes(2, tensor=2).generation, P(None, "tensor")), (meshes.generation, P())):
  store = WeightStore(lambda p: {"w": p["w"] * 2}, {"w": NamedSharding(generation, spec)}, meshes.learner)
  store.publish(3, state.params)
  version, params = store.latest()
  assert version == 3
  assert params["w"].sharding == NamedSharding(generation, spec)
  np.testing.assert_array_equal(params["w"], values * 2)
  store.close()

# Arrays are saved once, host state by each process.
checkpointer = Checkpointer(folder, keep=1, fingerprint={})
checkpointer.save(3, state, {"process": process, "rows": np.arange(process)})
checkpointer.wait()
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
restored, host = checkpointer.restore(abstract)
assert host["process"] == process
assert len(host["rows"]) == process
for shard in restored.params["w"].addressable_shards:
  np.testing.assert_array_equal(shard.data, values[shard.index])
checkpointer.close()
print("done")
"""


def test_two_processes(tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
  environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", PROGRAM, str(i), port, str(tmp_path / "checkpoints")],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    outputs = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (output, errors) in zip(processes, outputs):
    assert process.returncode == 0, errors
    assert output.endswith("done\n")
