"""A run that starts from another one's parameters: these alone, once, and from a run of the same model."""

import contextlib
import dataclasses

import jax
import pytest
from runtime_helpers import assert_identical
from runtime_helpers import killed_at
from runtime_helpers import rows
from runtime_helpers import run
from tiny import build
from tiny import tiny

from async_rl import models
from async_rl import recording
from async_rl import runtime

pytestmark = pytest.mark.usefixtures("two_devices")


def make(folder, source=None, **given):
  return tiny(run_dir=str(folder), steps=2, init_from=source and str(source), **given)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """The folder of a run of three steps with a checkpoint of each."""
  folder = tmp_path_factory.mktemp("runs") / "source"
  runtime.train(tiny(run_dir=str(folder), steps=3, checkpoint_every=1))
  return folder


def state_at(step, folder, experiment):
  """The state of a run's checkpoint, and a new one."""
  learner = experiment.make_learner(experiment.make_meshes().learner)
  with contextlib.closing(experiment.make_checkpointer(folder / "checkpoints", read_only=True)) as checkpoints:
    state, _ = checkpoints.restore(learner.abstract(), step)
  return jax.device_get(state), jax.device_get(learner.init(jax.random.key(0)))


def test_a_run_starts_from_the_parameters_of_another_and_from_nothing_else_of_it(tmp_path, source, capsys):
  experiment = make(tmp_path / "new", source, start=lambda run: pytest.fail("the start of the config is not used"))
  summary = runtime.train(experiment)
  assert f"starting from the parameters of step 3 of {source}" in capsys.readouterr().out
  ended, _ = state_at(3, source, experiment)
  begun, fresh = state_at(0, tmp_path / "new", experiment)
  assert_identical(begun.params, ended.params)
  assert_identical(begun.opt_state, fresh.opt_state)
  assert begun.version == 0
  assert [row["step"] for row in rows(summary)] == [1, 2]


def test_the_other_run_is_not_needed_on_a_resume(tmp_path, source):
  moved = tmp_path / "moved"
  other = tmp_path / "other"
  runtime.train(tiny(run_dir=str(other), steps=1, seed=3))
  whole, state, _ = run(make(tmp_path / "whole", other))
  with killed_at(1):
    runtime.train(make(tmp_path / "killed", other, checkpoint_every=1))
  other.rename(moved)
  resumed, again, _ = run(make(tmp_path / "killed", other))
  assert_identical(state, again)
  assert [row["reward/mean"] for row in rows(resumed)] == [row["reward/mean"] for row in rows(whole)]
  with pytest.raises(recording.RunFolderError, match=r"holds another run \(init_from: '.*other' -> '.*source'\)"):
    runtime.train(make(tmp_path / "killed", source))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, source, capsys):
  experiment = make(tmp_path / "new", tmp_path / "damaged")
  runtime.train(tiny(run_dir=str(tmp_path / "damaged"), steps=2, checkpoint_every=1))
  before, _ = state_at(1, tmp_path / "damaged", experiment)
  for file in (tmp_path / "damaged" / "checkpoints" / "2" / "params").rglob("*"):
    if file.is_file():
      file.write_bytes(file.read_bytes()[:10])
  runtime.train(experiment)
  printed = capsys.readouterr().out
  assert f"damaged: the checkpoint in {tmp_path / 'damaged' / 'checkpoints'} of step 2 cannot be read" in printed
  assert "starting from the parameters of step 1 of " in printed
  assert_identical(state_at(0, tmp_path / "new", experiment)[0].params, before.params)


def wider(options):
  """The tiny experiment with another architecture."""
  experiment = build(options)
  config = dataclasses.replace(experiment.policy.config, d_ff=64)
  return dataclasses.replace(experiment, policy=dataclasses.replace(experiment.policy, config=config))


def with_adapters(options):
  experiment = build(options)
  return dataclasses.replace(experiment, policy=dataclasses.replace(experiment.policy, lora=models.LoRA(2)))


def test_what_a_run_cannot_start_from_is_one_sentence_and_leaves_no_folder(tmp_path, source):
  (tmp_path / "files").mkdir()
  recording.RunFolder.open(tmp_path / "begun", "text", {}).close()
  for given, kind, message in [
    ({"source": tmp_path / "nowhere"}, recording.RunFolderError, "nowhere holds no run: there is no such folder; give"),
    ({"source": tmp_path / "files"}, recording.RunFolderError, "files holds no run: run.json is missing; give"),
    ({"source": tmp_path / "begun"}, recording.RunFolderError, "the run in .*begun has no checkpoint yet"),
    ({"source": source, "build": wider}, recording.CheckpointError, r"cannot start from .*model\.d_ff: 32 -> 64"),
    ({"source": source, "build": with_adapters}, recording.CheckpointError, "cannot start from .*lora: None -> "),
  ]:
    with pytest.raises(kind, match=message):
      runtime.train(make(tmp_path / "new", **given))
    assert not (tmp_path / "new").exists()


def test_a_run_does_not_start_from_its_own_folder_which_it_would_delete(source):
  for folder in (source, source / "checkpoints"):
    with pytest.raises(ValueError, match=r"\*init_from\* must be of another folder than run_dir, got init_from="):
      make(source, folder, overwrite=True)
  with pytest.raises(ValueError, match="must name the folder of a run"):
    runtime.Training(init_from="")
  assert (source / "checkpoints" / "3").exists()
