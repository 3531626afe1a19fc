"""The tables and figures of the study of a pretrained model, and what its pages say of the runs."""

import numpy as np
import pytest
from scipy import stats

from experiments.reproductions import _real_model_report as reports
from experiments.reproductions import _real_model_runs as study
from experiments.reproductions import _results as results

STEPS_BY_ESS = "sequence TIS, steps by ESS"


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


def test_a_run_in_float16_is_compared_with_the_same_in_bfloat16():
  runs = {study.Run("no correction", 0, 0, 1e-4): _run([0.2, 0.4], [0.9])}
  runs[study.Run("TOPR", 8, 0, 1e-4)] = _run([0.2, 0.25], [0.9])
  plain = reports.end_table(runs, every_lag=True)
  assert plain.splitlines()[0].endswith("| end | minus its start | minus sync |")  # one TOPR has no other
  runs[study.Run("TOPR, float16", 8, 0, 1e-4)] = _run([0.2, 0.3], [0.9])
  runs[study.Run("A-3PO, float16", 8, 0, 1e-4)] = _run([0.2, 0.3], [0.9])
  header, _, sync, topr, *others = reports.end_table(runs, every_lag=True).splitlines()
  assert header.endswith("| minus its start | minus TOPR at its lag | minus sync | minus bfloat16 |")
  found = [[cell.split(" (")[0].strip(" *") for cell in line.split("|")[6:10]] for line in (sync, topr, *others)]
  assert found == [
    ["+.200", "", "", ""],
    ["+.050", "", "−.150", ""],
    ["+.100", "+.050", "−.100", "+.050"],
    ["+.100", "+.050", "−.100", ""],
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
  assert sum(map(len, parts.values())) == len(results.real_starts()) == 8
  low, found = {}, {}
  for part, starts in parts.items():
    runs = [(run, steps) for start in starts for run, steps in reports.finished(start).items()]
    signs = [(run.method, run.lag, reports.collapse(steps)) for run, steps in runs]
    means = [reports.mean_of_period(steps, "token_ess", (24, 48)) for _, steps in runs]
    low[part] = sorted((sign for sign, mean in zip(signs, means) if mean < 0.7), key=str)
    found[part] = sorted((sign for sign in signs if sign[2] is not None), key=str)
  plain = [("no correction", lag, 48) for lag in (32, 8)]
  earlier, fourth, fifth, sixth, seventh, eighth = parts
  assert found[earlier] == [("A-3PO", 32, 96), plain[0], *plain]
  assert low[earlier] == [*found[earlier], ("sequence TIS", 32, None)]
  assert found[fourth] == [*plain, ("sequence TIS", 8, 48)]
  assert low[fourth] == [("A-3PO", 32, None), *plain, ("sequence TIS", 32, None)]
  assert found[fifth] == [("no correction", 2, 72)]
  assert low[fifth] == [("sequence TIS", 32, None)]
  assert low[sixth] == [("TOPR, momentum .5, falling rate", 32, None)]
  assert found[sixth] == found[seventh] == low[seventh] == found[eighth] == low[eighth] == []
  every = [(run, steps) for start in results.real_starts().values() for run, steps in start.items()]
  early = [run for run, steps in every if reports.mean_of_period(steps, "token_ess", (0, 24)) < 0.9]
  assert sum(run.method == "no correction" for run in early) == 5
  others = [(run.method, run.lag, run.seed) for run in early if run.method != "no correction"]
  falling = [("TOPR, momentum .5, falling rate", lag, 3) for lag in (8, 32)]
  assert sorted(others) == [("A-3PO", 32, 0), *falling, ("sequence TIS", 32, 0)]
  by_ess, plain, float16 = (STEPS_BY_ESS, 32, 4), ("sequence TIS", 8, 6), ("sequence TIS, float16", 8, 6)
  for seed, period, lowest in (
    *((4, (0, 24), ("0.947", by_ess)), (4, (24, 48), ("0.910", by_ess))),
    *((5, (0, 24), ("0.910", plain)), (5, (24, 48), ("0.797", float16))),
  ):
    means = {k[:3]: reports.mean_of_period(x, "token_ess", period) for k, x in results.real_seed(seed).items()}
    assert min((f"{mean:.3f}", run) for run, mean in means.items()) == lowest


def test_only_one_run_of_vcpo_is_not_taken_for_finished():
  runs = results.real_seed(1)
  (cut,) = set(runs) - set(reports.finished(runs))
  assert (cut.method, cut.lag, max(runs[cut])) == ("VCPO, exact", 8, 61)
  for seed in (3, 4):
    runs = results.real_seed(seed)
    assert reports.finished(runs) == runs
    assert [run.lag for run in runs if run.method == "VCPO, exact"] == [2, 8, 32]


def test_what_the_page_says_of_steps_by_ess_and_no_table_has_is_in_the_runs():
  runs = {run[:2]: steps for run, steps in results.real_seed(4).items()}
  found = {run: reports.accuracies(steps) for run, steps in runs.items()}
  fallen, exact, a3po = found[STEPS_BY_ESS, 2], found["VCPO, exact", 2], found["A-3PO", 2]
  pairs = [(found[STEPS_BY_ESS, lag][96], found["VCPO, exact", lag][96]) for lag in (8, 32, 2)]
  pairs += [(fallen[96], a3po[96]), (fallen[72], fallen[96]), (a3po[96], exact[96])]
  same = [(fallen[72], other[72]) for other in (found["no correction", 0], a3po, exact)]
  ends = [{study.Run("A-3PO", 2, 0, 1e-4): {0: {"accuracy": y}, 96: {"accuracy": x}}} for x, y in pairs + same]
  said = [reports.end_table(run, 1760).splitlines()[-1].split(" | ")[5].removesuffix(" |") for run in ends]
  assert said[:3] == ["+.005 (−.015 to +.024)", "+.019 (−.000 to +.038)", "**−.026 (−.043 to −.008)**"]
  assert said[3:6] == ["**−.041 (−.059 to −.023)**", "**+.036 (+.019 to +.054)**", "+.015 (−.004 to +.035)"]
  assert not any("**" in text for text in said[6:])
  steps = {run: f"{np.median([steps[i]['update'] for i in range(1, 97)]):.3f}" for run, steps in runs.items()}
  assert [steps[STEPS_BY_ESS, lag] for lag in (2, 8, 32)] == ["0.079", "0.050", "0.031"]
  assert [steps["VCPO, exact", lag] for lag in (2, 8, 32)] == ["0.074", "0.049", "0.029"]
  assert [steps[run] for run in (("no correction", 0), ("TOPR", 8), ("TOPR", 32))] == ["0.079", "0.076", "0.078"]
  assert min((row["ess"], i) for i, row in runs[STEPS_BY_ESS, 2].items() if i) == (pytest.approx(0.247, abs=5e-4), 86)


def test_what_the_page_says_of_float16_and_no_table_has_is_in_the_runs():
  runs = {(run.method, run.lag, run.seed): steps for run, steps in results.real_seed(5).items()}
  bfloat, float16 = (
    {seed: runs[name, 8, seed] for seed in (5, 6)} for name in ("sequence TIS", "sequence TIS, float16")
  )
  right = {key: {i: round(1760 * x) for i, x in reports.accuracies(steps).items()} for key, steps in runs.items()}
  assert [right[key][0] for key in runs] == [98, 99, 98, 91, 99, 85]

  def minus(x, y, samples=1760):
    low, high = reports.difference(x, y, samples=samples)
    return f"{x - y:+.3f} ({low:+.3f} to {high:+.3f})"

  at = {key: reports.accuracies(steps) for key, steps in runs.items()}
  pairs = [(at["sequence TIS, float16", 8, seed], at["sequence TIS", 8, seed]) for seed in (5, 6)]
  starts, ends = ([minus(x[i], y[i]) for x, y in pairs] for i in (0, 96))
  assert starts == ["-0.004 (-0.019 to +0.011)", "-0.008 (-0.023 to +0.007)"]
  assert ends == ["+0.011 (-0.005 to +0.028)", "+0.006 (-0.010 to +0.021)"]
  between = [x[i] - y[i] for x, y in pairs for i in (24, 48, 72)]
  assert (f"{min(between):.3f}", f"{max(between):.3f}") == ("-0.009", "0.012")
  bounds = [reports.difference(x[i], y[i], samples=1760) for x, y in pairs for i in (24, 48, 72)]
  assert all(low < 0 < high for low, high in bounds)
  both = [sum(x[96] for x in parts) / 2 for parts in zip(*pairs, strict=True)]
  assert minus(*both, samples=2 * 1760) == "+0.009 (-0.003 to +0.020)"
  assert [minus(x[96], y[0]) for x, y in pairs] == ["+0.015 (-0.001 to +0.032)", "+0.006 (-0.009 to +0.022)"]
  fallen = [minus(x[72], x[96]) for x in reversed(pairs[0])]
  assert fallen == ["+0.020 (+0.004 to +0.037)", "+0.015 (-0.002 to +0.033)"]

  quarters = [range(a + 1, a + 25) for a in (0, 24, 48, 72)]
  rewards, more = {}, []
  for seed in (5, 6):
    for i, quarter in enumerate(quarters):
      x, y = ([steps[seed][step]["reward"] for step in quarter] for steps in (float16, bfloat))
      welch = stats.ttest_ind(x, y, equal_var=False)
      low, high = welch.confidence_interval(0.95)
      rewards[seed, i] = f"{np.mean(x) - np.mean(y):+.3f} ({low:+.3f} to {high:+.3f})"
      more += [(seed, i)] if welch.confidence_interval(1 - 0.05 / 8).low > 0 else []
  assert more == [(6, 3)]
  assert rewards[6, 3] == "+0.026 (+0.012 to +0.040)"
  wanted = ["-0.015 (-0.031 to +0.000)", "+0.019 (+0.000 to +0.037)", "+0.016 (-0.003 to +0.035)"]
  assert [rewards[5, i] for i in (1, 2, 3)] == wanted

  assert [f"{steps[seed][1]['ess']:.3f}" for steps in (bfloat, float16) for seed in (5, 6)] == [
    "0.845", "0.878", "0.999", "0.999"
  ]  # fmt: skip
  times = [
    reports.mean_of_period(float16[seed], "ess", (a, a + 24)) / reports.mean_of_period(bfloat[seed], "ess", (a, a + 24))
    for seed in (5, 6)
    for a in (0, 24, 48, 72)
  ]
  assert (f"{min(times):.1f}", f"{max(times):.1f}") == ("1.1", "2.4")
  least = [min(row["token_ess"] for x in steps.values() for i, row in x.items() if i) for steps in (bfloat, float16)]
  assert [f"{x:.2f}" for x in least] == ["0.02", "0.07"]
  assert not any(row.get("skipped") for steps in runs.values() for row in steps.values())
