"""The benchmark of growth: costs by the plan, what it plots of them, and that it measures."""

import dataclasses
import json

from experiments.benchmarks import growth
from experiments.plan import _measure
from experiments.plan import _plan


def test_costs_are_planned_and_plotted(monkeypatch, tmp_path):
  """Two points of two layers, counted in this process; weights that are read for more slots cost less of a token."""

  def measure_all(request, limit):
    head, *results = _measure.messages(dataclasses.replace(request, layers=2), ())
    return head, {x["program"]: x for x in results}

  monkeypatch.setattr(_plan, "measure_all", measure_all)
  monkeypatch.setattr(growth, "SWEEPS", {"slots": (16, 256), "model": ("smollm2-135m",)})
  out = tmp_path / "growth.json"
  growth.main(["--topologies", "h200:2", "--only", "slots", "--out", str(out)])
  result = json.loads(out.read_text())
  few, many = result["rows"]
  assert (few["slots"], many["slots"], few["on"]) == (16, 256, "h200:2")
  assert few["learner_us"] == many["learner_us"]
  assert few["generation_us"] > 4 * many["generation_us"]
  assert result["shapes"]["smollm2-135m"] == {
    "parameters": 134_515_008,
    "state": 16 * 134_515_008,
    "cache_per_token": 30 * 2 * 3 * 64 * 2,
  }
  assert out.with_suffix(".png").stat().st_size > 10_000


def test_decodes_with_as_many_slots_as_fit():
  """256 slots of 4,096 tokens have a cache of 112 GiB: 64 of them take three fifths of 80 GiB at most, 128 of 139."""
  config = growth.models.named("qwen3-0.6b")
  point = growth.Point(length=4096)
  assert [growth.fitting_slots(point, config, gib * 2**30) for gib in (80, 139, 200)] == [64, 128, 256]


def test_rows_of_a_command_that_was_cut_off_are_kept(monkeypatch, tmp_path):
  """Two of three rows are there: the third takes the learner's cost from them, which does not depend on the slots."""
  monkeypatch.setattr(growth, "SWEEPS", {"slots": (16, 64), "model": ("qwen3-0.6b",)})
  monkeypatch.setattr(growth, "_measure_learner", lambda *_: 3.0)
  monkeypatch.setattr(growth, "_measure_generation", lambda point, *_: 100 / point.slots)
  monkeypatch.setattr(growth, "chip_of", lambda _: growth.parse_topology("h200:2").chip)
  out = tmp_path / "growth.json"
  growth.main(["--measure", "--only", "slots", "--out", str(out)])
  before = json.loads(out.read_text())["rows"]
  monkeypatch.setattr(growth, "_measure_learner", None)  # would fail
  growth.main(["--measure", "--out", str(out)])
  rows = json.loads(out.read_text())["rows"]
  assert rows[:2] == before
  assert [(row["learner_us"], row["generation_us"]) for row in rows] == [(3.0, 6.25), (3.0, 1.562), (3.0, 0.391)]


def test_rows_of_tiny_sizes_are_not_taken_for_measurements(monkeypatch, tmp_path):
  monkeypatch.setattr(growth, "SWEEPS", {"slots": (16,), "model": ("qwen3-0.6b",)})
  monkeypatch.setattr(growth, "plot", lambda *_: None)
  monkeypatch.setattr(growth, "_measured", lambda point, smoke, others: {"learner_us": 1.0, "others": len(others)})
  out = tmp_path / "growth.json"
  for options in (["--smoke"], []):
    growth.main(["--measure", *options, "--only", "slots", "--out", str(out)])
  tiny, measured = json.loads(out.read_text())["rows"]
  assert tiny["on"] == f"{measured['on']}, tiny"
  assert measured["others"] == 0


def test_costs_are_measured_on_the_device_at_hand(tmp_path, monkeypatch):
  monkeypatch.setattr(growth, "SWEEPS", {"group": (4, 64), "model": ("qwen3-0.6b",)})
  out = tmp_path / "growth.json"
  growth.main(["--measure", "--smoke", "--only", "group", "--out", str(out)])
  rows = json.loads(out.read_text())["rows"]
  assert [row["group"] for row in rows] == [4, 64]
  assert all(row["learner_us"] > 0 and row["generation_us"] > 0 for row in rows)
