"""Checkpoints restore equal, onto any mesh; whatever is wrong with one is said in one sentence."""

import contextlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from async_rl import stabilizers
from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._checkpoint import CheckpointError
from async_rl.recording._checkpoint import DamagedCheckpointError
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._mesh import make_mesh
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request
from async_rl.types import TrainState

MODEL = {"width": 8, "layers": {"count": 2}}
MASK = {"layers": [True, True], "scale": False}
OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.adamw(1e-2, weight_decay=0.1, mask=MASK),
  stabilizers.scale_by_ess(),
)


@jax.jit
def update(state):
  grads = jax.tree.map(lambda p: jnp.sin(p) + state.version, state.params)
  log_weights = jnp.linspace(0, 1, 4) * state.version
  updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params, log_weights=log_weights)
  return TrainState(optax.apply_updates(state.params, updates), opt_state, state.version + 1)


def make_state(mesh, width=8):
  params = {
    "layers": [np.linspace(-1, 1, width * 4, dtype=np.float32).reshape(width, 4) + i for i in range(2)],
    "scale": np.arange(width, dtype=ml_dtypes.bfloat16),
  }
  sharded = lambda x: NamedSharding(mesh, P("fsdp") if x.ndim > 1 else P())
  params = jax.tree.map(lambda x: jax.device_put(x, sharded(x)), params)
  opt_state = jax.tree.map(lambda x: jax.device_put(x, sharded(x)), OPTIMIZER.init(params))
  return TrainState(params, opt_state, jax.device_put(np.int32(0), NamedSharding(mesh, P())))


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True), got, expected)


@pytest.fixture
def mesh():
  return make_mesh(jax.devices(), fsdp=4, tensor=2)


@pytest.fixture
def saved(tmp_path, mesh):
  """A folder with the checkpoint of step 2, and the state that is in it."""
  state = update(update(make_state(mesh)))
  checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, fingerprint=MODEL)
  checkpointer.save(2, state, {"seed": 1})
  checkpointer.close()
  return tmp_path / "checkpoints", state


def test_goes_on_as_if_uninterrupted_on_another_mesh(saved):
  folder, state = saved
  mesh = make_mesh(jax.devices()[:2], fsdp=2)
  target = abstract(make_state(mesh))
  checkpointer = Checkpointer(folder, keep=2, fingerprint=MODEL)
  assert checkpointer.latest_step == 2
  restored, (host,) = checkpointer.restore(target)
  assert host == {"seed": 1}
  assert_equal(restored, state)
  assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
  restored, state = update(restored), update(state)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-6), restored, state)
  assert_equal(checkpointer.restore_params(target.params), saved[1].params)
  checkpointer.close()


def test_host_state_restores_equal(tmp_path, mesh):
  prompts = [Prompt(i, f"prompt {i}", None) for i in range(4)]
  buffer = RolloutBuffer(groups_per_step=1, max_lag=2)
  for ticket in range(3):
    assert buffer.try_submit(0) == ticket
  tokens = np.arange(5, dtype=np.int32)
  completion = Completion(1, 0, tokens, -tokens / 7, tokens * 0, tokens < 3, STOP)
  buffer.add_group(Group(Request(1, tokens[:2], prompts[1]), (completion,), np.float32([0.5]), 1))
  ledger = Ledger()
  ledger.add_generated(7)
  host = {
    "buffer": buffer.state(),
    "ledger": ledger.state(),
    "cache": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
    "empty": np.zeros((0, 3), np.int64),
    "flags": np.asarray([True, False]),
    "scalar": np.asarray(2.5),
    "plain": [1, 2.5, "text", None, True, {"deep": [np.arange(2)]}, 2**70],
  }
  checkpointer = Checkpointer(tmp_path, keep=1, fingerprint=MODEL)
  checkpointer.save(0, make_state(mesh), host)
  _, (restored,) = checkpointer.restore(abstract(make_state(mesh)))
  checkpointer.close()
  assert_equal(restored, host)
  again = RolloutBuffer(groups_per_step=1, max_lag=2)
  again.restore(restored["buffer"], prompts)
  assert_equal(again.state(), buffer.state())
  assert again.groups()[0].request.prompt == prompts[1]


def test_state_may_be_donated_while_it_is_saved(tmp_path, mesh):
  state = make_state(mesh)
  expected = jax.device_get(state)
  checkpointer = Checkpointer(tmp_path, keep=1, fingerprint=MODEL)
  checkpointer.save(0, state, {})
  jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)(state)
  checkpointer.wait()
  restored, _ = checkpointer.restore(abstract(make_state(mesh)))
  assert_equal(restored, expected)
  checkpointer.close()


def test_keeps_the_newest_and_saves_a_step_once(tmp_path, mesh):
  checkpointer = Checkpointer(tmp_path, keep=2, fingerprint=MODEL)
  state = make_state(mesh)
  for step in (1, 2, 3, 3):
    checkpointer.save(step, state, {"step": step})
  checkpointer.save(3, state, {"step": "again"})
  checkpointer.wait()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
  assert checkpointer.restore(abstract(state))[1] == [{"step": 3}]
  assert checkpointer.restore(abstract(state), step=2)[1] == [{"step": 2}]
  with pytest.raises(CheckpointError, match=r"has no checkpoint of step 1; it has those of \[3, 2\]"):
    checkpointer.restore(abstract(state), step=1)
  checkpointer.close()


def test_no_checkpoint(tmp_path, mesh):
  checkpointer = Checkpointer(tmp_path / "new", keep=1, fingerprint=MODEL)
  assert checkpointer.latest_step is None
  with pytest.raises(CheckpointError, match=r"has no checkpoint$"):
    checkpointer.restore(abstract(make_state(mesh)))
  checkpointer.close()


def test_a_folder_that_is_deleted_between_two_saves_is_made_again(tmp_path, mesh):
  state = make_state(mesh)
  checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", keep=2, fingerprint=MODEL)
  for step in (1, 2):
    checkpointer.save(step, state, {"step": step})
    checkpointer.wait()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
  for step in (3, 4, 5):
    checkpointer.save(step, state, {"step": step})
  checkpointer.wait()
  assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "5"]
  assert checkpointer.restore(abstract(state))[1] == [{"step": 5}]
  (tmp_path / "run").rename(tmp_path / "moved")
  with pytest.raises(
    CheckpointError, match="of step 6 is not written, because .*run was moved or deleted: put it back"
  ):
    checkpointer.save(6, state, {"step": 6})
  assert not (tmp_path / "run").exists()
  (tmp_path / "moved").rename(tmp_path / "run")
  checkpointer.save(6, state, {"step": 6})
  checkpointer.close()
  assert (tmp_path / "run" / "checkpoints" / "6").exists()


def test_reading_makes_no_folder(tmp_path):
  with pytest.raises(CheckpointError, match="new has no checkpoint$"):
    Checkpointer(tmp_path / "new", keep=1, fingerprint=MODEL, read_only=True)
  assert not (tmp_path / "new").exists()


def test_checkpoint_of_another_model_is_refused(saved, mesh):
  folder, state = saved
  other = Checkpointer(folder, keep=2, fingerprint={"width": 16, "layers": {"count": 2}, "bias": True})
  with pytest.raises(
    CheckpointError, match=r"is of another model or optimizer \(width: 8 -> 16; bias: None -> True\): use the config"
  ):
    other.restore(abstract(state))
  same = Checkpointer(folder, keep=2, fingerprint=MODEL)
  with pytest.raises(CheckpointError, match=r"\(layers/0: 'float32\[8, 4\]' -> 'float32\[16, 4\]'; .*; scale"):
    same.restore(abstract(make_state(mesh, width=16)))
  with pytest.raises(CheckpointError, match=r"opt_state/1/0/mu/layers/0: 'float32\[8, 4\]' -> None.*; and \d+ more"):
    same.restore(abstract(state._replace(opt_state=optax.sgd(1e-2).init(state.params))))
  other.close()
  same.close()


def test_damaged_checkpoint_is_named(saved, mesh):
  folder, state = saved
  (folder / "2/host/process_0.npz").write_bytes(b"no archive")
  checkpointer = Checkpointer(folder, keep=2, fingerprint=MODEL)
  with pytest.raises(DamagedCheckpointError, match=r"of step 2 cannot be read: .*; use another checkpoint"):
    checkpointer.restore(abstract(state))
  checkpointer.close()


def test_a_checkpoint_of_more_processes_gives_the_host_trees_of_all(saved):
  folder, state = saved
  shutil.copy(folder / "2/host/process_0.npz", folder / "2/host/process_1.npz")
  with contextlib.closing(Checkpointer(folder, keep=2, fingerprint=MODEL)) as checkpointer:
    restored, hosts = checkpointer.restore(abstract(state))
    assert_equal(restored.params, state.params)
    assert hosts == [{"seed": 1}, {"seed": 1}]


def test_reading_leaves_a_save_in_progress_alone(saved):
  folder, state = saved
  unfinished = folder / "5.orbax-checkpoint-tmp-1"
  unfinished.mkdir()
  Checkpointer(folder, keep=1, fingerprint=MODEL, read_only=True).close()
  assert unfinished.exists()
  checkpointer = Checkpointer(folder, keep=1, fingerprint=MODEL)
  checkpointer.save(6, state, {})  # waits for the removal
  checkpointer.close()
  assert not unfinished.exists()


def test_parameters_that_are_not_finite_are_never_saved(saved):
  folder, state = saved
  checkpointer = Checkpointer(folder, keep=1, fingerprint=MODEL)
  for bad in (np.nan, np.inf):
    params = state.params | {"scale": state.params["scale"].at[3].set(bad)}
    with pytest.raises(CheckpointError, match=r"of step 3 is not written .* not finite; the newest good one: 2"):
      checkpointer.save(3, state._replace(params=params), {})
  assert checkpointer.latest_step == 2
  assert_equal(checkpointer.restore(abstract(state))[0], state)
  checkpointer.close()


def truncate_files(folder):
  """Cuts off the second half of each file, as a full disk or a power cut may leave them."""
  for file in (path for path in folder.rglob("*") if path.is_file()):
    with file.open("r+b") as content:
      content.truncate(file.stat().st_size // 2)


@pytest.mark.parametrize("part", ["params", "optimizer", "host", "meta"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_set_aside(saved, part):
  folder, state = saved
  checkpointer = Checkpointer(folder, keep=3, fingerprint=MODEL)
  checkpointer.save(4, update(state), {"seed": 4})
  checkpointer.close()
  truncate_files(folder / "4" / part)
  checkpointer = Checkpointer(folder, keep=3, fingerprint=MODEL)
  with pytest.raises(DamagedCheckpointError, match="of step 4 cannot be read"):
    checkpointer.restore(abstract(state), step=4)
  restored, (host,) = checkpointer.restore(abstract(state))
  assert_equal(restored, state)
  assert host == {"seed": 1}
  assert checkpointer.restored_step == 2
  assert list(checkpointer.skipped) == [4]
  assert f"the checkpoint in {folder} of step 4 cannot be read" in checkpointer.skipped[4]
  checkpointer.set_aside_skipped()
  assert checkpointer.latest_step == 2
  assert (folder.parent / "damaged" / "4").is_dir()
  checkpointer.save(4, state, {"seed": "again"})
  checkpointer.wait()
  assert checkpointer.restore(abstract(state))[1] == [{"seed": "again"}]
  assert checkpointer.skipped == {}
  checkpointer.close()


def test_unwritable_folder(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(CheckpointError, match=r"file/checkpoints cannot be written: .*; free some space or choose"):
    Checkpointer(tmp_path / "file" / "checkpoints", keep=1, fingerprint=MODEL)


FAILING_WRITES = """
import resource, sys
import numpy as np
from async_rl.recording import Checkpointer
from async_rl.recording import CheckpointError
from async_rl.types import TrainState

folder = sys.argv[1]
noise = np.random.default_rng(0).normal(size=5000)
for limit in (10, 3000, 30_000):  # Orbax's own files, the host file, an array
  checkpointer = Checkpointer(folder, keep=1, fingerprint={})
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
  try:
    checkpointer.save(limit, TrainState({"noise": noise}, (), np.int32(0)), {"noise": noise[:2000]})
    checkpointer.wait()
  except CheckpointError as error:
    print(limit, error)
  resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_failed_write_is_reported_and_loses_nothing(saved):
  """A limit on the size of files stands in for a full disk; in another process, as Orbax complains in its threads."""
  folder, state = saved
  command = [sys.executable, "-c", FAILING_WRITES, str(folder)]
  run = subprocess.run(command, capture_output=True, text=True, check=True)
  lines = run.stdout.splitlines()
  assert [int(line.split()[0]) for line in lines] == [10, 3000, 30_000]
  for line in lines:
    assert f"the checkpoint in {folder} cannot be written" in line
    assert "File too large" in line
    assert line.endswith("; free some space or choose another folder")
  checkpointer = Checkpointer(folder, keep=2, fingerprint=MODEL)
  assert_equal(checkpointer.restore(abstract(state))[0], state)
  checkpointer.save(3, state, {})
  checkpointer.close()
  assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


def test_full_disk_is_noticed_before_writing(saved, monkeypatch):
  folder, state = saved
  checkpointer = Checkpointer(folder, keep=1, fingerprint=MODEL)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
  with pytest.raises(CheckpointError, match=r"step 3 needs .* GB, but .* has 0 GB free; free some space or choose"):
    checkpointer.save(3, state, {})
  assert checkpointer.latest_step == 2
  checkpointer.close()
