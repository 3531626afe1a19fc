"""The result files that the tables of the pages are made of, each read once."""

from __future__ import annotations

import functools

from experiments.reproductions import _async_rlhf_plan as rlhf_plans
from experiments.reproductions import _lag_sweep_map as maps
from experiments.reproductions import _lag_sweep_paired as paired
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _real_model_report as real
from experiments.reproductions import async_rlhf
from experiments.reproductions import real_model
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_table import Table

FRESH = reports.RESULTS / "fresh_seeds"
LATER = reports.RESULTS / "later_methods"
GAC_WORDS = reports.RESULTS / "gac_words"
GAC_CH4 = reports.RESULTS / "gac_map"
MISSING = reports.RESULTS / "missing_methods"
REMAINING = reports.RESULTS / "remaining_methods"
SORTING = reports.RESULTS / "small_sorting"
#: The seeds on which the study of later methods tried rates, and those that it reports.
TRIED, REPORTED = range(2100, 2103), range(2000, 2020)
#: Those of the study of missing methods.
MISSING_TRIED, MISSING_REPORTED = range(3300, 3303), range(3200, 3220)
#: Those of the study of what that one was stopped before.
REMAINING_TRIED, REMAINING_REPORTED = range(3500, 3503), range(3400, 3420)
#: Those of the map of GAC on ch4, and the lags that it finished.
GAC_TRIED, GAC_REPORTED, GAC_LAGS = range(3100, 3102), range(3000, 3020), (10,)


@functools.cache
def earlier() -> Table:
  """Returns the runs on the seeds that rates and methods were chosen on."""
  return Table.load(reports.RESULTS / "lag_sweep_ch4.npz")


@functools.cache
def study() -> paired.Study:
  """Returns the first study on fresh seeds."""
  return paired.Study(Table.of(Results(FRESH), "ch4"), [earlier()])


@functools.cache
def tried() -> Table:
  """Returns the runs of the study of later methods that tried rates."""
  return Table.of(Results(LATER), "ch4", TRIED)


@functools.cache
def later() -> paired.Study:
  """Returns the study of later methods."""
  return paired.Study(Table.of(Results(LATER), "ch4", REPORTED), [tried(), earlier()])


@functools.cache
def missing_tried() -> Table:
  """Returns the runs of the study of missing methods that tried rates and combinations."""
  return Table.of(Results(MISSING), "ch4", MISSING_TRIED)


@functools.cache
def missing() -> paired.Study:
  """Returns the study of missing methods."""
  return paired.Study(Table.of(Results(MISSING), "ch4", MISSING_REPORTED), [missing_tried(), tried(), earlier()])


@functools.cache
def remaining_tried() -> Table:
  """Returns the runs of the study of remaining methods that tried rates."""
  return Table.of(Results(REMAINING), "ch4", REMAINING_TRIED)


@functools.cache
def remaining() -> paired.Study:
  """Returns the study of remaining methods."""
  choices = [remaining_tried(), missing_tried(), tried(), earlier()]
  return paired.Study(Table.of(Results(REMAINING), "ch4", REMAINING_REPORTED), choices, (0, 4, 10, 32, 128))


@functools.cache
def sorting() -> paired.Study:
  """Returns the study of sorting: rates are chosen on seeds 5100 and 5101."""
  results = Results(SORTING)
  tried = Table.of(results, "sort10", range(5100, 5102))
  return paired.Study(Table.of(results, "sort10", range(5000, 5006)), [tried], (0, 10))


def studies() -> list[paired.Study]:
  """Returns all studies on fresh seeds of ch4."""
  return [study(), later(), missing(), remaining()]


@functools.cache
def gac_words() -> maps.Map:
  """Returns the map of GAC on the toy: chosen on seeds 0 and 1, run on those from 100 on."""
  results = Results(GAC_WORDS)
  return maps.Map(Table.of(results, "words", range(100)), Table.of(results, "words", range(100, 1000)))


@functools.cache
def gac_ch4() -> maps.Map:
  """Returns the map of GAC on ch4."""
  results = Results(GAC_CH4)
  return maps.Map(Table.of(results, "ch4", GAC_TRIED), Table.of(results, "ch4", GAC_REPORTED), GAC_LAGS)


@functools.cache
def all_looks() -> list[rlhf_plans.Look]:
  """Returns the measurements of the study of off-policy RLHF."""
  return rlhf_plans.read(async_rlhf.RESULTS / async_rlhf.CSV)


@functools.cache
def looks() -> list[rlhf_plans.Look]:
  """Returns those at the chosen rates on the seeds that it reports."""
  return async_rlhf.STUDY.reports(all_looks())


@functools.cache
def real_runs(samples: int) -> real.Runs:
  """Returns the runs of the pretrained model with updates of so many samples."""
  return real.read(real_model.SCALES[samples].folder / "real_model.csv")


@functools.cache
def real_lag_8() -> real.Runs:
  """Returns those with 512 at lag 8, from a start of their own."""
  return real.read(reports.RESULTS / "real_model_512_lag8" / "real_model.csv")


@functools.cache
def real_lags() -> real.Runs:
  """Returns those with 512 at four lags, from a third start."""
  return real.read(reports.RESULTS / "real_model_512_lags" / "real_model.csv")
