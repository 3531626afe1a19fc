"""The study of a real model: its command, its plan, and what it makes of runs."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_weights import chatting_weights

from async_rl import learning
from async_rl import tasks
from async_rl.learning._learning_rate import scheduled_rates
from async_rl.runtime import _step_meter
from experiments.reproductions import _real_model_report as reports
from experiments.reproductions import _real_model_runs as study
from experiments.reproductions import real_model
from experiments.reproductions._run_many import Outcome

GSM8K = pathlib.Path(__file__).parents[1] / "data" / "gsm8k"
STALE = study.Run("TOPR", 2, 0, 1e-3)


def in_this_process(work, jobs, workers, seconds):
  """Stands in for `run_many`, whose processes would compile everything again."""
  for job in jobs:
    yield Outcome(job, work(job), "", 1.0)


@pytest.fixture
def command(tmp_path, monkeypatch):
  """The arguments of a command that makes one short run, in this process."""
  monkeypatch.setattr(real_model, "run_many", in_this_process)
  monkeypatch.setattr(reports, "draw", lambda *_: None)
  arguments = ["--smoke", "--gsm8k-folder", str(GSM8K), "--folder", str(tmp_path / "runs")]
  arguments += ["--results", str(tmp_path), "--lags", "2", "--methods", "TOPR", "--seeds", "1", "--rate", "1e-3"]
  return arguments


@pytest.mark.usefixtures("two_devices")
def test_the_command_trains(command, tmp_path):
  real_model.main([*command, "--weights", str(chatting_weights(tmp_path))])
  runs = reports.read(tmp_path / "real_model.csv")
  assert list(runs) == [STALE]
  steps = runs[STALE]
  assert list(steps) == [0, 1, 2, 3, 4]
  assert [row["lag"] for row in steps.values() if "lag" in row] == [0, 1, 2, 2]
  assert [step for step, row in steps.items() if "accuracy" in row] == [0, 2, 4]
  assert set().union(*steps.values()) == set(study.COLUMNS)
  assert not (tmp_path / "runs" / "runs").exists()  # checkpoints take gigabytes


def test_the_command_makes_no_run_twice(command, tmp_path, capsys, monkeypatch):
  made = []

  def make_run(_, run):
    made.append(run)
    return {0: {"accuracy": 0.5}, 2: {"reward": 0.25, "accuracy": 0.0}, made.count(run) + 3: {"ess": 0.5}}

  monkeypatch.setattr(study.Study, "make_run", make_run)
  for steps, runs in ((4, 1), (4, 1), (5, 2)):  # the last asks for more than the file has
    real_model.main([*command, "--steps", str(steps)])
    assert made == [STALE] * runs
    assert "| 2 | TOPR | 1e-3 | 0 | .500 | .000 | at 2 |" in capsys.readouterr().out
  assert reports.read(tmp_path / "real_model.csv")[STALE][5] == {"ess": 0.5}


def test_what_the_time_cut_off_is_kept(command, tmp_path, monkeypatch):
  monkeypatch.setattr(real_model, "run_many", lambda *_: [])
  run_dir = study.Study(tmp_path / "runs", "").run_dir(STALE)
  run_dir.mkdir(parents=True)
  (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "loss": 1.0}\n')
  real_model.main(command)
  assert reports.read(tmp_path / "real_model.csv") == {STALE: {1: {"reward": 0.5}}}
  assert run_dir.exists()


def test_the_command_says_what_is_missing(tmp_path, capsys):
  for arguments, message in (
    (["--report", "--results", str(tmp_path)], "holds no real_model.csv with runs"),
    (["--results", str(tmp_path)], "the runs need --gsm8k-folder"),
    (["--seeds", "0"], "must be at least 1"),
    (["--first-seed", "-1"], "--first-seed must be at least 0"),
  ):
    with pytest.raises(SystemExit):
      real_model.main(arguments)
    assert message in capsys.readouterr().err


def test_a_run_has_the_lag_and_the_method_that_it_is_called_after(tmp_path):
  found = study.Study(tmp_path, str(GSM8K), str(chatting_weights(tmp_path)), study.SMOKE)
  run = study.Run("sequence PPO, momentum .97", 2, 3, 1e-3)
  made = found.experiment(run)
  options = made.options
  large = dataclasses.replace(found, sizes=study.LARGE, test_samples=4).experiment(run)
  assert large.options.training.groups * large.options.training.samples == large.options.rollout.slots == 512
  assert large.options.output.eval_prompts >= len(large.task.prompts("test")) == 4 * len(made.task.prompts("test"))
  assert (options.schedule.mode, options.schedule.max_lag, options.training.seed) == ("simulated", 2, 3)
  assert options.output.run_dir == str(found.run_dir(run))
  assert made.objective.loss.keywords == {"low": 0.5, "high": 1.0}
  assert isinstance(made.task, study.ShortGSM8K)
  assert [found.experiment(run._replace(method=x)).policy.dtype for x in ("TOPR", "TOPR, float16")] == [
    "float32", "float16"
  ]  # fmt: skip


def test_short_problems_are_those_with_few_calculations():
  every = tasks.GSM8K(folder=str(GSM8K)).prompts("train")
  chosen = study.ShortGSM8K(folder=str(GSM8K), operations=1).prompts("train")
  assert 0 < len(chosen) < len(every)
  assert [prompt.answer for prompt in chosen] == [prompt.answer for prompt in every if prompt.answer.count("<<") <= 1]


def test_test_problems_come_as_often_as_they_are_sampled():
  once, thrice = (study.ShortGSM8K(folder=str(GSM8K), test_samples=count) for count in (1, 3))
  texts = [prompt.text for prompt in once.prompts("test")]
  assert [prompt.text for prompt in thrice.prompts("test")] == 3 * texts
  assert [prompt.id for prompt in thrice.prompts("test")] == list(range(3 * len(texts)))
  assert len(thrice.prompts("train")) == len(once.prompts("train"))


def test_what_is_kept_of_a_step_are_metrics():
  evaluated = {"eval/accuracy", "eval/interval", "eval/length", "eval/truncated"}
  assert set(study.COLUMNS.values()) <= {*learning.METRICS, *_step_meter.METRICS, *evaluated}


def test_methods_need_what_they_are_called_after():
  exact = {name for name, method in study.METHODS.items() if method.objective().needs_exact_norms}
  assert exact == {"sequence PPO + OPOB, exact, momentum .97", "VCPO, exact"}
  assert {name for name, method in study.METHODS.items() if method.ess_power} == {
    "VCPO, exact", "sequence TIS, steps by ESS"
  }  # fmt: skip
  assert study.METHODS["TOPR"].objective().aggregate is learning.AGGREGATIONS["sequence_mean"]
  momentum = {name: re.search(r"momentum (\.\d+)", name) for name in study.METHODS}
  assert {name: method.b1 for name, method in study.METHODS.items()} == {
    name: float(found[1]) if found else 0.9 for name, found in momentum.items()
  }


def test_the_plan_has_the_largest_lag_first_and_exact_norms_last():
  runs = list(study.plan((0, 2, 8), ["no correction", "TOPR", "A-3PO", "VCPO, exact"], seeds=(0, 1), rate=1e-4))
  assert len(set(runs)) == len(runs) == 2 + 2 * 2 * 4
  order = [(run.method, run.lag, run.seed) for run in runs]
  assert order[6:8] == [("A-3PO", 8, 0), ("A-3PO", 8, 1)]
  assert {lag for _, lag, _ in order[8:14]} == {2}
  assert order[:4] == [("no correction", 0, 0), ("no correction", 8, 0), ("TOPR", 8, 0), ("no correction", 0, 1)]
  assert [method for method, _, _ in order[-4:]] == ["VCPO, exact"] * 4
  assert list(study.plan((0,), ["TOPR"], seeds=(3,), rate=1e-4)) == [study.Run("no correction", 0, 3, 1e-4)]
  falling = study.plan((0, 8), ["TOPR", "no correction, falling rate"], seeds=(0,), rate=1e-4)
  assert [run[:2] for run in falling] == [("no correction", 0), ("no correction, falling rate", 0), ("TOPR", 8)]
  without_lag = study.plan((0,), ["TOPR", "no correction, float16"], seeds=(0,), rate=1e-4)
  assert [run[:2] for run in without_lag] == [("no correction", 0), ("no correction, float16", 0)]


@pytest.mark.parametrize(
  ("name", "rates"),
  [
    ("TOPR", [0, 0.5, 1, 1, 1, 1, 1]),
    ("TOPR, momentum .5, falling rate", [0, 2, 4, 3, 2, 1, 0]),
    ("TOPR, momentum .5, falling from its rate", [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
    ("TOPR, momentum .5, falling from twice the rate", [0, 1, 2, 1.5, 1, 0.5, 0]),
    ("no correction, falling rate", [0, 1, 2, 1.5, 1, 0.5, 0]),
  ],
)
def test_the_learning_rate_of_a_method_stays_or_falls(name, rates):
  optimizer, params = study.METHODS[name].optimizer(1e-3, 50), {"x": jnp.ones(1)}
  state, found = optimizer.init(params), []
  step = jax.jit(lambda state: optimizer.update(params, state, params)[1])
  for _ in range(51):
    found += scheduled_rates(optimizer, state)
    state = step(state)
  np.testing.assert_allclose(np.array(found)[[0, 5, 10, 20, 30, 40, 50]], 1e-3 * np.array(rates), atol=1e-9)


def test_a_run_that_diverged_is_done(tmp_path):
  found = study.Study(tmp_path, "", sizes={"steps": 96})
  steps = {step: {"skipped": float(step > 7)} for step in range(1, 12)}
  assert not found.done(steps)
  assert found.done({**steps, 12: {"skipped": 1.0}})
