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
from studies import tpu_splits

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


@pytest.mark.parametrize("topology", ["v5e:2x4 one host", "v6e:4x4", "v5p:2x2x2"])
def test_the_compiler_accepts_the_splits_of_slices(topology):
  """Of more slices, `python tests/studies/tpu_splits.py` shows it."""
  outcomes = tpu_splits.outcomes(topology)
  chips = 8 if "one host" in topology else 4
  assert len(outcomes) == chips - 1
  refused = [split for split, outcome in outcomes.items() if outcome == "refused"]
  assert refused == (["v6e:4x4, 4 hosts, 3 of 4 generate"] if topology == "v6e:4x4" else [])
  assert set(outcomes.values()) <= {"refused", "learns and generates"}
