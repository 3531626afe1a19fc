"""The benchmark of the plan's predictions runs through."""

import json

import pytest

from experiments.benchmarks import predict


@pytest.mark.slow
def test_it_predicts_and_measures_a_learner_and_a_decode_step(tmp_path, capsys):
  predict.main(["--smoke", "--out", str(tmp_path / "predict.json")])
  result = json.loads((tmp_path / "predict.json").read_text())
  assert result["chip"] == "h100"
  learner, decode = result["rows"]
  assert learner["step"] == "learner 2x32 x 4 remat attention"
  assert decode["step"].startswith("decode 16 slots")
  for row in result["rows"]:
    assert row["error"] < 0
    assert 0 < row["predicted_ms"] < row["measured_ms"]  # an H100 is faster than these cores
  assert len(capsys.readouterr().out.splitlines()) == 4
