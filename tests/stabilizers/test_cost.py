"""The benchmark of the stabilizers' cost runs, and what can be known without a clock is right."""

import json

import pytest

from experiments.benchmarks import stabilizer_cost


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.slow
def test_benchmark_runs_and_counts_the_buffers(tmp_path, capsys):
  out = tmp_path / "cost.json"
  result = stabilizer_cost.main(["--smoke", "--out", str(out)])
  assert json.loads(out.read_text()) == result
  assert "all, bfloat16" in capsys.readouterr().out
  base = result["updates"][stabilizer_cost.BASELINE]["state_bytes"]
  added = {name: (row["state_bytes"] - base) / result["params"] for name, row in result["updates"].items()}
  assert added["all, float32"] == pytest.approx(4.0, rel=1e-2)  # one gradient, and a few scalars
  assert added["all, bfloat16"] == pytest.approx(2.0, rel=1e-2)
