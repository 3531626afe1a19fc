"""The benchmark of weight pushes measures what it says."""

import json

import pytest

from experiments.benchmarks import weight_push


def test_each_split_is_measured(tmp_path):
  result = weight_push.main(["--smoke", "--repeats", "1", "--out", str(tmp_path / "out.json")])
  assert json.loads((tmp_path / "out.json").read_text()) == result
  assert len(result["rows"]) == 3
  assert len({row["bytes"] for row in result["rows"]}) == 1  # as many however the devices are split
  for row in result["rows"]:
    assert row["push"] > 0
    assert row["ratio"] == pytest.approx(row["push_rate"] / row["plain_rate"])


def test_every_split_divides_its_devices():
  for split in weight_push.splits_of(8):
    meshes = split.meshes()
    assert meshes.learner.size == split.devices - split.generation
    assert meshes.generation.size == (split.generation or split.devices)
