"""The study of off-policy RLHF: its command, and what it makes of runs."""

import csv

import pytest

from experiments.reproductions import async_rlhf


@pytest.mark.usefixtures("two_devices")
@pytest.mark.slow
def test_command(tmp_path, capsys):
  async_rlhf.main(["--smoke", "--folder", str(tmp_path / "runs"), "--results", str(tmp_path / "results")])
  printed = capsys.readouterr().out
  with open(tmp_path / "results" / "async_rlhf.csv") as file:
    rows = list(csv.DictReader(file))
  assert {(r["method"], r["rounds"]) for r in rows} == {("online_dpo", "1"), ("online_dpo", "4")}
  assert sorted({int(r["step"]) for r in rows}) == [0, 2, 4]
  assert all(float(r["kl"]) == pytest.approx(0.0, abs=1e-3) for r in rows if r["step"] == "0")
  assert len({(r["gold"], r["proxy"]) for r in rows if r["step"] == "0"}) == 1  # one start, one reward model
  assert (tmp_path / "results" / "async_rlhf.png").read_bytes().startswith(b"\x89PNG")
  assert "| method | N = 1 | N = 4 |" in printed
  assert "| online_dpo | " in printed
  assert {look.step for look in async_rlhf.read(tmp_path / "results" / "async_rlhf.csv")} == {0, 2, 4}


def test_a_report_of_no_runs_leaves_the_results_alone(tmp_path, capsys):
  (tmp_path / "async_rlhf.csv").write_text("earlier")
  with pytest.raises(SystemExit):
    async_rlhf.main(["--report", "--folder", str(tmp_path / "none"), "--results", str(tmp_path)])
  assert "none holds no runs to report" in capsys.readouterr().err
  assert (tmp_path / "async_rlhf.csv").read_text() == "earlier"


def _look(method, rounds, seed, step, gold):
  return async_rlhf.Look(method, rounds, seed, step, gold, 0.0, 2.0)


def test_the_table_has_intervals_over_seeds_at_the_last_step():
  found = [
    _look("rloo", 1, 0, 2, 0.5),
    _look("rloo", 1, 0, 4, 0.6),
    _look("rloo", 1, 1, 4, 0.8),
    _look("dpo", 8, 0, 4, 0.1),
  ]
  lines = async_rlhf.table(found).splitlines()
  assert lines[2] == "| rloo | .700 ± 1.271, KL 2.0 |  |"  # 12.706 times .1, for two seeds
  assert lines[3] == "| dpo |  | .100, KL 2.0 |"


def test_differences_are_paired_by_seed():
  found = [_look("rloo", n, seed, 4, 0.3 * seed + 0.1 * n) for n in (1, 2) for seed in range(3)]
  found += [_look("online_dpo", n, seed, 4, 0.3 * seed) for n in (1, 2) for seed in range(3)]
  assert "| rloo | **+.100 ± .000** |" in async_rlhf.differences_to_one_round(found)
  assert "| rloo | **+.100 ± .000** | **+.200 ± .000** |" in async_rlhf.differences_to_method(found, "online_dpo")


def test_the_published_measurements_are_read():
  found = async_rlhf.read(async_rlhf.RESULTS / "async_rlhf.csv")
  later = async_rlhf.read(async_rlhf.RESULTS / "async_rlhf_ppo.csv")
  assert {look.method for look in found + later} == set(async_rlhf.METHODS)
  assert all(isinstance(look.seed, int) and isinstance(look.gold, float) for look in found)
