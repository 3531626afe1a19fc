"""The bookkeeping of the lag sweep: plans, rates chosen on some seeds and reported on others, tables, intervals."""

import math

import numpy as np
import pytest

from experiments.reproductions import _intervals as intervals
from experiments.reproductions import _lag_sweep_gac as gac
from experiments.reproductions import _lag_sweep_losses as sweep_losses
from experiments.reproductions import _lag_sweep_plan as plans
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _lag_sweep_run as runs
from experiments.reproductions import _lag_sweep_table as tables
from experiments.reproductions import lag_sweep


@pytest.mark.parametrize(
  "text",
  [
    "ch4",
    "ch9/sync",
    "ch4/nothing:10",
    "ch4/PPO:500",
    "ch4/PPO:x",
    "ch4/PPO:1,,2",
    "ch4/PPO@0",
    "ch4/PPO@3-2",
    "ch4/PPO%chosen,1e-4",
    "ch4/PPO%0",
    "ch4/PPO%-1e-4",
    "ch4/PPO%1e",
  ],
)
def test_a_plan_that_makes_no_sense_is_refused(text, tmp_path, capsys):
  with pytest.raises(ValueError, match="plan|group|lags"):
    plans.parse(text)
  with pytest.raises(SystemExit):
    lag_sweep.main([text, "--folder", str(tmp_path)])
  assert text.partition("/")[2].partition(":")[0] in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--smoke", "ch4/sync"], ["ch4/sync", "--runs-per-device", "0"]])
def test_a_command_that_makes_no_sense_is_refused(options):
  with pytest.raises(SystemExit):
    lag_sweep.main(options)


def test_a_report_of_fewer_runs_does_not_replace_an_earlier_one(tmp_path):
  results, pairs = plans.Results(tmp_path), [plans.Run("ch4", "PPO", lag, 1e-4, 0) for lag in (4, 10)]
  results.add(pairs, {name: np.zeros((2, 40), np.float32) for name in runs.CURVES}, {0: 1})
  table = tables.Table.of(results, "ch4")
  table.save(tmp_path / "lag_sweep_ch4.npz")
  del results.curves[pairs[0]]
  with pytest.raises(ValueError, match="1 configurations of which there are no runs; give another --results"):
    reports.report(results, tmp_path)
  assert tables.Table.load(tmp_path / "lag_sweep_ch4.npz").configs == table.configs


def test_controls_get_what_was_measured(tmp_path):
  results = plans.Results(tmp_path)
  item = plans.parse("ch4/controls:10@2")
  assert not item.runs(results)
  assert item.waiting(results) == len(item.names) * len(item.rates) * 2
  curves = {name: np.full((2, 4), i, np.float32) for i, name in enumerate(runs.CURVES)}
  curves |= {"skipped": np.full((2, 4), 0.25, np.float32), "scale": np.full((2, 4), 0.5, np.float32)}
  made = [plans.Run("ch4", "PPO + GAC", 10, 1e-4, 0), plans.Run("ch4", "ESS", 10, 2e-4, 1)]
  results.add(made, curves, {0: 1, 1: 2})
  results.save("ch4")
  todo = item.runs(plans.Results(tmp_path))
  skips = plans.Run("ch4", "PPO + random skips", 10, 1e-4, 0)
  matched = plans.Run("ch4", "seq TIS, matched rate", 10, 2e-4, 1)
  assert set(todo) == {skips, matched}
  assert todo[skips].skip == 0.25
  assert math.isclose(todo[matched].rate, 1e-4)
  assert not set(made) & set(plans.parse("ch4/published:10@2").runs(results))


def test_interval_is_students():
  mean, half, size = intervals.interval(np.array([1.0, 2.0, 3.0, np.nan]))
  assert (mean, size) == (2.0, 3)
  assert math.isclose(half, 4.30265 / 3**0.5, rel_tol=1e-5)
  twenty = intervals.interval(np.arange(20.0))
  assert math.isclose(twenty.half, 2.09302 * np.std(np.arange(20.0), ddof=1) / 20**0.5, rel_tol=1e-5)
  assert intervals.interval(np.array([4.0]))[:2] == (4.0, math.inf)


def test_an_interval_that_holds_jointly_is_wider():
  values = np.array([0.0, 1.0, 2.0])  # of five comparisons each holds at 99 %: Student's 9.92484
  assert math.isclose(intervals.interval(values, comparisons=5).half, 9.92484 / 3**0.5, rel_tol=1e-5)


@pytest.mark.parametrize(
  ("values", "holds"), [([-1.0, 1.0, 1.5], True), ([1.0, 1.1, 1.2], False), ([-1.0, -1.1], False)]
)
def test_an_interval_that_holds_zero_is_no_difference(values, holds):
  assert intervals.interval(np.array(values)).holds_zero is holds


def _table(rows: dict[tuple[str, int, float], list[float]], seeds: list[int]) -> tables.Table:
  curves = np.zeros((len(rows), len(runs.CURVES), 4), np.float16)
  return tables.Table(list(rows), seeds, np.array(list(rows.values()), np.float32), curves)


def test_a_table_of_some_seeds_has_their_runs_alone(tmp_path):
  results = plans.Results(tmp_path)
  made = [plans.Run("ch4", "PPO", 10, 1e-4, seed) for seed in (3, 4)] + [plans.Run("ch4", "TOPR", 10, 1e-4, 4)]
  curves = {name: np.array([[0.2] * 6, [0.4] * 6, [0.5] * 6]) for name in runs.CURVES}
  results.add(made, curves, {3: 1, 4: 2})
  table = tables.Table.of(results, "ch4", {3})
  assert (table.configs, table.seeds) == ([("PPO", 10, 1e-4)], [3])
  np.testing.assert_allclose(table.accuracy, [[0.2]], rtol=1e-3)
  np.testing.assert_allclose(table.curves[0], 0.2, rtol=1e-3)


def test_differences_are_paired_by_seed():
  table = _table({("PPO", 10, 1e-4): [0.1, 0.5, np.nan], ("sync", 0, 1e-4): [0.2, 0.6, 0.9]}, [3, 4, 5])
  got = table.difference(0, 1)
  assert got.size == 2
  assert math.isclose(got.mean, -0.1, rel_tol=1e-5)
  assert got.half < 1e-5  # although the seeds differ by .4


def test_a_rate_is_chosen_on_the_given_seeds_alone():
  table = _table({("PPO", 10, 1e-4): [0.5, 0.1], ("PPO", 10, 2e-4): [0.4, 0.9]}, [0, 1000])
  assert tables.choose_rate(table, "PPO", 10, [0]) == 1e-4
  assert tables.choose_rate(table, "PPO", 10, [1000]) == 2e-4
  assert tables.choose_rate(table, "PPO", 10) == 2e-4
  with pytest.raises(ValueError, match="no earlier runs of 'PPO' at lag 32"):
    tables.choose_rate(table, "PPO", 32)


def test_a_best_rate_at_the_edge_is_flagged():
  rows = {("PPO", 10, rate): [value] for rate, value in ((5e-5, 0.3), (1e-4, 0.5), (2e-4, 0.4))}
  rows |= {("TOPR", 10, rate): [value] for rate, value in ((5e-5, 0.3), (1e-4, 0.5))}
  text = reports.best_rates(_table(rows, [0]))
  assert "| PPO |  | .50 (1e-4) |" in text
  assert "| TOPR |  | .50 (1e-4*) |" in text


def test_a_table_keeps_its_seeds(tmp_path):
  table = _table({("PPO", 10, 1e-4): [0.5, 0.1]}, [3, 1000])
  table.save(tmp_path / "table.npz")
  assert tables.Table.load(tmp_path / "table.npz").seeds == [3, 1000]
  assert tables.Table.load(reports.RESULTS / "lag_sweep_ch4.npz").seeds == [0, 1, 2, 3, 4]


def test_seeds_and_rates_of_a_plan(tmp_path):
  assert plans.parse("ch4/PPO:10@3").seeds == (0, 1, 2)
  assert plans.parse("ch4/PPO:10@1000-1002%1e-4").seeds == (1000, 1001, 1002)
  chosen = plans.parse("ch4/PPO:4,10@1000-1001%chosen", lambda task, method, lag: {4: 2e-4, 10: 1e-4}[lag])
  todo = chosen.runs(plans.Results(tmp_path))
  assert {(run.lag, run.rate, run.seed) for run in todo} == {
    (4, 2e-4, 1000),
    (4, 2e-4, 1001),
    (10, 1e-4, 1000),
    (10, 1e-4, 1001),
  }


def test_a_rate_is_tried_on_other_seeds_of_the_same_sweep(tmp_path):
  results, item = plans.Results(tmp_path), plans.parse("ch4/PPO:10,32@1000-1001%tried")
  assert item.depends
  assert not item.runs(results)  # nothing was tried yet
  made = [plans.Run("ch4", "PPO", 10, rate, seed) for rate, seed in ((1e-4, 7), (2e-4, 7), (1e-4, 1000))]
  late = np.array([[0.0] * 5 + [value] * plans.LAST for value in (0.4, 0.6, 0.9)])  # the last is of an own seed
  curves = {name: late for name in runs.CURVES}
  results.add(made, curves, {7: 1, 1000: 2})
  assert [(run.lag, run.rate, run.seed) for run in item.runs(results)] == [(10, 2e-4, 1000), (10, 2e-4, 1001)]


def test_the_plan_of_later_methods_tries_what_it_then_runs():
  items = lag_sweep._items(plans.read(reports.RESULTS.parent / "later_methods.txt"))
  tried = {(name, lag) for item in items if not item.tried for name in item.names for lag in item.lags}
  for item in items:
    if item.tried:
      assert {(name, lag) for name in item.names for lag in item.lags} <= tried
  reported = {seed for item in items if 0 not in item.lags for seed in item.seeds if seed < 2100}
  assert reported == set(range(2000, 2020))
  assert not reported & set(range(1000, 1021))


def test_the_best_of_a_group_is_taken_with_its_control(tmp_path):
  results = plans.Results(tmp_path)
  best, other = gac.name("TOPR", 0.1, 0.4), gac.name("TOPR", 0.05, 0.2, 3)
  made = [
    plans.Run("ch4", best, 10, 2e-4, 7),
    plans.Run("ch4", other, 10, 1e-4, 7),
    plans.Run("ch4", other, 10, 1e-4, 9),
  ]
  late = np.array([[0.0] * 5 + [value] * plans.LAST for value in (0.6, 0.5, 0.9)])  # the last is of an own seed
  results.add(made, {name: late for name in runs.CURVES}, {7: 1, 9: 2})
  item, control = (plans.parse(f"ch4/{group}, TOPR:10,32@9-9%best") for group in ("GAC thresholds", "GAC at random"))
  assert list(item.runs(results)) == [plans.Run("ch4", best, 10, 2e-4, 9)]
  assert control.waiting(results) == 1
  results.add([plans.Run("ch4", best, 10, 2e-4, 9)], {name: np.full((1, 10), 0.25) for name in runs.CURVES}, {9: 2})
  ((run, knobs),) = control.runs(results).items()
  assert run == plans.Run("ch4", gac.at_random(best), 10, 2e-4, 9)
  assert (knobs.skip, knobs.loss, knobs.align_low) == (0.25, list(sweep_losses.LOSSES).index("topr"), 2.0)


@pytest.mark.parametrize(
  "name",
  [
    "gac_map",
    "gac_map_32",
    "gac_words",
    "missing_methods",
    "remaining_methods",
    "every_lag",
    "second_task",
    "lower_rates",
    "second_size",
  ],
)
def test_a_plan_reports_on_seeds_that_it_does_not_try_anything_on(name):
  items = lag_sweep._items(plans.read(reports.RESULTS.parent / f"{name}.txt"))
  reported = {seed for item in items if item.tried for seed in item.seeds}
  tried = [item for item in items if not set(item.seeds) & reported]
  assert len(reported) >= 16
  configs = lambda items: {(method, lag) for item in items for method in item.names for lag in item.lags}
  assert configs([item for item in items if item.tried and not item.best]) <= configs(tried)
  assert all(configs([item]) & configs(tried) for item in items if item.best and not item.controls)
  assert not reported & {*range(5), *range(1000, 1021), *range(2000, 2020), *range(2100, 2103)}


def test_a_control_has_the_rate_that_its_counterpart_chose():
  item = plans.parse(
    "ch4/PPO + random skips:10@1000-1001%chosen", lambda task, method, lag: {"PPO + GAC": 5e-5}[method]
  )
  assert item.rates_of("PPO + random skips", 10) == (5e-5,)


def test_a_rate_is_not_chosen_on_the_seeds_it_is_reported_on(tmp_path, capsys):
  with pytest.raises(SystemExit):
    lag_sweep.main(["ch4/PPO:10@4-1000%chosen", "--folder", str(tmp_path)])
  assert "the rates of ch4 are chosen on seeds [4]; plan others" in capsys.readouterr().err


def test_a_method_that_was_never_run_has_no_chosen_rate(tmp_path, capsys):
  with pytest.raises(SystemExit):
    lag_sweep.main(["ch4/SAPO:10@1000-1001%chosen", "--folder", str(tmp_path)])
  assert "no earlier runs of 'SAPO' at lag 10 to choose a rate on; give the rates" in capsys.readouterr().err


def test_the_plan_on_fresh_seeds_reads_and_uses_no_seed_of_the_published_tables():
  texts = plans.read(reports.RESULTS.parent / "fresh_seeds.txt")
  items = lag_sweep._items(texts)
  assert len(texts) == len(items)
  assert {seed for item in items for seed in item.seeds} == set(range(1000, 1021))
  assert not any(item.waiting(plans.Results(reports.RESULTS)) for item in items if not item.depends)


def test_runs_of_another_warm_start_are_refused(tmp_path):
  results = plans.Results(tmp_path)
  curves = {name: np.zeros((1, 4), np.float32) for name in runs.CURVES}
  results.add([plans.Run("ch4", "PPO", 10, 1e-4, 1000)], curves, {1000: 7})
  results.save("ch4")
  reread = plans.Results(tmp_path)
  assert reread.starts == {("ch4", 1000): 7}
  reread.add([plans.Run("ch4", "sync", 0, 1e-4, 1000)], curves, {1000: 7})
  with pytest.raises(ValueError, match=r"runs of seeds \[1000\] of ch4 from other warm starts"):
    reread.add([plans.Run("ch4", "TOPR", 10, 1e-4, 1000)], curves, {1000: 8})
