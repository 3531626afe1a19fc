"""The benchmark of the learner's speed."""

import json

from experiments.benchmarks import decode_speed
from experiments.benchmarks import learner_speed


def test_operations_are_those_of_the_model():
  case = learner_speed.Case(64, 1, 511, rows=64, row_tokens=512, row_sequences=1)
  matrices = 28 * 1024 * (2 * 16 * 128 + 2 * 8 * 128 + 3 * 3072)
  attention = 28 * 16 * 128 * 512
  table = 1024 * 151_936
  expected = 6 * 64 * (512 * (matrices + attention) + 511 * table)
  assert case.operations(decode_speed.QWEN3_06B) == expected


def test_it_measures_steps(tmp_path):
  out = tmp_path / "speed.json"
  learner_speed.main(["--smoke", "--repeats", "2", "--out", str(out)])
  (row,) = json.loads(out.read_text())["rows"]
  assert (row["micro_batches"], row["remat"]) == (2, "activations")
  median, shortest, longest = row["ms"]
  assert 0 < shortest <= median <= longest
