"""Prints the tables of the pages in this folder from their result files, and writes them there.

    python -m experiments.reproductions.tables            # prints every table
    python -m experiments.reproductions.tables --write    # updates the pages and the figures of the fresh seeds

A page holds a table between the lines `<!-- table: NAME -->` and `<!-- end -->`. The tests compare every table of every
page with what this command makes of the result files.
"""

from __future__ import annotations

import argparse
import functools
import operator
import pathlib
import re
from collections.abc import Callable

import numpy as np

from experiments.reproductions import _async_rlhf_report as rlhf_reports
from experiments.reproductions import _compared as compared
from experiments.reproductions import _lag_sweep_map as maps
from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions import _lag_sweep_paired as paired
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _lag_sweep_second as second
from experiments.reproductions import _lag_sweep_studies as several
from experiments.reproductions import _real_model_report as real
from experiments.reproductions import _results as results
from experiments.reproductions import async_rlhf
from experiments.reproductions import real_model
from experiments.reproductions._intervals import grid
from experiments.reproductions._intervals import measure
from experiments.reproductions._intervals import verdict
from experiments.reproductions._lag_sweep_table import rate_text

PAGES = pathlib.Path(__file__).parent

#: The lags above 0 of the studies of ch4.
LAGS = (4, 10, 32, 128)

_MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def counts(study: paired.Study) -> str:
  """Returns what the tables of a study hold, as a sentence."""
  configs, seeds = study.fresh.configs, study.fresh.seeds
  return (
    f"{len(configs) * len(seeds)} runs: {len(configs)} configurations on each of {len(seeds)} seeds, {seeds[0]} to"
    f" {seeds[-1]}; {study.comparisons} comparison{'s' * (study.comparisons != 1)}."
  )


def comparisons() -> int:
  """Returns the number of comparisons: all studies', over the seeds of several, with TOPR, of pairs, of TOPR by lag,
  and of what lags cost where rates fall."""
  over_several = len(several.shared(results.studies())) + len(compared.INGREDIENTS)
  costs = sum(map(len, (compared.FALLING, compared.FALLING_ELSEWHERE, compared.FALLING_SORTING, compared.FALLING_WIDE)))
  with_others = len(compared.ALL_RIVALS) + len(compared.PAIRS) + costs
  return sum(x.comparisons for x in results.studies()) + over_several + with_others + len(LAGS) - 1


def all_comparisons() -> str:
  """Returns how many runs, fresh seeds and comparisons the studies have together, as a sentence."""
  configs, seeds = ([len(getattr(x.fresh, name)) for x in results.studies()] for name in ("configs", "seeds"))
  return (
    f"{sum(map(operator.mul, configs, seeds)):,} runs on {sum(seeds)} fresh seeds; {comparisons()} comparisons in the"
    " ten studies, over several, in pairs, and of what lags cost."
  )


def _difference(config: compared.Config, other: compared.Config) -> tuple[str, str]:
  """Returns the number of seeds on which studies have both configurations, and how they differ over all of them."""
  found = several.having(several.having(results.studies(), config), other)
  values = np.concatenate([x.accuracy(*config) - x.accuracy(*other) for x in found])
  return str(len(values)), verdict(values, comparisons())


def ingredients() -> str:
  """Returns a row per ingredient: what it adds over the seeds of all studies that have both."""
  rows = [
    [method, other, str(lag), rate_text(rate), *_difference((method, lag, rate), (other, lag, rate))]
    for method, other, lag, rate in compared.INGREDIENTS
  ]
  return grid(["method", "minus", "lag", "rate", "seeds", "difference"], rows)


def rivals(configs: tuple[compared.Config, ...]) -> str:
  """Returns a row per rival of TOPR: their difference at the same lag, on the seeds of the studies that have both.

  A star says that the rate is the one chosen in one of them, at the edge of those tried, and an edge in each of these.
  """
  rows = []
  for config in configs:
    method, lag, rate = config
    rate_cell = rate_text(rate) + "*" * several.at_edge(results.studies(), config)
    rows.append([method, str(lag), rate_cell, *_difference(config, ("TOPR", lag, 2e-4))])
  return grid(["method", "lag", "rate", "seeds", "minus TOPR"], rows)


def pairs(found: tuple[tuple[compared.Config, compared.Config], ...]) -> str:
  """Returns a row per pair of configurations: their difference on the same seeds."""
  rows = []
  for one, other in found:
    names = [f"{method} at {rate_text(rate)}" for method, _, rate in (one, other)]
    rows.append([str(one[1]), *names, *_difference(one, other)])
  return grid(["lag", "method", "minus", "seeds", "difference"], rows)


def costs_of_lags(
  study: paired.Study, rate_of_sync: float, methods: tuple[tuple[int, tuple[str, float], tuple[str, float]], ...]
) -> str:
  """Returns what a lag costs where the learning rates of the method and of sync fall, and where neither does.

  Args:
    study: the study.
    rate_of_sync: from which sync's rate falls.
    methods: the lag, a method whose rate falls with its rate, and one whose does not.
  """
  gain, rows = study.minus_sync("sync, falling rate", 0, rate_of_sync), []
  for lag, falling, constant in methods:
    both = study.minus_sync(falling[0], lag, falling[1]) - gain
    neither = study.minus_sync(constant[0], lag, constant[1])
    costs = (verdict(x, comparisons()) for x in (both, neither, both - neither))
    rows.append([str(lag), *(f"{name} at {rate_text(rate)}" for name, rate in (falling, constant)), *costs])
  return grid(["lag", "falls", "does not", "cost where both fall", "where neither does", "difference"], rows)


def answers() -> str:
  """Returns a row per recommendation, with what was measured on the fresh seeds of all studies that have it."""
  rows = []
  for lag, advice, config in compared.ANSWERS:
    found = several.having(results.studies(), config)
    accuracies = np.concatenate([x.accuracy(*config) for x in found])
    difference = verdict(several.minus_sync(found, config), comparisons())
    seeds = str(len(accuracies))
    rows.append([str(lag), advice, seeds, measure(accuracies, 3), difference if config[0] != "sync" else ""])
  return grid(["lag", "use", "seeds", "accuracy", "minus sync"], rows)


def columns() -> list[second.Column]:
  """Returns what the methods were measured on: the task of the advice, twice its width, and another task."""
  wide, sorting = [second.size(), results.elsewhere_wide()], [second.lower(), results.elsewhere_sorting()]
  return [
    second.Column("sums, .64M parameters", results.studies(), compared.RATES_OF_SUMS, comparisons()),
    second.Column.of("sums, 2.5M parameters", wide, comparisons_elsewhere()),
    second.Column.of("sorting, .64M parameters", sorting, comparisons_elsewhere()),
  ]


def comparisons_elsewhere() -> int:
  """Returns the number of comparisons on the second task and at the second size."""
  return second.comparisons() + results.elsewhere_sorting().comparisons + results.elsewhere_wide().comparisons


def _of_study(
  name: str, study: Callable[[], paired.Study], lags: tuple[int, ...], runs: paired.Split | None = None
) -> dict[str, Callable[[], str]]:
  """Returns the tables of a study by name; with its runs, also those of the rates that it tried and of diagnostics."""
  tables = {f"{name} counts": lambda: counts(study()), f"{name}, no lag": lambda: study().table(0)}
  tables |= {f"{name}, lag {lag}": functools.partial(lambda lag: study().table(lag), lag) for lag in lags}
  if runs is not None:
    tables |= _rates(name, runs, lags)
    tables[f"{name}, diagnostics"] = lambda: study().diagnostics((0, *lags))
  return tables


def _rates(name: str, runs: paired.Split, lags: tuple[int, ...]) -> dict[str, Callable[[], str]]:
  """Returns the tables of the rates that runs tried, by name, without GAC, whose map is another page's."""
  mapped = {method for group in methods.GAC_ON.values() for method in group}
  by_rate = lambda lag: reports.by_rate(runs.tries.among(set(runs.tries.methods()) - mapped), lag)
  return {f"{name}, rates, lag {lag}": functools.partial(by_rate, lag) for lag in lags}


def _of_map(name: str, drawn: Callable[[], maps.Map]) -> dict[str, Callable[[], str]]:
  """Returns the tables of a map of GAC by name."""
  return {
    f"{name}, counts": lambda: drawn().counts(),
    name: lambda: drawn().differences(),
    f"{name}, thresholds": lambda: drawn().thresholds(),
    f"{name}, choices": lambda: drawn().choices(),
  }


def _of_start(name: str, runs: Callable[[], real.Runs]) -> dict[str, Callable[[], str]]:
  """Returns the tables of a pretrained model's runs at several lags from one start, by name."""
  samples = real_model.SCALES[512].evaluated
  return {
    f"{name}, accuracy": lambda: real.accuracy_table(runs()),
    f"{name}, end": lambda: real.end_table(runs(), samples, every_lag=True),
    f"{name}, rewards": lambda: real.reward_table(runs()),
    f"{name}, signs": lambda: real.sign_table(runs()),
  }


#: The tables by name.
TABLES: dict[str, Callable[[], str]] = {
  "answers": answers,
  "all comparisons": all_comparisons,
  "several studies": lambda: several.together(results.studies(), comparisons()),
  "rivals": lambda: rivals(compared.RIVALS),
  "ingredients": ingredients,
  **_of_study("fresh", results.study, (10, 32)),
  **_of_study("later", results.later, (10, 32), results.LATER),
  **_of_study("missing", results.missing, (10, 32), results.MISSING),
  **_of_study("remaining", results.remaining, LAGS, results.REMAINING),
  **_of_study("every lag", results.every_lag, LAGS, results.EVERY_LAG),
  "every lag, against TOPR": lambda: rivals(compared.RIVALS_AT_EVERY_LAG),
  **_of_study("short lag", results.short_lag, (4, 10, 32), results.SHORT_LAG),
  **_rates("short lag", results.SHORT_LAG, (128,)),
  "short lag, against TOPR": lambda: rivals(compared.RIVALS_AT_LAG_4),
  "short lag, pairs": lambda: pairs(compared.PAIRS_AT_LAG_4),
  **_of_study("falling", results.falling, (10, 32), results.FALLING),
  "falling, costs": lambda: costs_of_lags(results.falling(), 4e-4, compared.FALLING),
  "falling, against TOPR": lambda: rivals(compared.RIVALS_THAT_FALL),
  "falling, by update": lambda: several.by_update(results.FALLING, compared.ALONG),
  "falling, pairs": lambda: pairs(compared.PAIRS_THAT_FALL),
  **_of_study("nearest", results.nearest, (10,)),
  **_of_study("elsewhere", results.elsewhere, LAGS, results.ELSEWHERE),
  "elsewhere, costs": lambda: costs_of_lags(results.elsewhere(), 6e-4, compared.FALLING_ELSEWHERE),
  "elsewhere, against TOPR": lambda: rivals(compared.RIVALS_ELSEWHERE),
  "elsewhere, by update": lambda: several.by_update(results.ELSEWHERE, compared.ALONG_ELSEWHERE),
  "alike, pairs": lambda: pairs(compared.PAIRS_ALIKE),
  **_of_study("others", results.others, LAGS, results.OTHERS),
  "others, pairs": lambda: pairs(compared.PAIRS_OTHERS),
  "others, against TOPR": lambda: rivals(compared.RIVALS_OTHERS),
  **_of_study("elsewhere, sorting", results.elsewhere_sorting, (10,), results.ELSEWHERE_SORTING),
  "elsewhere, sorting, costs": lambda: costs_of_lags(results.elsewhere_sorting(), 4e-4, compared.FALLING_SORTING),
  **_of_study("elsewhere, wide", results.elsewhere_wide, (10,), results.ELSEWHERE_WIDE),
  "elsewhere, wide, costs": lambda: costs_of_lags(results.elsewhere_wide(), 4e-4, compared.FALLING_WIDE),
  "TOPR by loss": lambda: several.by_loss([results.REMAINING, results.EVERY_LAG], "TOPR", LAGS, 2e-4),
  "TOPR by lag": lambda: several.by_lag(results.studies(), "TOPR", LAGS, 2e-4, comparisons()),
  "covered": lambda: several.coverage(results.studies(), results.tries(), compared.COVERED, LAGS),
  "sorting, counts": lambda: counts(results.sorting()),
  "sorting, no lag": lambda: results.sorting().table(0),
  "sorting, lag 10": lambda: results.sorting().table(10),
  "transfer": lambda: second.beside(columns(), compared.TRANSFERRED, (10, 32)),
  "second, counts": second.counts,
  "second, starts": second.starts_table,
  "second task": second.task_table,
  **_rates("second task", second.TASK, (10, 32)),
  "lower rates": second.lower_table,
  "lower rates, OPOB": second.opob_table,
  **_rates("lower rates", second.LOWER, (10, 32)),
  "lower rates, diagnostics": lambda: second.lower().diagnostics((0, 10, 32)),
  "second size": second.size_table,
  "second size, rates": lambda: reports.by_rate(second.size_runs(all_starts=False).tries, 10, intervals=False),
  "best rates": lambda: reports.best_rates(results.earlier(), reports.SHOWN, differences=False),
  "momentum and lead": lambda: reports.momentum_and_lead(results.earlier(), 10),
  "gac, cosines": lambda: maps.cosines(results.earlier(), (10, 32)),
  **_of_map("gac, words", results.gac_words),
  **_of_map("gac, ch4", results.gac_ch4),
  **_of_map("gac, ch4, lag 32", results.gac_ch4_32),
  **_of_map("gac, ch4, lag 4", results.gac_ch4_4),
  "rlhf, counts": lambda: rlhf_reports.counts(results.all_looks(), async_rlhf.STUDY),
  "rlhf, rates": lambda: rlhf_reports.rates(results.all_looks(), async_rlhf.STUDY),
  "rlhf": lambda: rlhf_reports.table(results.looks()),
  "rlhf, more rounds": lambda: rlhf_reports.differences_to_one_round(results.looks()),
  "rlhf, losses": lambda: rlhf_reports.losses_to_method(results.looks(), "online_dpo"),
  "rlhf, methods": lambda: rlhf_reports.differences_to_method(results.looks(), "online_dpo"),
  "rlhf, proxies": lambda: rlhf_reports.proxies(results.looks()),
  "rlhf, over-optimization": lambda: rlhf_reports.over_optimization(results.all_looks(), async_rlhf.STUDY),
  "real, accuracy": lambda: real.accuracy_table(results.real_runs(128)),
  "real, end": lambda: real.end_table(results.real_runs(128)),
  "real, signs": lambda: real.sign_table(results.real_runs(128)),
  "real 512, accuracy": lambda: real.accuracy_table(results.real_runs(512)),
  "real 512, end": lambda: real.end_table(results.real_runs(512), real_model.SCALES[512].evaluated),
  "real 512, rewards": lambda: real.reward_table(results.real_runs(512)),
  "real 512, signs": lambda: real.sign_table(results.real_runs(512)),
  "real 512 lag 8, accuracy": lambda: real.accuracy_table(results.real_lag_8()),
  "real 512 lag 8, end": lambda: real.end_table(results.real_lag_8(), real_model.SCALES[512].evaluated),
  "real 512 lag 8, signs": lambda: real.sign_table(results.real_lag_8()),
  **_of_start("real 512 lags", results.real_lags),
  **_of_start("real 512 seed 1", lambda: results.real_seed(1)),
  **_of_start("real 512 seed 2", lambda: results.real_seed(2)),
  **_of_start("real 512 seed 3", lambda: results.real_seed(3)),
  **_of_start("real 512 seed 4", lambda: results.real_seed(4)),
  **_of_start("real 512 seed 5", lambda: results.real_seed(5)),
  "real 512, repeats": lambda: real.repeat_table(results.real_starts(), real_model.SCALES[512].evaluated),
  "real 512, warnings": lambda: real.warning_table(results.real_predictions()),
}


def fill(page: str) -> str:
  """Returns the text of a page with every marked table made again.

  Raises:
    ValueError: if the page marks a table that does not exist.
  """

  def made(match: re.Match) -> str:
    if match[2] not in TABLES:
      raise ValueError(f"there is no table {match[2]!r}; there are {list(TABLES)}")
    return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

  return _MARKED.sub(made, page)


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--write", action="store_true", help="update the pages and the figures instead of printing")
  if not parser.parse_args(arguments).write:
    for name, table in TABLES.items():
      print(f"## {name}\n\n{table()}\n")
    return
  for page in sorted(PAGES.glob("*.md")):
    page.write_text(fill(page.read_text()))
  several.draw_by_lag(results.studies(), compared.SHOWN_BY_LAG, reports.RESULTS / "by_lag.png")
  results.later().draw(reports.RESULTS / "later_methods.png")
  results.missing().draw(reports.RESULTS / "missing_methods.png")
  results.remaining().draw(reports.RESULTS / "remaining_methods.png")
  results.every_lag().draw(reports.RESULTS / "every_lag.png")
  results.short_lag().draw(reports.RESULTS / "short_lag.png")
  results.falling().draw(reports.RESULTS / "falling_rate.png")
  results.elsewhere().draw(reports.RESULTS / "falling_elsewhere.png")
  results.others().draw(reports.RESULTS / "others_falling.png")
  second.draw(columns(), compared.TRANSFERRED, (10, 32), reports.RESULTS / "second_task.png")


if __name__ == "__main__":
  main()
