"""What can be said of TPUs without one: programs compile for them. Runs where `libtpu` is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import models

pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")


@pytest.fixture
def no_compilation_cache():
  """Programs for absent devices can be written to the cache but not read back."""
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.usefixtures("no_compilation_cache")
def test_a_sharded_policy_compiles_for_tpus(monkeypatch):
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no cloud machine's metadata server to ask
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it only compiles, so that others may do so, too
  topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
  axes = {"axis_names": ("data", "fsdp", "tensor"), "axis_types": (AxisType.Auto,) * 3}
  mesh = Mesh(np.array(topology.devices).reshape(1, 2, 2), **axes)
  config = models.ModelConfig(
    vocab_size=256, d_model=128, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=64, d_ff=128,
    sliding_window=100, global_every=2,
  )  # fmt: skip
  policy = models.Policy(config, mesh=mesh, remat="attention")
  shardings = models.param_shardings(policy.abstract(), mesh)
  abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  params = jax.tree.map(abstract, policy.abstract(), shardings)
  rows = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(models.ROWS)))
  loss = lambda p, *x: jnp.mean(models.score(policy, p, *x).logprobs)
  program = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, rows, rows, rows).compile().as_text()
  # Forward, dq and dkv for each kind of layer, and no forward again: remat="attention" kept what it gave.
  assert program.count('custom_call_target="tpu_custom_call"') == 6
