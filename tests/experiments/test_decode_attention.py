"""The benchmark of decode attention measures ways that compute the same."""

import dataclasses

import pytest

from experiments.benchmarks import decode_attention
from experiments.benchmarks.decode_speed import SMOKE

CONFIG = dataclasses.replace(SMOKE, num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.mark.parametrize("live", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_all_ways_agree_with_float32(live):
  case = decode_attention.Case(16, live, prompt=32, own=32, filled=20, layers=1)
  rows = list(decode_attention.measure(CONFIG, case, 1e9, 1))
  assert [(row["attention"], row["shared_prompts"]) for row in rows] == [
    ("triton", False), ("triton", True), ("xla", False)
  ]  # fmt: skip
  for row in rows:
    assert 0 < row["mean_error"] < row["largest_error"] < 0.04  # bfloat16
    positions = live * (20 + 32 / (8 if row["shared_prompts"] else 1))
    assert row["floor_us"] == pytest.approx(1e6 * positions * 2 * CONFIG.num_kv_heads * 64 / 1e9, abs=0.1)
