"""The benchmark of the learner's speed."""

import json

import pytest

from experiments.benchmarks import decode_speed
from experiments.benchmarks import learner_speed
from experiments.benchmarks.stabilizer_cost import make_batch


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
  assert (row["shape"], row["micro_batches"], row["remat"]) == ("tiny", 2, "activations")
  median, shortest, longest = row["ms"]
  assert 0 < shortest <= median <= longest


def test_only_cases_with_the_rows_that_are_asked_for_are_run(tmp_path, capsys):
  with pytest.raises(SystemExit):
    learner_speed.main(["--smoke", "--rows", "2", "3", "--out", str(tmp_path / "speed.json")])
  assert "no case has [3] rows; there are [2]" in capsys.readouterr().err


def test_the_shape_that_is_asked_for_takes_the_steps(tmp_path, monkeypatch):
  """With the time that was measured on an H200, the rows have the MFU that was measured."""

  class Step:
    compile_seconds, temporaries = 0.0, 0

    def __init__(self, policy, case, exact_norms):
      assert exact_norms == learner_speed.NO_NORMS
      self.micro_batches = int(make_batch(case.shape(), policy.config.vocab_size).used)

    def __call__(self):
      return 0.3142

  monkeypatch.setattr(learner_speed, "Step", Step)
  out = tmp_path / "speed.json"
  learner_speed.main(["--shape", "smollm2-135m", "--out", str(out), "--rows", "32", "16"])
  found = [[row[x] for x in ("shape", "rows", "micro_batches", "mfu")] for row in json.loads(out.read_text())["rows"]]
  assert found == [["smollm2-135m", f"{rows} x 1024", turns, 0.256] for rows, turns in ((16, 8), (32, 4))]
