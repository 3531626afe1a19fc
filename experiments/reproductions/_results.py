"""The result files that the tables of the pages are made of, each read once."""

from __future__ import annotations

import functools

from experiments.reproductions import _async_rlhf_plan as rlhf_plans
from experiments.reproductions import _lag_sweep_map as maps
from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions import _lag_sweep_paired as paired
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _real_model_report as real
from experiments.reproductions import async_rlhf
from experiments.reproductions import real_model
from experiments.reproductions._lag_sweep_plan import Results
from experiments.reproductions._lag_sweep_table import Table

FRESH = reports.RESULTS / "fresh_seeds"
#: The study of methods that were published later.
LATER = paired.Split(reports.RESULTS / "later_methods", "ch4", range(2100, 2103), range(2000, 2020))
#: The study of missing methods and combinations.
MISSING = paired.Split(reports.RESULTS / "missing_methods", "ch4", range(3300, 3303), range(3200, 3220))
#: The study of what that one was stopped before.
REMAINING = paired.Split(reports.RESULTS / "remaining_methods", "ch4", range(3500, 3503), range(3400, 3420))
#: The study of every correction at every lag.
EVERY_LAG = paired.Split(reports.RESULTS / "every_lag", "ch4", range(3700, 3703), range(3600, 3620))
#: The study of short lags, and of what that of every lag was stopped before.
SHORT_LAG = paired.Split(reports.RESULTS / "short_lag", "ch4", range(3900, 3903), range(3800, 3820))
#: The study of learning rates that fall, and further seeds of what is nearest to sync.
FALLING = paired.Split(reports.RESULTS / "falling_rate", "ch4", range(4000, 4003), range(4100, 4120))
NEAREST = paired.Split(reports.RESULTS / "falling_rate", "ch4", (), range(4200, 4300))
#: The study of learning rates that fall at other lags and higher rates, on another task, and at twice the width.
ELSEWHERE = paired.Split(reports.RESULTS / "falling_elsewhere", "ch4", range(5100, 5103), range(5000, 5020))
ELSEWHERE_SORTING = paired.Split(ELSEWHERE.folder, "sort16", range(5300, 5303), range(5200, 5220))
ELSEWHERE_WIDE = paired.Split(ELSEWHERE.folder, "ch4wide", range(5500, 5503), range(5400, 5420))
#: The study of what short lags were stopped before, and of rates that fall under other corrections.
OTHERS = paired.Split(reports.RESULTS / "others_falling", "ch4", range(6100, 6103), range(6000, 6020))
SORTING = paired.Split(reports.RESULTS / "small_sorting", "sort10", range(5100, 5102), range(5000, 5006))
#: The maps of GAC on the toy and on ch4, at lag 10 and, from other warm starts, at lag 32.
GAC_WORDS = paired.Split(reports.RESULTS / "gac_words", "words", range(100), range(100, 1000))
GAC_CH4 = paired.Split(reports.RESULTS / "gac_map", "ch4", range(3100, 3102), range(3000, 3020))
GAC_CH4_32 = paired.Split(reports.RESULTS / "gac_map_32", "ch4", range(3100, 3102), range(3000, 3020))


@functools.cache
def earlier() -> Table:
  """Returns the runs on the seeds that rates and methods were chosen on."""
  return Table.load(reports.RESULTS / "lag_sweep_ch4.npz")


def tries(newest: paired.Split = OTHERS) -> list[Table]:
  """Returns the runs that the studies of ch4 up to *newest* tried rates on, the last ones first."""
  splits = (OTHERS, ELSEWHERE, FALLING, SHORT_LAG, EVERY_LAG, REMAINING, MISSING, LATER)
  return [*(split.tries for split in splits[splits.index(newest) :]), earlier()]


@functools.cache
def study() -> paired.Study:
  """Returns the first study on fresh seeds."""
  return paired.Study(Table.of(Results(FRESH), "ch4"), [earlier()])


@functools.cache
def later() -> paired.Study:
  """Returns the study of later methods."""
  return paired.Study(LATER.fresh, tries(LATER))


@functools.cache
def missing() -> paired.Study:
  """Returns the study of missing methods."""
  return paired.Study(MISSING.fresh, tries(MISSING))


@functools.cache
def remaining() -> paired.Study:
  """Returns the study of remaining methods."""
  return paired.Study(REMAINING.fresh, tries(REMAINING), (0, 4, 10, 32, 128))


@functools.cache
def every_lag() -> paired.Study:
  """Returns the study of every correction at every lag; its plan takes two methods' rates from the earlier runs."""
  own, *others = tries(EVERY_LAG)
  return paired.Study(EVERY_LAG.fresh, [own, earlier().among(("PPO", "M2PO")), *others], (0, 4, 10, 32, 128))


@functools.cache
def short_lag() -> paired.Study:
  """Returns the study of short lags; TOPR's rate had been chosen in that of remaining methods."""
  topr = REMAINING.tries.among(("TOPR",))
  return paired.Study(SHORT_LAG.fresh, [topr, *tries(SHORT_LAG)], (0, 4, 10, 32))


@functools.cache
def falling() -> paired.Study:
  """Returns the study of learning rates that fall; rates that do not fall are those chosen before."""
  return paired.Study(FALLING.fresh, tries(FALLING))


@functools.cache
def elsewhere() -> paired.Study:
  """Returns the study of rates that fall at other lags; TOPR's rate had been chosen in that of remaining methods."""
  return paired.Study(ELSEWHERE.fresh, [REMAINING.tries.among(("TOPR",)), *tries(ELSEWHERE)], (0, 4, 10, 32, 128))


@functools.cache
def others() -> paired.Study:
  """Returns the study of what short lags were stopped before, and of rates that fall under other corrections."""
  return paired.Study(OTHERS.fresh, [REMAINING.tries.among(("TOPR",)), *tries()], (0, 4, 10, 32, 128))


@functools.cache
def elsewhere_sorting() -> paired.Study:
  """Returns the study of rates that fall in sorting."""
  return paired.Study(ELSEWHERE_SORTING.fresh, [ELSEWHERE_SORTING.tries], (0, 10))


@functools.cache
def elsewhere_wide() -> paired.Study:
  """Returns the study of rates that fall at twice the width."""
  return paired.Study(ELSEWHERE_WIDE.fresh, [ELSEWHERE_WIDE.tries], (0, 10))


@functools.cache
def nearest() -> paired.Study:
  """Returns further seeds of what is nearest to sync."""
  return paired.Study(NEAREST.fresh, tries(MISSING), (0, 10))


@functools.cache
def sorting() -> paired.Study:
  """Returns the study of sorting."""
  return paired.Study(SORTING.fresh, [SORTING.tries], (0, 10))


def studies() -> list[paired.Study]:
  """Returns all studies on fresh seeds of ch4."""
  earliest = [study(), later(), missing(), remaining(), every_lag(), short_lag()]
  return [*earliest, falling(), nearest(), elsewhere(), others()]


@functools.cache
def gac_words() -> maps.Map:
  """Returns the map of GAC on the toy."""
  return maps.Map(GAC_WORDS.tries, GAC_WORDS.fresh)


@functools.cache
def gac_ch4() -> maps.Map:
  """Returns the map of GAC on ch4 at lag 10."""
  return maps.Map(GAC_CH4.tries, GAC_CH4.fresh)


@functools.cache
def gac_ch4_32() -> maps.Map:
  """Returns the map of GAC on ch4 at lag 32, whose warm starts are not those of lag 10."""
  return maps.Map(GAC_CH4_32.tries, GAC_CH4_32.fresh)


@functools.cache
def gac_ch4_4() -> maps.Map:
  """Returns the map of GAC on TOPR on ch4 at lag 4, of the study of short lags."""
  names = {"TOPR", *methods.GAC_ON["GAC on TOPR"], *methods.GAC_CONTROLS["GAC at random, TOPR"]}
  return maps.Map(SHORT_LAG.tries.among(names), SHORT_LAG.fresh.among(names))


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


@functools.cache
def real_seed(seed: int) -> real.Runs:
  """Returns those with 512 at several lags with a further seed, 1 to 5, each from a start of its own; 6 is with 5."""
  return real.read(reports.RESULTS / f"real_model_512_seed{seed}" / "real_model.csv")


def real_starts() -> dict[str, real.Runs]:
  """Returns all runs with 512 by their start."""
  further = ("fourth", "fifth", "sixth", "seventh", "eighth")
  starts = {"first start": real_runs(512), "second": real_lag_8(), "third": real_lags()}
  return starts | {name: real_seed(seed) for seed, name in enumerate(further, 1)}


def real_predictions() -> dict[str, list[real.Runs]]:
  """Returns all runs with 512: those that the sign of a collapse was found in, and those of its tests."""
  first, second, third, *tests = real_starts().items()
  found = [runs for _, runs in (first, second, third)]
  return {"the first three starts": found, **{f"the {name}": [runs] for name, runs in tests}}
