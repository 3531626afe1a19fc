"""The study of off-policy RLHF: its command, its plan, and what it makes of runs."""

import csv
import json
import pathlib

import pytest

from async_rl import recording
from async_rl import runtime
from experiments.reproductions import _async_rlhf_plan as plans
from experiments.reproductions import _async_rlhf_report as reports
from experiments.reproductions import async_rlhf
from experiments.reproductions._run_many import Outcome

#: Two methods at two N; the best of the rates 1 and 2 may turn out to be any of .5 to 4.
STUDY = plans.Study(["rloo", "ppo"], [1, 4], [1.0, 2.0], (0.5, 4.0), choosing=[100, 101], reported=[200, 201])


def in_this_process(work, jobs, workers, seconds, cores):
  """Stands in for `run_many`, whose processes would compile everything again."""
  assert len(cores) == workers == 2
  while jobs:
    job = jobs.popleft()
    yield Outcome(job, work(job), "", 1.0)


@pytest.mark.usefixtures("two_devices")
def test_a_run_is_measured_before_its_first_update_and_later(tmp_path):
  """Four updates on batches of one policy."""
  run = plans.Run("online_dpo", 4, 1e-3, 100)
  found = async_rlhf.make(tmp_path, True, run)
  assert [look.run for look in found] == [run] * 3
  assert [look.step for look in found] == [0, 2, 4]
  assert found[0].kl == pytest.approx(0.0, abs=1e-3)
  assert found[2].kl != found[0].kl
  assert all(-1.0 <= look.gold <= 1.0 for look in found)
  rows = list(recording.read_metrics(tmp_path / "runs" / run.name / "metrics.jsonl"))
  assert [row["staleness/max"] for row in rows if "loss" in row] == [0, 1, 2, 3]


def write_looks(folder, smoke, run):
  """Stands in for a run, which takes seconds: what it would write down and measure."""
  assert smoke
  made = async_rlhf.experiment(folder, run, smoke).options
  folder = pathlib.Path(made.output.run_dir)
  folder.mkdir(parents=True)
  steps = range(0, made.length.steps + 1, made.output.eval_every)
  metrics = [{"step": n, "eval/accuracy": n * run.rate, "eval/proxy": -n, "eval/kl_reference": n / 8} for n in steps]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
  return async_rlhf.looks(folder, run)


@pytest.mark.parametrize("make", [write_looks, pytest.param(async_rlhf.make, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("two_devices")
def test_command(tmp_path, capsys, monkeypatch, make):
  monkeypatch.setattr(async_rlhf, "run_many", in_this_process)
  monkeypatch.setattr(async_rlhf, "make", make)
  options = ["--smoke", "--workers", "2", "--folder", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
  async_rlhf.main(options)
  printed = capsys.readouterr().out
  with open(tmp_path / "results" / "async_rlhf.csv") as file:
    rows = list(csv.DictReader(file))
  assert {(r["method"], r["rounds"]) for r in rows} == {("online_dpo", "1"), ("online_dpo", "4")}
  assert {(r["rate"], r["seed"]) for r in rows} >= {("0.0005", "100"), ("0.001", "100")}
  assert {r["seed"] for r in rows} == {"100", "200", "201"}
  assert sorted({int(r["step"]) for r in rows}) == [0, 2, 4]
  assert all(float(r["kl"]) == pytest.approx(0.0, abs=1e-3) for r in rows if r["step"] == "0")
  assert len({(r["gold"], r["proxy"]) for r in rows if r["step"] == "0" and r["seed"] == "100"}) == 1  # one start
  assert (tmp_path / "results" / "async_rlhf.png").read_bytes().startswith(b"\x89PNG")
  assert "| method | N = 1 | N = 4 |" in printed
  assert "| online_dpo | " in printed
  async_rlhf.main([*options, "--no-report"])
  assert "8 runs are finished, 0 are left" in capsys.readouterr().out


def test_runs_differ_in_rate_and_seed_and_share_their_stages(tmp_path):
  first, second = (
    async_rlhf.experiment(tmp_path, plans.Run("ppo", 4, rate, seed), smoke=False).options
    for rate, seed in ((5e-4, 100), (1e-3, 200))
  )
  assert (first.adam.learning_rate, first.training.seed, first.schedule.max_lag) == (5e-4, 100, 3)
  assert (second.adam.learning_rate, second.training.seed) == (1e-3, 200)
  assert first.output.run_dir != second.output.run_dir
  assert first.rlhf.stages == second.rlhf.stages


def test_a_run_that_diverges_counts_as_the_worst(tmp_path, monkeypatch):
  run = plans.Run("rloo", 1, 8e-3, 100)

  def train(experiment, hosts):
    folder = tmp_path / "runs" / run.name
    folder.mkdir(parents=True)
    row = '{"step": 0, "eval/accuracy": 0.6, "eval/proxy": -0.5, "eval/kl_reference": 0.0}\n'
    (folder / "metrics.jsonl").write_text(row)
    raise runtime.Diverged("Gradients stay non-finite.")

  monkeypatch.setattr(runtime, "train", train)
  start, end = async_rlhf.make(tmp_path, False, run)
  assert start == (*run, 0, 0.6, -0.5, 0.0)
  assert end[:7] == (*run, 256, -1.0, -3.0)


def test_a_report_of_no_runs_leaves_the_results_alone(tmp_path, capsys):
  (tmp_path / "async_rlhf.csv").write_text("earlier")
  with pytest.raises(SystemExit):
    async_rlhf.main(["--report", "--folder", str(tmp_path / "none"), "--results", str(tmp_path)])
  assert "none holds no runs to report" in capsys.readouterr().err
  assert (tmp_path / "async_rlhf.csv").read_text() == "earlier"


def _look(method, rounds, seed, step, gold, rate=1e-3):
  return plans.Look(method, rounds, rate, seed, step, gold, 0.0, 2.0)


def _finished(runs, gold):
  return [look for run in runs for look in (_look(*run[:2], run.seed, 0, 9.0, run.rate), _end(run, gold(run)))]


def _end(run, gold):
  return _look(run.method, run.rounds, run.seed, 4, gold, run.rate)


def test_measurements_are_those_that_were_written(tmp_path):
  found = [_look("rloo", 4, 100, step, 0.25, rate) for step in (0, 4) for rate in (6.25e-5, 2.5e-4)]
  plans.append(tmp_path / "new" / "a.csv", found[:1])
  plans.append(tmp_path / "new" / "a.csv", found[1:])
  assert plans.read(tmp_path / "new" / "a.csv") == found
  assert plans.read(tmp_path / "none.csv") == []


def test_a_rate_is_chosen_on_some_seeds_and_run_on_others():
  best = {("rloo", 1): 1.0, ("rloo", 4): 0.5, ("ppo", 1): 4.0, ("ppo", 4): 2.0}
  gold = lambda run: -abs(run.rate - best[run.cell]) + run.seed / 1000
  found, orders = [], []
  while left := STUDY.left(found):
    assert len(set(left)) == len(left)
    orders.append(left)
    found += _finished(left, gold)
  assert len(orders[0]) == 2 * 2 * 4  # rates, seeds, cells
  assert [run.cell for run in orders[0][:4]] == STUDY.cells
  chosen = {cell: STUDY.rate(found, cell) for cell in STUDY.cells}
  assert {cell: rate for cell, (_, rate) in chosen.items()} == best
  assert chosen["rloo", 1] == ([0.5, 1.0, 2.0], 1.0)  # one beyond the edge was tried
  assert chosen["rloo", 4] == ([0.5, 1.0, 2.0], 0.5)  # the limit
  assert chosen["ppo", 4] == ([1.0, 2.0, 4.0], 2.0)
  reported = STUDY.reports(found)
  assert {(look.run.cell, look.rate) for look in reported} == set(best.items())
  assert {look.seed for look in reported} == {200, 201}
  assert not any(run.seed in STUDY.choosing and run.rate == 0.25 for order in orders for run in order)


def test_only_seeds_that_all_have_are_reported_and_half_finished_runs_are_left():
  found = []
  while left := STUDY.left(found):
    found += _finished(left, lambda run: -abs(run.rate - 1.0))
  missing = plans.Run("ppo", 4, 1.0, 201)
  found = [look for look in found if (look.run, look.step) != (missing, 4)]
  assert STUDY.left(found) == [missing]
  assert {look.seed for look in STUDY.reports(found)} == {200}
  assert STUDY.reports(found[:10]) == []


def test_the_table_of_rates_shows_the_chosen_ones_and_edges():
  found = []
  while left := STUDY.left(found):
    found += _finished(left, lambda run: 0.5 - abs(run.rate - run.rounds) / 10)
  lines = reports.rates(found, STUDY).splitlines()
  assert lines[0] == "| method | N | 5e-1 | 1e0 | 2e0 | 4e0 | at an edge |"
  assert lines[2] == "| ppo | 1 | .450 | **.500** | .400 |  |  |"
  assert lines[3] == "| ppo | 4 |  | .200 | .300 | **.500** | yes |"


def test_the_table_has_intervals_over_seeds_at_the_last_step():
  found = [
    _look("rloo", 1, 0, 2, 0.5),
    _look("rloo", 1, 0, 4, 0.6),
    _look("rloo", 1, 1, 4, 0.8),
    _look("dpo", 8, 0, 4, 0.1),
  ]
  lines = reports.table(found).splitlines()
  assert lines[2] == "| dpo |  | .100, KL 2.0 |"
  assert lines[3] == "| rloo | .700 ± 1.271, KL 2.0 |  |"  # 12.706 times .1, for two seeds


def test_differences_are_paired_by_seed():
  found = [_look("rloo", n, seed, 4, 0.3 * seed + 0.1 * n) for n in (1, 2) for seed in range(3)]
  found += [_look("online_dpo", n, seed, 4, 0.3 * seed) for n in (1, 2) for seed in range(3)]
  assert "| rloo | **+.100 ± .000** |" in reports.differences_to_one_round(found)
  assert "| rloo | **+.100 ± .000** | **+.200 ± .000** |" in reports.differences_to_method(found, "online_dpo")


def test_what_a_larger_n_changes_is_compared_with_what_it_changes_for_another_method():
  found = [_look("rloo", n, seed, 4, 0.3 * seed - 0.1 * n) for n in (1, 2) for seed in range(3)]
  found += [_look("online_dpo", n, seed, 4, 0.2 * seed - 0.03 * n) for n in (1, 2) for seed in range(3)]
  assert reports.losses_to_method(found, "online_dpo").endswith("| rloo | **−.070 ± .000** |")


def test_rewards_and_kl_at_each_rate_are_means_of_methods_and_of_the_seeds_for_choosing():
  found = []
  while left := STUDY.left(found):
    found += _finished(left, lambda run: run.rate / 10 + (run.seed - 100) / 100 + (run.method == "ppo") / 10)
  lines = reports.over_optimization(found, STUDY).splitlines()
  assert lines[0] == "| N | 1e0 | 2e0 |"
  assert lines[2:] == [f"| {n} | .155, .00, 2.0 | .255, .00, 2.0 |" for n in (1, 4)]


def test_the_published_measurements_make_figure_and_tables(tmp_path, capsys):
  async_rlhf.main(["--report", "--folder", str(async_rlhf.RESULTS), "--results", str(tmp_path)])
  assert (tmp_path / "async_rlhf.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "async_rlhf.csv").read_text() == (async_rlhf.RESULTS / "async_rlhf.csv").read_text()
  printed = capsys.readouterr().out
  assert all(f"| {method} | " in printed for method in async_rlhf.METHODS)
