"""The benchmark of this project beside other systems; needs none of them."""

import dataclasses
import json

import pytest

from async_rl.models import ModelConfig
from experiments.benchmarks.peers import __main__ as command
from experiments.benchmarks.peers import _ours
from experiments.benchmarks.peers._turns import System
from experiments.benchmarks.peers._turns import summarize
from experiments.benchmarks.peers._turns import take_turns
from experiments.benchmarks.peers._work import PARTS
from experiments.benchmarks.peers._work import SHAPES

CONFIG = ModelConfig(
  vocab_size=24, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32, tie_embeddings=True,
  qk_norm=True,
)  # fmt: skip
WORK = dataclasses.replace(SHAPES["tiny"], config=CONFIG)

#: Systems that stand for others: one that works, and four that do not.
SYSTEMS = {
  "works": "def generation(work): return lambda: None",
  "raises": "def generation(work): raise ValueError('no such attention')",
  "dies": "import os\ndef generation(work): os._exit(3)",
  "tires": "turns = []\ndef generation(work): return lambda: turns.append(1) or 1 / (len(turns) < 4)",
  "hangs": "import time\ndef generation(work): return lambda: time.sleep(600)",
}


@pytest.fixture
def systems(tmp_path, monkeypatch):
  """The systems, by name."""
  monkeypatch.syspath_prepend(tmp_path)
  for name, text in SYSTEMS.items():
    (tmp_path / f"system_that_{name}.py").write_text(f"def describe(): return {{'device': 'none'}}\n{text}\n")
  return {name: System(name, f"system_that_{name}") for name in SYSTEMS}


def test_who_has_no_result_is_named_with_the_reason(systems):
  hangs = systems.pop("hangs")
  systems["missing"] = System("missing", "system_that_works", ("json", "not_a_package"))
  rows = take_turns(list(systems.values()), "generation", None, repeats=2, limit=120)
  assert list(rows) == ["works", "raises", "dies", "tires", "missing"]
  assert rows["works"].keys() == {"device", "start_s", "first_s", "seconds", "cpu_seconds"}
  assert [len(rows[name]["seconds"]) for name in ("works", "tires")] == [2, 1]
  assert len(rows["works"]["cpu_seconds"]) == 2
  assert {name: row["failed"] for name, row in rows.items() if "failed" in row} == {
    "raises": "ValueError: no such attention",
    "dies": "the process ended with status 3",
    "tires": "ZeroDivisionError: division by zero",
    "missing": "not installed: not_a_package",
  }
  assert take_turns([hangs], "generation", None, repeats=2, limit=0.5) == {
    "hangs": {"failed": "no answer within 0.5 s"}
  }


def test_ratios_are_those_of_the_same_round():
  rows = {
    "ours": {"seconds": [1.0, 2.0, 4.0], "cpu_seconds": [1.0, 1.0, 1.0]},
    "slower": {"seconds": [3.0, 4.0, 16.0], "cpu_seconds": [2.0, 3.0, 2.5]},
    "broken": {"seconds": [1.0], "failed": "out of memory"},
  }
  result = summarize(rows, tokens=30, reference="ours")
  assert result["ours"]["times_reference"] == [1.0, 1.0, 1.0]
  assert result["slower"]["times_reference"] == [3.0, 2.0, 4.0]
  assert result["slower"]["cpu_times_reference"] == [2.5, 2.0, 3.0]
  assert result["slower"]["range_s"] == [3.0, 16.0]
  assert result["slower"]["tokens_per_s"] == 7.5
  assert result["broken"] == rows["broken"]
  del rows["ours"]
  assert "times_reference" not in summarize(rows, tokens=30, reference="ours")["slower"]


def test_the_command_writes_what_every_system_did(tmp_path, monkeypatch):
  asked = []

  def take_turns(systems, part, work, repeats, limit):
    asked.append((part, work.sequences, work.micro_batch, repeats, limit))
    reason = {"failed": f"not installed: {systems[1].missing()[0]}"}
    return {systems[0].name: {"seconds": [1.0, 2.0], "cpu_seconds": [1.0, 1.0]}, systems[1].name: reason}

  monkeypatch.setattr(command, "take_turns", take_turns)
  monkeypatch.setitem(command.SYSTEMS, "tunix", System("tunix", "unused", ("not_a_package",)))
  out = tmp_path / "peers.json"
  options = ["--micro-batch", "2", "--repeats", "2", "--limit", "3", "--out", str(out)]
  command.main(["--shape", "tiny", "--systems", "ours", "tunix", *options])
  assert asked == [(part, 8, 2, 2, 3.0) for part in PARTS]
  result = json.loads(out.read_text())
  for part, tokens in zip(PARTS, (8 * 8, 8 * 16)):
    assert result[part]["ours"]["times_reference"] == [1.0, 1.0, 1.0]
    assert result[part]["ours"]["tokens_per_s"] == pytest.approx(tokens / 1.5, abs=0.05)
    assert result[part]["tunix"] == {"failed": "not installed: not_a_package"}
  assert (result["shape"], result["work"]["micro_batch"]) == ("tiny", 2)


@pytest.mark.parametrize("part", PARTS)
def test_this_project_does_its_part(part, monkeypatch):
  generated = []
  monkeypatch.setattr(type(WORK), "check_generated", lambda self, lengths: generated.append(list(lengths)))
  run = getattr(_ours, part)(WORK)
  run()
  run()
  assert generated == ([[8] * 8] * 2 if part == "generation" else [])


def test_generation_is_checked():
  WORK.check_generated([8] * 8)
  with pytest.raises(RuntimeError, match="in place of 8 in each of 8"):
    WORK.check_generated([8] * 7 + [5])


def test_work_that_does_not_divide_is_refused():
  with pytest.raises(ValueError, match="sequences must be a multiple of 8, got sequences=12"):
    dataclasses.replace(WORK, sequences=12)


@pytest.mark.slow
def test_the_command_measures_this_project(tmp_path):
  out = tmp_path / "peers.json"
  command.main(["--shape", "tiny", "--systems", "ours", "--repeats", "2", "--out", str(out)])
  result = json.loads(out.read_text())
  for part in PARTS:
    assert 0 < result[part]["ours"]["median_s"] <= result[part]["ours"]["range_s"][1]
