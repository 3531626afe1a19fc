"""The result files of the sweep: plans make what they hold, no reported seed was chosen on, rates are the best."""

import numpy as np
import pytest

from experiments.reproductions import _compared as compared
from experiments.reproductions import _intervals as intervals
from experiments.reproductions import _lag_sweep_plan as plans
from experiments.reproductions import _lag_sweep_second as second
from experiments.reproductions import _lag_sweep_studies as several
from experiments.reproductions import _lag_sweep_table as sweep
from experiments.reproductions import _results as results
from experiments.reproductions import tables


def test_no_fresh_seed_was_chosen_on():
  reported = [set(study.fresh.seeds) for study in results.studies()]
  assert min(map(len, reported)) >= 20
  assert len(set().union(*reported)) == sum(map(len, reported))
  later = (results.LATER, results.MISSING, results.REMAINING, results.EVERY_LAG, results.SHORT_LAG)
  later = (*later, results.FALLING, results.ELSEWHERE, results.OTHERS)
  tried = {*results.earlier().seeds, *(seed for runs in later for seed in runs.tried)}
  assert not set().union(*reported) & tried
  assert set(results.MISSING.tried) == set(results.MISSING.tries.seeds)


@pytest.mark.parametrize(
  ("name", "runs"),
  [
    ("later", results.LATER),
    ("missing", results.MISSING),
    ("remaining", results.REMAINING),
    ("every_lag", results.EVERY_LAG),
    ("short_lag", results.SHORT_LAG),
    ("falling", results.FALLING),
    ("elsewhere", results.ELSEWHERE),
    ("others", results.OTHERS),
    ("elsewhere_sorting", results.ELSEWHERE_SORTING),
    ("elsewhere_wide", results.ELSEWHERE_WIDE),
  ],
)
def test_every_later_method_ran_at_the_rate_that_its_own_tries_chose(name, runs):
  study, tried = getattr(results, name)(), runs.tries
  if name == "short_lag":
    tried = tried.among(set(tried.methods()) - {"TOPR"})  # whose rate was fixed beforehand
  rows = [
    row for lag in study.rows if lag for row in study.rows[lag] if study.fresh.configs[row.config][0] in tried.methods()
  ]
  assert len(rows) >= (2 if name.startswith("elsewhere_") else 4)
  for row in rows:
    method, lag, rate = study.fresh.configs[row.config]
    if tried.rates(method, lag):
      assert row.chosen
      assert row.edge is (rate in (min(tried.rates(method, lag)), max(tried.rates(method, lag))))


@pytest.mark.parametrize(
  ("name", "runs"),
  [
    ("remaining_methods", results.REMAINING),
    ("gac_words", results.GAC_WORDS),
    ("gac_map", results.GAC_CH4),
    ("gac_map_32", results.GAC_CH4_32),
    ("small_sorting", results.SORTING),
    ("second_task", second.TASK),
    ("lower_rates", second.LOWER),
    ("second_size", second.SIZE),
    ("falling_elsewhere", results.ELSEWHERE),
    ("others_falling", results.OTHERS),
  ],
)
def test_a_plan_makes_what_its_file_has(name, runs):
  held, items = plans.Results(runs.folder), [plans.parse(text) for text in plans.read(tables.PAGES / f"{name}.txt")]
  assert len(held.curves) > 30
  assert not any(item.runs(held) or item.waiting(held) for item in items)


@pytest.mark.parametrize(("name", "lags"), [("gac_words", [10, 32]), ("gac_ch4", [10]), ("gac_ch4_32", [32])])
def test_no_seed_of_the_map_of_gac_was_chosen_on(name, lags):
  drawn = getattr(results, name)()
  assert drawn.lags == lags
  assert not set(drawn.tried.seeds) & set(drawn.fresh.seeds)
  assert not np.isnan(drawn.fresh.accuracy).any()


@pytest.mark.parametrize(
  ("name", "runs"), [("second_task", second.TASK), ("lower_rates", second.LOWER), ("second_size", second.SIZE)]
)
def test_the_plans_of_a_second_task_and_size_make_no_more_than_their_files_have(name, runs):
  held, items = plans.Results(runs.folder), [plans.parse(text) for text in plans.read(tables.PAGES / f"{name}.txt")]
  assert sum(
    len(item.rates_of(item.names[0], lag, held)) * len(item.seeds) for item in items for lag in item.lags
  ) == len(held.curves)
  seeds = {run.seed for run in held.curves}
  assert seeds == {*runs.tried, *runs.reported} == set(second.starts(runs))
  assert not set(runs.tried) & set(runs.reported)


@pytest.mark.parametrize("study", [second.task, second.lower, second.size, lambda: second.size(all_starts=False)])
def test_every_method_of_a_second_task_and_size_ran_at_the_rate_that_its_own_tries_chose(study):
  assert all(row.chosen for rows in study().rows.values() for row in rows)


def test_no_rate_of_sorting_at_lower_rates_is_at_an_edge():
  rows = [row for rows in second.lower().rows.values() for row in rows]
  assert len(rows) == 14
  assert not any(row.edge for row in rows)  # the page says so


def test_the_rates_at_an_edge_in_the_study_of_remaining_methods_are_those_that_the_page_names():
  study = results.remaining()
  edges = [study.fresh.configs[row.config] for rows in study.rows.values() for row in rows if row.edge]
  assert edges == [("SAPO", 4, 5e-5), ("SAPO", 10, 5e-5), ("PPO", 32, 5e-5)]
  assert not {(method, lag) for method, lag, _ in edges} & {(method, lag) for method, lag, _ in compared.RIVALS}


def test_the_maps_of_gac_on_sums_have_the_same_seeds_and_other_warm_starts():
  starts = [plans.Results(runs.folder).starts for runs in (results.GAC_CH4, results.GAC_CH4_32)]
  assert starts[0].keys() == starts[1].keys()  # so that the page compares nothing between them by seed
  assert not any(starts[0][key] == starts[1][key] for key in starts[0])


def _items_of_every_lag() -> list[plans.Item]:
  chosen = lambda task, method, lag: sweep.choose_rate(results.earlier(), method, lag)
  return [plans.parse(text, chosen) for text in plans.read(tables.PAGES / "every_lag.txt")]


def test_the_plan_of_every_lag_made_all_but_the_fresh_runs_of_its_last_four_lines():
  held = plans.Results(results.EVERY_LAG.folder)
  *made, maxrl, sat, tis, centered = _items_of_every_lag()
  assert not any(item.runs(held) or item.waiting(held) for item in made)
  left = [run for item in (maxrl, sat, tis, centered) for run in item.runs(held)]
  assert {run.method for run in left} == {"PPO, MaxRL", "SAT", "centered token TIS", "centered"}
  assert {run.seed for run in left} == set(results.EVERY_LAG.reported)
  assert (len(held.curves), len(left)) == (900, 240)


def test_the_plan_of_falling_rates_was_made_and_that_of_short_lags_but_for_some_fresh_seeds():
  falling = [plans.parse(text) for text in plans.read(tables.PAGES / "falling_rate.txt")]
  held = plans.Results(results.FALLING.folder)
  assert not any(item.runs(held) or item.waiting(held) for item in falling)
  assert len(held.curves) == 486
  held = plans.Results(results.SHORT_LAG.folder)
  items = [plans.parse(text) for text in plans.read(tables.PAGES / "short_lag.txt")]
  assert not any(item.waiting(held) for item in items)
  left = {(run.method, run.lag): run.seed for item in items for run in item.runs(held)}
  assert left.keys() == {
    ("PPO, MaxRL", 128), ("SAT", 4), ("SAT", 128), *(("centered token TIS", lag) for lag in (4, 10, 32, 128))
  }  # fmt: skip
  assert set(left.values()) == {3819}
  assert len(held.curves) == 470


def test_the_edges_of_short_lags_and_falling_rates_are_those_that_the_pages_name():
  edges = lambda study: {study.fresh.configs[row.config] for rows in study.rows.values() for row in rows if row.edge}
  assert {name for name, lag, _ in edges(results.falling()) if "falling" in name} == {
    name for name, lag, _ in results.falling().fresh.configs if "falling" in name and lag
  }
  assert not {name for name, _, _ in edges(results.short_lag())} & {"TOPR", "TOPR, momentum .5"}
  tried = {x for study in (results.SHORT_LAG, results.EVERY_LAG) for x in study.tries.rates("TRM, bounds x 100", 4)}
  assert min(tried) < 2e-4 < max(tried)


def test_the_plan_that_comes_next_names_what_exists_and_no_seed_that_was_used():
  items = [plans.parse(text) for text in plans.read(tables.PAGES / "falling_sorting.txt")]
  used = {
    (run.task, run.seed)
    for runs in (results.ELSEWHERE_SORTING, second.TASK, second.LOWER)
    for run in plans.Results(runs.folder).curves
  } | {("ch4", seed) for study in results.studies() for seed in study.fresh.seeds}
  planned = {item.task: set() for item in items}
  for item in items:
    planned[item.task] |= set(item.seeds)
  assert {task: len(seeds) for task, seeds in planned.items()} == {"sort16": 23}
  assert not {(task, seed) for task, seeds in planned.items() for seed in seeds} & used


def test_no_falling_rate_of_topr_is_at_an_edge_but_for_twice_the_width():
  edges = {
    (study.fresh.configs[row.config][:2], study.edge(study.fresh.configs[row.config]))
    for study in (results.elsewhere(), results.elsewhere_sorting(), results.elsewhere_wide())
    for rows in study.rows.values()
    for row in rows
    if study.fresh.configs[row.config][0].startswith("TOPR") and "falling" in study.fresh.configs[row.config][0]
  }
  found = {(("TOPR, momentum .5, falling rate", lag), False) for lag in (4, 10, 32, 128)}
  assert edges == found | {(("TOPR, falling rate", 10), True)}
  merged = [several.at_edge(results.studies(), ("TOPR, momentum .5, falling rate", lag, 8e-4)) for lag in (10, 32)]
  assert merged == [False, False]  # that 8e-4 was the highest of one study's rates is settled by another's
  assert results.falling().edge(("TOPR, momentum .5, falling rate", 10, 8e-4))


def test_a_still_higher_rate_that_falls_is_worse_on_every_seed_that_it_was_tried_on():
  tried = results.ELSEWHERE.tries
  for lag in (4, 10, 32, 128):
    rows = tried.rates("TOPR, momentum .5, falling rate", lag)
    assert list(rows) == [4e-4, 8e-4, 1.6e-3]
    assert np.all(tried.accuracy[rows[1.6e-3]] < tried.accuracy[rows[8e-4]])
    lost = tried.accuracy[rows[1.6e-3]] < 0.1
    assert lost.sum() == (lag == 4)


def test_the_starts_at_twice_the_width_that_the_rates_were_tried_on_are_poor_but_for_one():
  first = {
    run.seed: curves[plans.CURVES.index("accuracy"), 0]
    for run, curves in plans.Results(results.ELSEWHERE_WIDE.folder).curves.items()
    if (run.task, run.method, run.rate) == ("ch4wide", "sync", 2e-4)
  }
  assert sorted(seed for seed, accuracy in first.items() if accuracy < 0.15) == [5418, 5500, 5502]
  tried = results.ELSEWHERE_WIDE.tries
  rows = [tried.rates(f"TOPR, {momentum}falling rate", 10)[8e-4] for momentum in ("", "momentum .5, ")]
  assert [f"{x:.2f}" for x in tried.accuracy[rows, tried.seeds.index(5501)]] == ["0.63", "0.73"]


def test_the_control_of_gac_at_lag_4_is_topr_a_second_time():
  skipped = plans.CURVES.index("skipped")
  names = ("TOPR", "TOPR + GAC .05/.8", "TOPR + GAC .05/.8, at random")
  first, aligned, second = (results.SHORT_LAG.runs(name, 4, 2e-4) for name in names)
  assert not any(x[:, skipped].any() for x in (first, aligned, second))
  np.testing.assert_array_equal(first[:, :, :2], second[:, :, :2])  # 20 updates alike, as the page says
  assert np.any(first != second, axis=(1, 2)).all()


def test_every_method_at_every_lag_has_its_control_and_the_rates_that_the_page_names():
  study = results.every_lag()
  rows = {study.fresh.configs[row.config]: row for rows in study.rows.values() for row in rows}
  assert {config[0] for config, row in rows.items() if not row.chosen} == {"sequence PPO, rate / lag"}
  assert all(row.control is not None for config, row in rows.items() if config[0].startswith(("ESTR", "TRM", "M2PO,")))
  edges = [config for config, row in rows.items() if row.edge]
  assert sorted(edges) == [
    ("ESTR, tau 1", 32, 5e-5),
    ("ESTR, tau 4", 4, 2e-4),
    ("M2PO, signed", 4, 1e-4),
    ("TRM, bounds x 10", 10, 2e-4),
    ("TRM, bounds x 10", 32, 2e-4),
    ("TRM, bounds x 10", 128, 2e-4),
    ("TRM, bounds x 100", 4, 2e-4),
  ]


def test_topr_at_every_lag_is_compared_on_the_seeds_of_all_studies_that_have_it():
  lines = [line.split(" | ") for line in tables.TABLES["TOPR by lag"]().splitlines()[2:]]
  assert [line[0] for line in lines] == ["| 4", "| 10", "| 32", "| 128"]
  assert [line[3].split(" of ")[1] for line in lines] == ["80", "161", "141", "80"]
  assert [line[5] for line in lines] == [" |", "80 |", "141 |", "60 |"]


def test_no_difference_to_sync_moves_by_more_than_the_page_says():
  means = {
    config: [study.minus_sync(*config).mean() for study in several.having(results.studies(), config)]
    for config in several.shared(results.studies())
  }
  most = max(max(found) - min(found) for found in means.values())
  assert f"moved by more than {intervals.number(most, 3)}" in (tables.PAGES / "which_correction.md").read_text()
