"""The study of a real model: its command on tiny weights, its plan, and what it makes of runs."""

import functools
import pathlib
from collections import deque

import pytest
from tiny_weights import chatting_weights

from async_rl import learning
from experiments.reproductions import _real_model_report as reports
from experiments.reproductions import _real_model_runs as study
from experiments.reproductions import real_model
from experiments.reproductions._run_many import Outcome

GSM8K = pathlib.Path(__file__).parents[1] / "data" / "gsm8k"


def in_this_process(work, jobs, workers, seconds):
  """Stands in for `run_many`, whose processes would compile everything again."""
  jobs = jobs if isinstance(jobs, deque) else deque(jobs)
  while jobs:
    job = jobs.popleft()
    yield Outcome(job, work(job), "", 1.0)


@pytest.mark.usefixtures("two_devices")
def test_command(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(real_model, "run_many", in_this_process)
  weights = str(chatting_weights(tmp_path))
  command = ["--smoke", "--gsm8k-folder", str(GSM8K), "--weights", weights, "--folder", str(tmp_path / "runs")]
  command += ["--results", str(tmp_path / "results"), "--lags", "2", "--methods", "TOPR", "--seeds", "1"]
  real_model.main([*command, "--rates", "1e-3"])
  printed = capsys.readouterr().out
  runs = reports.read(tmp_path / "results" / "real_model.csv")
  assert list(runs) == [study.Run("TOPR", 2, 0, 1e-3)]
  (stale,) = runs.values()
  assert list(stale) == [0, 1, 2, 3, 4]
  assert [row["lag"] for row in stale.values() if "lag" in row] == [0, 1, 2, 2]
  assert [step for step, row in stale.items() if "accuracy" in row] == [0, 2, 4]
  assert {"reward", "ess", "cosine", "entropy", "gradient", "kl"} <= set(stale[4])
  assert "| 2 | TOPR | 0.001 |" in printed
  assert (tmp_path / "results" / "real_model.png").read_bytes().startswith(b"\x89PNG")
  assert not (tmp_path / "runs" / "runs").exists()  # checkpoints take gigabytes
  monkeypatch.setattr(real_model, "run_many", None)
  real_model.main([*command, "--rates", "1e-3"])  # nothing is left to do
  assert capsys.readouterr().out.endswith(printed[printed.index("| lag") :])


def test_the_command_says_what_is_missing(tmp_path, capsys):
  for arguments, message in (
    (["--report", "--results", str(tmp_path)], "holds no real_model.csv with runs"),
    (["--results", str(tmp_path)], "the runs need --gsm8k-folder"),
    (["--seeds", "0"], "must be at least 1"),
  ):
    with pytest.raises(SystemExit):
      real_model.main(arguments)
    assert message in capsys.readouterr().err


def test_methods_need_what_they_are_called_after():
  exact = {name for name, method in study.METHODS.items() if method.objective().needs_exact_norms}
  assert exact == {"sequence PPO + OPOB, exact, momentum .97", "VCPO, exact"}
  assert study.METHODS["TOPR"].objective().aggregate is learning.AGGREGATIONS["sequence_mean"]


def test_the_plan_has_the_largest_lag_first_and_exact_norms_last():
  runs = list(study.plan((0, 2, 8), ["no correction", "TOPR", "VCPO, exact"], seeds=2, rate=1e-4))
  assert len(set(runs)) == len(runs) == 2 + 2 * 2 * 3
  order = [(run.method, run.lag, run.seed) for run in runs]
  assert {lag for _, lag, _ in order[6:10]} == {2}
  assert order[:4] == [("no correction", 0, 0), ("no correction", 8, 0), ("TOPR", 8, 0), ("no correction", 0, 1)]
  assert [method for method, _, _ in order[-4:]] == ["VCPO, exact"] * 4
  assert list(study.plan((0,), ["TOPR"], seeds=1, rate=1e-4)) == [study.Run("no correction", 0, 0, 1e-4)]


class Pretended(study.Study):
  """Makes no runs; with the rate .1 they earn more at first, with .2 in the end."""

  def make_start(self, run):
    pass

  def make_run(self, run):
    self.made.append(run)
    values = [0.5] * 6 + [0.2] * 2 if run.rate == 0.1 else [0.1] * 6 + [0.3] * 2
    return {i + 1: {"reward": value} for i, value in enumerate(values)}


def test_the_runs_have_the_rate_with_which_sync_earns_most_in_the_end(tmp_path, monkeypatch):
  monkeypatch.setattr(real_model, "run_many", in_this_process)
  monkeypatch.setattr(Pretended, "made", [], raising=False)
  plan_at = functools.partial(study.plan, (0, 8), ["no correction", "TOPR"], 1)
  for limit in (8, 9):  # the second command asks for more steps, so that nothing is done
    Pretended.made.clear()
    command = real_model.Command(Pretended(tmp_path, "", sizes={"steps": limit}), tmp_path, 1, 60.0)
    command.make([0.1, 0.2], plan_at, 8)
    pilots = [("no correction", 0, 0, 0.1), ("no correction", 0, 0, 0.2), ("no correction", 8, 0, 0.1)]
    assert Pretended.made[:3] == pilots
    assert Pretended.made[3:] == ([("no correction", 8, 0, 0.2), ("TOPR", 8, 0, 0.2)] if limit == 8 else [])
  assert command.best_rate([0.3]) == 0.3  # there is nothing to choose
  assert set(reports.read(tmp_path / "real_model.csv")) == set(command.runs)


def test_a_run_that_diverged_is_done(tmp_path):
  command = real_model.Command(study.Study(tmp_path, "", sizes={"steps": 96}), tmp_path, 1, 1.0)
  run = study.Run("no correction", 8, 0, 1e-4)
  command.runs[run] = {step: {"skipped": float(step > 7)} for step in range(1, 12)}
  assert not command.done(run)
  command.runs[run][12] = {"skipped": 1.0}
  assert command.done(run)


def _run(accuracies, ess):
  """Two steps a period, the accuracy after each period."""
  steps = {2 * i: {"accuracy": accuracy, "half_interval": 0.02} for i, accuracy in enumerate(accuracies)}
  for step in range(1, 2 * len(accuracies) - 1):
    steps.setdefault(step, {})["ess"] = ess[(step - 1) // 2]
  return steps


def test_tables_show_ends_collapses_and_their_signs():
  runs = {
    study.Run("no correction", 0, 0, 1e-4): _run([0.2, 0.25, 0.3], [0.9, 0.9]),
    study.Run("no correction", 8, 0, 1e-4): _run([0.2, 0.15, 0.05], [0.5, 0.1]),
    study.Run("no correction", 8, 1, 1e-4): _run([0.2, 0.08, 0.03], [0.4, 0.2]),
    study.Run("TOPR", 8, 0, 1e-4): _run([0.2, 0.2, 0.25], [0.8, 0.6]),
  }
  lines = reports.table(runs).splitlines()
  assert lines[2] == "| 0 | no correction (sync) | 0.0001 | .200 | .300 ± .020 | .300 at 4 | – |"
  assert lines[3] == "| 8 | no correction | 0.0001 | .200 | .040 ± .020 | .050 at 4, .030 at 4 | by 4, by 2 |"
  assert lines[4].endswith("| .250 at 4 | – |")
  assert "| 8 | no correction | 0.0001 | .450 | .150 |" in reports.sign_table(runs, "ess")
  assert "| ESS of the sequences' weights | +1.00 (3) |" in reports.warnings(runs)  # of the stale runs
