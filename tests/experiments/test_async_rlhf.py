"""The study of off-policy RLHF: its command, and what it makes of runs."""

import csv

import pytest

from experiments.reproductions import async_rlhf


def test_command(tmp_path, capsys):
  async_rlhf.main(["--smoke", "--folder", str(tmp_path / "runs"), "--results", str(tmp_path / "results")])
  printed = capsys.readouterr().out
  with open(tmp_path / "results" / "async_rlhf.csv") as file:
    rows = list(csv.DictReader(file))
  assert {(r["method"], r["rounds"]) for r in rows} == {(m, n) for m in ("online_dpo", "rloo") for n in ("1", "4")}
  assert sorted({int(r["step"]) for r in rows}) == [0, 2, 4]
  assert all(float(r["kl"]) == pytest.approx(0.0, abs=1e-3) for r in rows if r["step"] == "0")
  assert len({(r["gold"], r["proxy"]) for r in rows if r["step"] == "0"}) == 1  # one start, one reward model
  assert (tmp_path / "results" / "async_rlhf.png").read_bytes().startswith(b"\x89PNG")
  assert "| method | N = 1 | N = 4 |" in printed
  assert "| rloo | " in printed


def test_a_report_of_no_runs_leaves_the_results_alone(tmp_path, capsys):
  (tmp_path / "async_rlhf.csv").write_text("earlier")
  with pytest.raises(SystemExit):
    async_rlhf.main(["--report", "--folder", str(tmp_path / "none"), "--results", str(tmp_path)])
  assert "none holds no runs to report" in capsys.readouterr().err
  assert (tmp_path / "async_rlhf.csv").read_text() == "earlier"


def test_table():
  look = lambda method, n, seed, step, gold: async_rlhf.Look(method, n, seed, step, gold, 0.0, 2.0)
  found = [
    look("rloo", 1, 0, 2, 0.5),
    look("rloo", 1, 0, 4, 0.6),
    look("rloo", 1, 1, 4, 0.8),
    look("dpo", 8, 0, 4, 0.1),
  ]
  lines = async_rlhf.table(found).splitlines()
  assert lines[2] == "| rloo | 0.700 ± 0.100, KL 2.0 |  |"
  assert lines[3] == "| dpo |  | 0.100 ± 0.000, KL 2.0 |"
