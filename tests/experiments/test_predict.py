"""The benchmark of the plan's predictions: what it says of times that were measured, and that it runs through."""

import json
import pathlib

import pytest

from experiments.benchmarks import predict

RESULTS = pathlib.Path(predict.__file__).parent / "results"


@pytest.mark.parametrize(
  ("file", "index"),
  [("learner_speed_h200.json", 0), ("learner_speed_smollm2_h200.json", 2), ("decode_speed_draw_h200.json", 10)],
)
def test_predictions_are_within_a_fifth_of_what_was_measured(file, index):
  """The programs are traced as for a GPU; all rows are in results/predict_h200.json."""
  result = json.loads((RESULTS / file).read_text())
  (row,) = predict.compare_recorded(result | {"rows": [result["rows"][index]]})
  assert abs(row["error"]) < 0.2


def test_it_predicts_and_measures_a_learner_and_a_decode_step(tmp_path, capsys):
  predict.main(["--smoke", "--out", str(tmp_path / "predict.json")])
  result = json.loads((tmp_path / "predict.json").read_text())
  assert result["chip"] == "h100"
  learner, decode = result["rows"]
  assert learner["step"] == "learner 2x64 x 2 remat activations"
  assert decode["step"].startswith("decode 16 of 16 slots")
  for row in result["rows"]:
    assert row["error"] < 0
    assert 0 < row["predicted_ms"] < row["measured_ms"]  # an H100 is faster than these cores
  assert len(capsys.readouterr().out.splitlines()) == 4
