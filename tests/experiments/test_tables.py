"""The pages' tables: what stands on the pages is what the result files give, and the comparisons are paired."""

import re

import numpy as np
import pytest

from experiments.reproductions import _compared as compared
from experiments.reproductions import _intervals as intervals
from experiments.reproductions import _lag_sweep_second as second
from experiments.reproductions import _results as results
from experiments.reproductions import tables

PAGES = sorted(tables.PAGES.glob("*.md"))


MEASURED = re.compile(r"[+−]?\.\d{3} ± \.\d{3}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_result_files(page):
  text = page.read_text()
  assert tables.fill(text) == text, "run python -m experiments.reproductions.tables --write"


def test_every_table_stands_on_a_page():
  marked = {name for page in PAGES for name in re.findall(r"<!-- table: (.+?) -->", page.read_text())}
  assert marked == set(tables.TABLES)


#: What marks the lines about other runs than the sweep's.
OTHERS = ("GSM8K", "the same with Gemma", "colabs/")


@pytest.mark.parametrize(
  ("page", "least"),
  [
    (tables.PAGES / "which_correction.md", 10),
    (tables.PAGES / "which_correction_details.md", 10),
    (tables.PAGES / "nearest_to_sync.md", 10),
    (tables.PAGES / "every_lag.md", 30),
    (tables.PAGES / "short_lag.md", 8),
    (tables.PAGES / "falling_rate.md", 10),
    (tables.PAGES / "falling_elsewhere.md", 12),
    (tables.PAGES / "others_falling.md", 20),
    (tables.PAGES / "second_task.md", 10),
    (tables.PAGES.parent / "README.md", 10),
    (tables.PAGES.parents[1] / "README.md", 3),
  ],
  ids=[
    "which correction",
    "its details",
    "nearest to sync",
    "every lag",
    "short lag",
    "falling rate",
    "falling elsewhere",
    "others falling",
    "second task",
    "experiments",
    "the first page",
  ],
)
def test_every_figure_in_the_text_about_fresh_seeds_stands_in_a_table(page, least):
  prose = re.sub(r"<!-- table.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
  prose = "\n".join(line for line in prose.splitlines() if not any(of in line for of in OTHERS))
  made = {figure for table in tables.TABLES.values() for figure in MEASURED.findall(table())}
  earlier = {".025 ± .012"}  # of runs that were not kept, as the page says
  quoted = set(MEASURED.findall(prose)) - earlier
  assert len(quoted) >= least
  assert quoted <= made


@pytest.mark.parametrize(
  "name",
  [
    "study",
    "later",
    "missing",
    "remaining",
    "every_lag",
    "short_lag",
    "falling",
    "nearest",
    "elsewhere",
    "others",
  ],
)
def test_the_number_of_comparisons_is_that_of_the_differences_shown(name):
  study = getattr(results, name)()
  shown = [line.split("|")[4:] for lag in study.rows for line in study.table(lag).splitlines()[2:]]
  differences = [cell for line in shown for cell in line if "±" in cell]
  assert len(differences) == study.comparisons
  assert f" {study.comparisons} comparison{'s' * (study.comparisons > 1)}." in tables.counts(study)


def test_all_comparisons_are_counted():
  names = [name for name in tables.TABLES if name.endswith(("against TOPR", ", pairs"))]
  shown = [tables.TABLES[name]() for name in (*names, "rivals", "ingredients", "several studies")]
  shown += [table() for name, table in tables.TABLES.items() if name.endswith(", costs")]
  lines = {line for text in shown for line in text.splitlines()[2:]}  # some stand in two tables
  extra = [line.split("|")[-2] for line in lines]
  extra += [line.split("|")[-3] for line in tables.TABLES["TOPR by lag"]().splitlines()[3:]]  # from the second lag on
  assert all("±" in cell for cell in extra)
  assert tables.comparisons() == sum(study.comparisons for study in results.studies()) + len(extra)


def test_all_runs_and_seeds_are_counted():
  runs = sum(int(tables.counts(study).split()[0]) for study in results.studies())
  seeds = {seed for study in results.studies() for seed in study.fresh.seeds}
  counted = f"{runs:,} runs on {len(seeds)} fresh seeds; {tables.comparisons()} comparisons "
  assert tables.all_comparisons().startswith(counted)


def test_rivals_of_topr_are_compared_by_seed():
  (line,) = [x for x in tables.rivals(compared.RIVALS).splitlines() if x.startswith("| VESPO | 10 ")]
  differences = np.subtract(*(results.later().minus_sync(name, 10, 2e-4) for name in ("VESPO", "TOPR")))
  assert line.split(" | ")[3:] == ["20", intervals.verdict(differences, tables.comparisons()) + " |"]


def test_a_rival_of_topr_is_starred_where_its_rate_is_an_edge_and_pools_the_studies_that_have_both():
  lines = tables.rivals((("ESTR, tau 1", 32, 5e-5), ("PPO", 10, 1e-4), ("PPO", 32, 1e-4))).splitlines()[2:]
  assert [line.split(" | ")[2:4] for line in lines] == [["5e-5*", "20"], ["1e-4", "81"], ["1e-4", "20"]]


def test_pairs_are_compared_by_seed():
  _, _, trm, projected = tables.pairs(compared.PAIRS_AT_LAG_4).splitlines()
  study = results.short_lag()
  for line, other in ((trm, "TRM, bounds x 100"), (projected, "TOPR + GAC .05/.8")):
    values = study.minus_sync("TOPR, momentum .5", 4, 2e-4) - study.minus_sync(other, 4, 2e-4)
    wanted = intervals.verdict(values, tables.comparisons())
    assert line == f"| 4 | TOPR, momentum .5 at 2e-4 | {other} at 2e-4 | 20 | {wanted} |"


def test_what_opob_adds_is_paired_by_seed():
  study = second.lower()
  rates = {lag: study.fresh.rates(second.WITH_OPOB, lag) for lag in (10, 32)}
  lines = second.opob_table().splitlines()[2:]
  for line, (lag, found) in zip(lines, rates.items(), strict=True):
    (rate,) = found
    values = study.minus_sync(second.WITH_OPOB, lag, rate) - study.minus_sync(second.PLAIN, lag, rate)
    assert line.endswith(f"| {intervals.verdict(values, second.comparisons())} |")


def test_poor_starts_are_left_out_by_the_start_alone():
  assert second.poor(second.SIZE) == [4211, 4300]
  assert second.poor(second.TASK) == second.poor(second.LOWER) == []
  every, rest = second.size(), second.size(all_starts=False)
  assert set(every.fresh.seeds) - set(rest.fresh.seeds) == {4211}
  assert every.fresh.configs == rest.fresh.configs  # so that 4300 chose no rate
  line = second.size_table().splitlines()[3]
  assert intervals.verdict(rest.minus_sync(*rest.fresh.configs[rest.rows[10][0].config]), second.comparisons()) in line


def test_the_comparisons_of_a_second_task_and_size_are_those_shown():
  shown = [second.task_table(), second.lower_table(), second.opob_table(), second.size_table()]
  cells = [cell for text in shown for line in text.splitlines()[2:] for cell in line.split("|")[5:] if "±" in cell]
  assert len(cells) == second.comparisons()
  assert f"{len(cells)} comparisons" in second.counts()


def test_a_table_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="there is no table 'lag 11'; there are "):
    tables.fill("<!-- table: lag 11 -->\n<!-- end -->\n")


def test_the_command_prints_every_table(capsys):
  tables.main([])
  printed = capsys.readouterr().out
  for name, table in tables.TABLES.items():
    assert f"## {name}\n\n{table()}\n" in printed


@pytest.mark.parametrize(
  ("values", "comparisons", "wanted"),
  [
    ([0.1, -0.1, 0.05], 1, "+.017 ± .259 (no difference)"),
    ([-0.10, -0.11, -0.12], 1, "**−.110 ± .025**"),
    ([-0.10, -0.11, -0.12], 1000, "−.110 ± .025"),  # among a thousand it is only a hint
  ],
)
def test_a_difference_says_what_it_shows(values, comparisons, wanted):
  assert intervals.verdict(np.array(values), comparisons) == wanted


def test_numbers_have_no_zero_before_the_point():
  assert intervals.number(0.5) == ".50"
  assert intervals.number(10.25) == "10.25"
  assert intervals.measure(np.array([0.1, 0.3])) == ".20 ± 1.27"
