"""A finished run is evaluated and exported where there are fewer devices than it was trained on, or more."""

import json
import shutil

import jax
import pytest
import tiny

from experiments import evaluate
from experiments import export
from experiments import train
from experiments._runs import load_experiment

pytestmark = pytest.mark.usefixtures("four_devices")


def find(monkeypatch, count):
  """Lets only so many of the devices be found."""
  devices = jax.devices()[:count]
  for name in ("devices", "local_devices"):
    monkeypatch.setattr(jax, name, lambda *args, **options: devices)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The folder of a run in which two devices sampled and two learned, with parameters split in two."""
  folder = str(tmp_path_factory.mktemp("other") / "run")
  split = ["--generation-devices", "2", "--fsdp", "2", "--mode", "async", "--rows", "2", "--row-tokens", "24"]
  assert train.main([tiny.__file__, "--run-dir", folder, *split, "--steps", "1", "--no-picture"]) == 0
  return folder


def test_one_device_evaluates_and_exports_what_four_trained(folder, monkeypatch, capsys, tmp_path):
  assert evaluate.main([folder, "--prompts", "8"]) == 0
  expected = capsys.readouterr().out
  assert "avg@1    0." in expected
  assert export.main([folder, str(tmp_path / "four"), "--dtype", "float32"]) == 0
  find(monkeypatch, 1)
  capsys.readouterr()
  assert evaluate.main([folder, "--prompts", "8"]) == 0
  assert capsys.readouterr().out == expected
  assert export.main([folder, str(tmp_path / "one"), "--dtype", "float32"]) == 0
  one, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "four"))
  assert one == four


def rewrite_options(folder, **options):
  """Changes options that a run was recorded with."""
  file = folder / "config.txt"
  file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.mark.parametrize(
  ("recorded", "count", "learner", "generation"),
  [
    ({"generation_devices": 2, "fsdp": 2}, 4, (1, 2, 1), (2, 1, 1)),  # the run's own
    ({"generation_devices": 2, "fsdp": 2}, 2, (1, 2, 1), (2, 1, 1)),
    ({"generation_devices": 2, "fsdp": 2}, 1, (1, 1, 1), (1, 1, 1)),
    ({"generation_devices": 0, "fsdp": 8}, 4, (1, 4, 1), (4, 1, 1)),
    ({"fsdp": 8, "tensor": 2}, 4, (1, 2, 2), (2, 1, 2)),
    ({"fsdp": 2, "tensor": 2, "generation_tensor": 8}, 3, (3, 1, 1), (3, 1, 1)),
    ({"generation_devices": 4, "tensor": 4, "generation_tensor": 2}, 2, (1, 1, 2), (1, 1, 2)),
    ({"generation_devices": 4, "fsdp": 4, "max_lag": 0}, 4, (1, 2, 1), (2, 1, 1)),  # which may not share devices
    ({"generation_devices": 4, "fsdp": 4, "mode": "sync"}, 2, (1, 2, 1), (2, 1, 1)),
    ({"rows": 1}, 4, (2, 1, 1), (2, 1, 1)),
  ],
  ids=str,
)
def test_meshes_fit_the_devices_that_are_here(folder, tmp_path, monkeypatch, recorded, count, learner, generation):
  shutil.copy(f"{folder}/config.txt", tmp_path)
  rewrite_options(tmp_path, **{"generation_devices": None, "fsdp": 1} | recorded)
  find(monkeypatch, count)
  experiment = load_experiment(tmp_path)
  meshes = experiment.make_meshes()
  assert tuple(meshes.learner.shape.values()) == learner
  assert tuple(meshes.generation.shape.values()) == generation
  experiment.make_learner(meshes.learner)  # whose rows must be a multiple


def test_slots_fit_the_devices_that_are_here(folder, tmp_path, capsys):
  """Three devices sample five sequences of a prompt in eight slots, of which no device can have a third."""
  shutil.copytree(folder, tmp_path / "run")
  rewrite_options(tmp_path / "run", generation_devices=3, fsdp=1)
  assert evaluate.main([str(tmp_path / "run"), "--prompts", "2", "--samples", "5"]) == 0
  assert "avg@5" in capsys.readouterr().out


def test_other_lengths_need_no_other_rows(folder, capsys):
  """The run's rows have 24 tokens, those of its longest prompt and completion."""
  for name, value in (("completion", "20"), ("prompt", "12")):
    assert evaluate.main([folder, "--prompts", "2", f"--max-{name}-tokens", value]) == 0
    assert "avg@1" in capsys.readouterr().out
