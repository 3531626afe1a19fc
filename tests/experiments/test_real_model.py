"""The study of a real model: its command, its plan, and what it makes of runs."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_weights import chatting_weights

from async_rl import learning
from async_rl import tasks
from async_rl.learning._learning_rate import scheduled_rates
from async_rl.runtime import _step_meter
from experiments.reproductions import _real_model_report as reports
from experiments.reproductions import _real_model_runs as study
from experiments.reproductions import _results as results
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


def _run(accuracies, ess):
  """Two steps a period, the accuracy after each period."""
  steps = {2 * i: {"accuracy": accuracy} for i, accuracy in enumerate(accuracies)}
  for step in range(1, 2 * len(accuracies) - 1):
    steps.setdefault(step, {})["ess"] = ess[(step - 1) // 2]
  return steps


def test_tables_and_figure_show_accuracies_differences_and_signs(tmp_path):
  runs = {
    study.Run("no correction", 0, 0, 1e-4): _run([0.2, 0.25, 0.3], [0.9, 0.9]),
    study.Run("no correction", 8, 0, 1e-4): _run([0.2, 0.08, 0.0], [0.5, 0.1]),
    study.Run("TOPR", 8, 0, 1e-4): _run([0.2, 0.2, 0.25], [0.8, 0.6]),
    study.Run("TOPR", 8, 1, 1e-4): _run([0.2], []),
  }
  lines = reports.accuracy_table(runs).splitlines()
  assert lines[0] == "| lag | method | rate | seed | start | 2 | 4 | below half |"
  assert lines[2] == "| 0 | no correction (sync) | 1e-4 | 0 | .200 | .250 | .300 | – |"
  assert lines[3] == "| 8 | no correction | 1e-4 | 0 | .200 | .080 | .000 | at 2 |"
  lines = reports.end_table(runs).splitlines()
  assert lines[2].endswith("| **+.100 (+.043 to +.156)** | +.050 (−.009 to +.109) |")  # minus its start, minus TOPR
  assert lines[4].endswith("| +.050 (−.005 to +.105) |  |")
  assert "| 8 | no correction | 1e-4 | 0 |  | .500 → .100 |" in reports.sign_table(runs)
  reports.draw(runs, tmp_path / "figure.png")
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_several_lags_are_compared_at_their_own_and_with_sync():
  lags = {2: 0.3, 8: 0.25}
  runs = {study.Run("no correction", 0, 0, 1e-4): _run([0.2, 0.4], [0.9])}
  runs |= {study.Run("TOPR", lag, 0, 1e-4): _run([0.2, end], [0.9]) for lag, end in lags.items()}
  runs |= {study.Run("A-3PO", lag, 0, 1e-4): _run([0.2, 0.1], [0.9]) for lag in lags}
  header, _, *lines = reports.end_table(runs, every_lag=True).splitlines()
  assert header.endswith("| minus its start | minus TOPR at its lag | minus sync |")
  found = [[cell.split(" (")[0].strip(" *") for cell in line.split("|")[6:9]] for line in lines]
  assert found == [
    ["+.200", "", ""],
    *(["+.100", "", "−.100"], ["+.050", "", "−.150"]),
    *(["−.100", "−.200", "−.300"], ["−.100", "−.150", "−.300"]),
  ]


def test_the_rise_of_rewards_has_welchs_interval():
  run, other = study.Run("TOPR", 8, 0, 1e-4), study.Run("TOPR", 8, 1, 1e-4)
  steps = _run([0.1, 0.2, 0.3], [0.5, 0.5])
  for step, reward in enumerate((0.1, 0.12, 0.3, 0.36), 1):
    steps[step]["reward"] = reward
  (line,) = reports.reward_table({run: steps, other: _run([0.1, 0.2], [0.5])}).splitlines()[2:]
  low, high = stats.ttest_ind([0.3, 0.36], [0.1, 0.12], equal_var=False).confidence_interval()
  half = f"{(high - low) / 2:.3f}".removeprefix("0")
  assert line == f"| 8 | TOPR | 1e-4 | 0 | .110 ± .127 | .330 ± .381 | +.220 ± {half} |"


def test_differences_of_shares_have_newcombes_interval():
  assert reports.interval(0.0) == pytest.approx((0.0, 0.00865), abs=1e-5)
  low, high = reports.difference(31 / 440, 0.0)
  assert (low, high) == pytest.approx((0.0484, 0.0983), abs=2e-4)
  assert reports.difference(0.0, 31 / 440) == pytest.approx((-high, -low))
  wide = reports.difference(31 / 440, 0.0, comparisons=9)
  assert wide[0] < low
  assert wide[1] > high
  for samples in (440, 1760):
    half = stats.norm.ppf(0.975) * (2 * 0.25 / samples) ** 0.5  # as that of a normal distribution
    assert reports.difference(0.5, 0.5, samples=samples) == pytest.approx((-half, half), rel=0.01)


def test_an_end_of_an_interval_that_rounds_to_0_keeps_its_sign():
  low, high = reports.difference(110 / 1760, 84 / 1760, samples=1760)
  assert -0.0005 < low < 0 < high
  run = {study.Run("TOPR", 32, 0, 1e-4): _run([84 / 1760, 110 / 1760], [0.9])}
  assert " | +.015 (−.000 to +.030) |" in reports.end_table(run, 1760)
  back = {study.Run("TOPR", 32, 0, 1e-4): _run([110 / 1760, 84 / 1760], [0.9])}
  assert " | −.015 (−.030 to +.000) |" in reports.end_table(back, 1760)


def test_a_run_that_was_cut_off_has_no_end():
  runs = {
    study.Run("no correction", 0, 0, 1e-4): _run([0.2, 0.25, 0.3], [0.9, 0.9]),
    study.Run("TOPR", 8, 0, 1e-4): _run([0.2, 0.25], [0.8]),
    study.Run("A-3PO", 8, 0, 1e-4): _run([0.2, 0.05], [0.7]),
  }
  for steps in runs.values():
    for step, row in steps.items():
      row["reward"] = 0.1 + 0.01 * step
  runs[study.Run("TOPR", 8, 0, 1e-4)][3] = {"reward": 0.9, "ess": 0.1}
  assert list(reports.finished(runs)) == [study.Run("no correction", 0, 0, 1e-4)]
  assert reports.accuracy_table(runs).splitlines()[3:] == [
    "| 8 | TOPR | 1e-4 | 0 | .200 | .250 |  | cut off at 3 |",
    "| 8 | A-3PO | 1e-4 | 0 | .200 | .050 |  | at 2, cut off at 2 |",
  ]
  for table in (reports.end_table(runs), reports.end_table(runs, every_lag=True), reports.reward_table(runs)):
    (line,) = table.splitlines()[2:]
    assert line.startswith("| 0 | no correction (sync) |")
  assert "+.050" not in reports.end_table(runs)  # minus TOPR, which has no end
  assert reports.sign_table(runs).splitlines()[3].startswith("| 8 | TOPR | 1e-4 | 0 | .115 → – | .800 → – |  |")


def test_what_repeats_stands_in_one_row():
  tis, plain, topr = (study.Run(method, 8, 0, 1e-4) for method in ("sequence TIS", "no correction", "TOPR"))
  skipped = {step: {"skipped": 1.0} for step in range(3, 8)}
  starts = {
    "one": {plain: _run([0.2, 0.08, 0.0], [0.5, 0.5]), plain._replace(seed=1): _run([0.2, 0.2, 0.21], [0.5, 0.5])},
    "two": {
      tis: _run([0.1, 0.2, 0.3], [0.5, 0.5]),
      plain: _run([0.2, 0.15, 0.09], [0.5, 0.5]),
      topr: _run([0.2, 0.02], [0.5]),
      topr._replace(lag=2): _run([0.2, 0.2], [0.5]) | skipped,
    },
  }
  header, _, *lines = reports.repeat_table(starts).splitlines()
  assert header == "| lag | method | one, seed 0 | one, seed 1 | two, seed 0 | collapsed |"
  assert lines == [
    "| 2 | TOPR |  |  | diverged at 7 | – |",
    "| 8 | no correction | **−.200**, collapse at 2 | +.010 | **−.110**, collapse at 4 | 2 of 3 |",
    "| 8 | sequence TIS |  |  | **+.200** | 0 of 1 |",
    "| 8 | TOPR |  |  | cut off at 2 | – |",
  ]
  close = {"one": {plain: _run([0.2, 0.26], [0.5])}}  # clear of 0 alone, and not as one of two
  assert "| **+.060** | 0 of 1 |" in reports.repeat_table(close)
  close["one"][topr] = _run([0.2, 0.26], [0.5])
  assert reports.repeat_table(close).count("| +.060 | 0 of 1 |") == 2


def _with_token_ess(run, ess):
  """A run of 96 updates that is evaluated every 24, with one ESS of tokens over updates 25 to 48 and 1 otherwise."""
  steps = {24 * i: {"accuracy": accuracy} for i, accuracy in enumerate(run)}
  for step in range(1, 97):
    steps.setdefault(step, {})["token_ess"] = ess if 25 <= step <= 48 else 1.0
  return steps


def test_low_ess_of_tokens_and_collapses_are_counted():
  kept, early, late = [0.2] * 5, [0.2, 0.2, 0.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.0]
  found = [(kept, 0.69), (kept, 0.71), (kept, 0.9), (early, 0.5), (late, 0.6), (late, 0.8)]
  runs = {study.Run("TOPR", 8, i, 1e-4): _with_token_ess(*what) for i, what in enumerate(found)}
  cut = {study.Run("A-3PO", 8, 0, 1e-4): {0: {"accuracy": 0.2}, 48: {"accuracy": 0.0, "token_ess": 0.1}}}
  rows = reports.warning_table({"one": [runs, {}], "two": [runs | cut]}).splitlines()[2:]
  counts = "| 6 | 2 | 1 | 1 | 1 | 2 |"
  assert rows == [f"| one {counts}", f"| two {counts}", "| all | 12 | 4 | 2 | 2 | 2 | 4 |"]


def test_what_the_page_says_of_a_low_ess_of_tokens_holds_for_all_runs_of_512_samples():
  parts = results.real_predictions()
  assert sum(map(len, parts.values())) == len(results.real_starts()) == 6
  low, found = {}, {}
  for part, starts in parts.items():
    runs = [(run, steps) for start in starts for run, steps in reports.finished(start).items()]
    signs = [(run.method, run.lag, reports.collapse(steps)) for run, steps in runs]
    means = [reports.mean_of_period(steps, "token_ess", (24, 48)) for _, steps in runs]
    low[part] = sorted((sign for sign, mean in zip(signs, means) if mean < 0.7), key=str)
    found[part] = sorted((sign for sign in signs if sign[2] is not None), key=str)
  plain = [("no correction", lag, 48) for lag in (32, 8)]
  earlier, fourth, fifth, sixth = parts
  assert found[earlier] == [("A-3PO", 32, 96), plain[0], *plain]
  assert low[earlier] == [*found[earlier], ("sequence TIS", 32, None)]
  assert found[fourth] == [*plain, ("sequence TIS", 8, 48)]
  assert low[fourth] == [("A-3PO", 32, None), *plain, ("sequence TIS", 32, None)]
  assert found[fifth] == [("no correction", 2, 72)]
  assert low[fifth] == [("sequence TIS", 32, None)]
  assert found[sixth] == []
  assert low[sixth] == [("TOPR, momentum .5, falling rate", 32, None)]
  every = [(run, steps) for start in results.real_starts().values() for run, steps in start.items()]
  early = [run for run, steps in every if reports.mean_of_period(steps, "token_ess", (0, 24)) < 0.9]
  assert sum(run.method == "no correction" for run in early) == 5
  others = [(run.method, run.lag, run.seed) for run in early if run.method != "no correction"]
  falling = [("TOPR, momentum .5, falling rate", lag, 3) for lag in (8, 32)]
  assert sorted(others) == [("A-3PO", 32, 0), *falling, ("sequence TIS", 32, 0)]


def test_only_one_run_of_vcpo_is_not_taken_for_finished():
  runs = results.real_seed_1()
  (cut,) = set(runs) - set(reports.finished(runs))
  assert (cut.method, cut.lag, max(runs[cut])) == ("VCPO, exact", 8, 61)
  runs = results.real_seed_3()
  assert reports.finished(runs) == runs
  assert [run.lag for run in runs if run.method == "VCPO, exact"] == [2, 8, 32]


def test_what_the_page_says_of_the_time_of_exact_norms_is_in_the_runs():
  def medians(runs, method, seed):
    steps = runs[study.Run(method, 2, seed, 3e-5)]
    seconds, waiting = (np.array([steps[i][name] for i in range(9, 91)]) for name in ("seconds", "waiting"))
    return np.array([np.median(seconds) - np.median(waiting), np.median(seconds - waiting)])

  exact, plain = (medians(results.real_seed_3(), method, 3) for method in ("VCPO, exact", "sequence TIS"))
  beside_two = medians(results.real_seed_1(), "sequence TIS", 1)
  assert [f"{x:.2f}" for x in (*exact, *plain, *beside_two)] == ["2.66", "2.66", "0.49", "0.47", "0.71", "0.69"]
  assert [f"{x:.1f}" for x in exact / (1.5 * plain)] == ["3.6", "3.8"]
  assert [f"{x:.1f}" for x in exact / beside_two] == ["3.7", "3.9"]
