"""Frozen parameters: written once, back on any mesh, and told apart from others by one bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._checkpoint import CheckpointError
from async_rl.recording._frozen import checksum
from async_rl.rollout._mesh import make_mesh
from async_rl.types import TrainState


def place(mesh, tree):
  return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("fsdp") if x.ndim > 1 else P())), tree)


def make_state(mesh, version=0):
  base = {"table": np.arange(32, dtype=np.float32).reshape(8, 4) / 7, "scale": np.ones(8, np.float32)}
  params = {**base, "half": base["table"].astype(jnp.bfloat16), "adapters": {"a": np.full((8, 2), version, np.float32)}}
  return TrainState(place(mesh, params), (), jax.device_put(np.int32(version), NamedSharding(mesh, P())))


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(got, expected):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True), got, expected)


def test_the_base_is_written_once_and_comes_back_on_another_mesh(tmp_path):
  mesh, other = make_mesh(jax.devices(), fsdp=8), make_mesh(jax.devices()[:2], fsdp=2)
  states = [make_state(mesh, version) for version in range(3)]
  checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, fingerprint={})
  checkpointer.save(0, states[0], {})
  checkpointer.wait()
  written = {file: file.stat().st_mtime_ns for file in (tmp_path / "base").rglob("*")}
  checkpointer.save(1, states[1], {})
  checkpointer.close()
  again = Checkpointer(tmp_path / "checkpoints", keep=2, fingerprint={})
  for target in (make_state(mesh), make_state(other)):
    restored, _ = again.restore(abstract(target))
    assert_equal(restored, states[1])
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
  assert_equal(again.restore_params(abstract(states[0]).params, step=0), states[0].params)
  again.save(2, states[2], {})
  again.close()
  assert written == {file: file.stat().st_mtime_ns for file in (tmp_path / "base").rglob("*")}
  saved = (tmp_path / "checkpoints" / "2" / "params" / "_METADATA").read_text()
  assert "adapters" in saved
  assert "table" not in saved


def test_a_damaged_base_is_named(tmp_path):
  state = make_state(make_mesh(jax.devices()[:1]))
  checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1, fingerprint={})
  checkpointer.save(0, state, {})
  checkpointer.wait()
  for file in (tmp_path / "base").rglob("*"):
    if file.is_file():
      file.write_bytes(b"")
  with pytest.raises(CheckpointError, match="of step 0 cannot be read"):
    checkpointer.restore(abstract(state))
  checkpointer.close()


def test_the_checksum_is_of_every_bit_wherever_it_lies():
  tree = jax.device_get(make_state(make_mesh(jax.devices()[:1])).params)
  found = checksum(tree)
  assert checksum(place(make_mesh(jax.devices(), fsdp=8), tree)) == checksum(jax.tree.map(np.copy, tree)) == found
  sign = {**tree, "scale": np.where(np.arange(8) == 3, np.float32(-1), tree["scale"])}
  swapped = {**tree, "table": tree["table"][[1, 0, 2, 3, 4, 5, 6, 7]]}
  turned = {**tree, "table": tree["table"].reshape(4, 8).T}
  last = {**tree, "half": (tree["half"].view(np.uint16) ^ (np.arange(32) == 31).reshape(8, 4)).view(jnp.bfloat16)}
  renamed = {("scales" if name == "scale" else name): x for name, x in tree.items()}
  cast = {**tree, "scale": tree["scale"].astype(jnp.bfloat16)}
  assert len({found, *map(checksum, (sign, swapped, turned, last, renamed, cast))}) == 7
