"""Studies on fresh seeds: configurations are compared by seed, within a study, over several and along the training."""

import numpy as np
import pytest
from matplotlib import axes

from experiments.reproductions import _intervals as intervals
from experiments.reproductions import _lag_sweep_gac as gac
from experiments.reproductions import _lag_sweep_map as maps
from experiments.reproductions import _lag_sweep_methods as sweep_methods
from experiments.reproductions import _lag_sweep_paired as paired
from experiments.reproductions import _lag_sweep_plan as plans
from experiments.reproductions import _lag_sweep_run as runs
from experiments.reproductions import _lag_sweep_second as second
from experiments.reproductions import _lag_sweep_studies as several
from experiments.reproductions import _lag_sweep_table as sweep


def test_the_map_of_gac_compares_the_chosen_with_the_correction_and_with_random_skips():
  name, other = gac.name("TOPR", 0.1, 0.4), gac.name("TOPR", 0.2, 0.8)
  tried = {("TOPR", 10, 0.1): [0.5], ("TOPR", 10, 0.2): [0.6], (name, 10, 0.1): [0.7], (other, 10, 0.1): [0.4]}
  rest = {key: [0.1] for key in gac.thresholds("TOPR") if key not in (name, other)}
  tried |= {(key, 10, 0.1): value for key, value in rest.items()}
  fresh = {
    ("TOPR", 10, 0.2): [0.2, 0.3, 0.4],
    (name, 10, 0.1): [0.3, 0.4, 0.5],
    (gac.at_random(name), 10, 0.1): [0.2] * 3,
  }
  drawn = maps.Map(_table(tried), _table(fresh))
  assert (drawn.bases, drawn.lags, drawn.comparisons) == (["TOPR"], [10], 2)
  (line,) = drawn.differences().splitlines()[2:]
  assert line.split(" | ")[2:5] == [".300 ± .248 at 2e-1*", "GAC .1/.4", "+.100"]  # on the tried seed .70 and .60
  assert line.endswith("| **+.100 ± .000** | +.200 ± .248 (no difference) |")
  (line,) = drawn.thresholds().splitlines()[2:]
  assert line.split(" | ")[6] == "+.100 (.00)"  # .70 minus the best of .50 and .60
  assert drawn.counts() == "11 runs on 1 seeds to choose on, 9 on 3 others, 0 to 2; 2 comparisons."


def test_a_method_is_compared_with_itself_at_the_shorter_lag_by_seed():
  fresh = _table(
    {
      ("sync", 0, 1e-4): [0.5, 0.6, 0.8],
      # The second alone loses more than .1; .7 − .8 is a little below −.1 in float32.
      ("TOPR", 4, 1e-4): [0.45, 0.45, 0.7],
      ("TOPR", 10, 1e-4): [0.4, 0.4, 0.65],
      ("TOPR", 10, 2e-4): [0.9, 0.9, 0.9],  # another rate
    }
  )
  chosen = _table({("sync", 0, 1e-4): [0.5], ("TOPR", 4, 1e-4): [0.4], ("TOPR", 10, 1e-4): [0.4]})
  study = paired.Study(fresh, [chosen], (0, 4, 10))
  *_, first, second_line = several.by_lag([study], "TOPR", (4, 10), 1e-4, 1).splitlines()
  assert first.startswith("| 4 | 1e-4 | ")
  assert first.endswith(" | 1 of 3 |  |  |")
  assert second_line.endswith(" | 2 of 3 | **−.050 ± .000** | 3 |")
  more = _table({("sync", 0, 1e-4): [0.5, 0.6], ("TOPR", 4, 1e-4): [0.3, 0.4], ("TOPR", 10, 1e-4): [0.35, 0.45]})
  other = paired.Study(more, [chosen], (0, 4, 10))  # each study's own sync, each seed with itself
  *_, first, second_line = several.by_lag([study, other], "TOPR", (4, 10), 1e-4, 1).splitlines()
  assert first.endswith(" | 3 of 5 |  |  |")
  gained = intervals.verdict(np.array([-0.05, -0.05, -0.05, 0.05, 0.05]), 1)
  assert second_line.endswith(f" | 4 of 5 | {gained} | 5 |")
  # One with a single lag counts there, and in no difference of lags.
  single = paired.Study(_table({("sync", 0, 1e-4): [0.5, 0.6], ("TOPR", 10, 1e-4): [0.5, 0.6]}), [chosen], (0, 10))
  *_, same, second_line = several.by_lag([study, single, other], "TOPR", (4, 10), 1e-4, 1).splitlines()
  assert same == first
  assert second_line.endswith(f" | 4 of 7 | {gained} | 5 |")


def test_accuracies_are_compared_along_the_training(tmp_path):
  made = plans.Results(tmp_path)
  for method, lag, early, late in (("sync", 0, (0.5, 0.25), (0.5, 0.75)), ("TOPR", 4, (0.25, 0.25), (0.75, 0.75))):
    curves = {name: np.zeros((2, 40)) for name in runs.CURVES}
    curves["accuracy"][:, :5] += np.array(early)[:, None]
    curves["accuracy"][:, -5:] += np.array(late)[:, None]
    made.add([plans.Run("ch4", method, lag, 2e-4, seed) for seed in range(2)], curves, {0: 7, 1: 7})
  made.save("ch4")
  split = paired.Split(tmp_path, "ch4", (), range(2))
  header, _, line = several.by_update(split, [(("TOPR", 4, 2e-4), ("sync", 0, 2e-4))]).splitlines()
  assert header.split(" | ")[3:5] == ["1–50", "51–100"]
  assert header.endswith(" | 351–400 |")
  assert line == "| 4 | TOPR at 2e-4 | sync at 2e-4 | −.12 |" + " +.00 |" * 6 + " +.12 |"


def test_runs_that_lose_much_are_told_apart_from_the_others(tmp_path):
  made = plans.Results(tmp_path)
  for method, lag, accuracies, cosines in (
    ("sync", 0, (0.75, 0.5, 0.75), (0.0, 0.0, 0.0)),
    ("TOPR", 4, (0.625, 0.5, 0.5), (0.5, 0.25, 1.0)),  # the first and the last lose more than .1
    ("TOPR", 10, (0.75, 0.5, 0.75), (0.125, 0.125, 0.125)),
  ):
    curves = {name: np.zeros((3, 40)) for name in runs.CURVES}
    curves["accuracy"] += np.array(accuracies)[:, None]
    curves["cosine"][:, 20:] += np.array(cosines)[:, None]  # the first half does not count
    made.add([plans.Run("ch4", method, lag, 2e-4, seed) for seed in range(3)], curves, dict.fromkeys(range(3), 7))
  made.save("ch4")
  split = paired.Split(tmp_path, "ch4", (), range(3))
  *_, much, less, others = several.by_loss([split], "TOPR", (4, 10), 2e-4).splitlines()
  assert much.split(" | ")[:4] == ["| 4", "more than .1", "2", ".75 ± 3.18"]
  assert less.split(" | ")[:4] == ["| 4", "less", "1", ".25"]
  assert others.split(" | ")[:4] == ["| 10", "less", "3", ".12 ± .00"]


def test_what_is_covered_says_fresh_seeds_edges_and_tries(study):
  tries = [_table({("SAT", 10, 1e-4): [0.5, 0.6]}), _table({("SAT", 10, 1e-4): [0.5]})]
  lines = several.coverage([study], tries, ["PPO", "SAT"], (10, 32)).splitlines()[2:]
  assert lines == ["| PPO | 3* | – |", "| SAT | (3) | – |"]


def test_columns_stand_beside_each_other_at_their_own_rates(study, tmp_path):
  other = paired.Study(
    _table({("sync", 0, 1e-4): [0.1, 0.2], ("PPO", 10, 5e-5): [0.0, 0.2], ("TOPR", 10, 1e-4): [0.2, 0.3]}),
    [_table({("sync", 0, 1e-4): [0.5], ("PPO", 10, 5e-5): [0.4], ("PPO", 10, 1e-4): [0.3]})],
    (0, 10),
  )
  columns = [second.Column("sums", [study], {("PPO", 10): 1e-4}, 1), second.Column.of("sorting", [other], 1)]
  sync, *lines = second.beside(columns, ["TOPR", "PPO", "seq TIS"], (10,)).splitlines()[2:]
  assert sync == "| 0 | sync, its accuracy | .700 ± .248 (3 seeds) | .150 ± .635 (2 seeds) |"
  assert lines == [
    "| 10 | TOPR |  | **+.100 ± .000** at 1e-4 |",
    "| 10 | PPO | −.100 ± .248 (no difference) at 1e-4 | −.050 ± .635 (no difference) at 5e-5* |",
  ]
  second.draw(columns, ["TOPR", "PPO"], (10,), tmp_path / "figure.png")
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def _table(rows: dict[tuple[str, int, float], list[float]]) -> sweep.Table:
  curves = np.zeros((len(rows), len(runs.CURVES), 4), np.float16)
  seeds = list(range(len(next(iter(rows.values())))))
  return sweep.Table(list(rows), seeds, np.array(list(rows.values()), np.float32), curves)


@pytest.fixture
def study():
  earlier = _table(
    {(name, lag, rate): [0.5 + rate] for name, lag in (("sync", 0), ("PPO", 10)) for rate in (1e-4, 2e-4)}
  )
  fresh = _table(
    {
      ("sync", 0, 2e-4): [0.6, 0.8, 0.7],
      ("PPO", 10, 2e-4): [0.5, 0.7, 0.6],
      ("PPO", 10, 1e-4): [0.5, 0.6, 0.7],
      ("no correction", 10, 1e-4): [0.1, 0.1, 0.4],
      ("TOPR", 10, 2e-4): [0.6, np.nan, np.nan],
    }
  )
  return paired.Study(fresh, [earlier], (0, 10))


def test_a_study_compares_with_sync_and_with_the_control_at_the_same_rate(study):
  header, _, *lines = study.table(10).splitlines()
  assert header == "| lag 10 | rate | accuracy | minus sync | control | minus control |"
  assert [line.split(" | ")[:2] for line in lines] == [
    ["| PPO", "2e-4 c*"],
    ["| PPO", "1e-4"],
    ["| no correction", "1e-4"],
  ]
  assert "| **−.100 ± .000** |" in lines[0]
  assert lines[0].endswith("|  |  |")  # there is no run without a correction at this rate, nor a chosen one
  assert "| no correction | +.400 ± " in lines[1]
  assert study.comparisons == 4


def test_what_is_like_a_variant_of_sync_is_compared_with_it_as_well():
  names = ("sync", "sync, OPOB exact", "sync, falling rate", "VESPO + OPOB, exact", "TOPR, falling rate", "TOPR")
  lags = [0 if name.startswith("sync") else 10 for name in names]
  accuracies = ([0.5, 0.6], [0.6, 0.7], [0.7, 0.8], [0.4, 0.5], [0.3, 0.4], [0.2, 0.3])
  fresh = _table({(name, lag, 2e-4): x for name, lag, x in zip(names, lags, accuracies, strict=True)})
  study = paired.Study(fresh, [fresh], (0, 10))
  header, _, exact, falling, plain = study.table(10).splitlines()
  assert header.split(" | ")[3:6] == ["minus sync", "minus sync, OPOB exact", "minus sync, falling rate"]
  assert exact.split(" | ")[4:6] == ["**−.200 ± .000**", ""]
  assert falling.split(" | ")[4:8] == ["", "**−.400 ± .000**", "TOPR", "**+.100 ± .000** |"]
  assert plain.split(" | ")[4:6] == ["", ""]
  assert study.comparisons == 5 + 1 + 1 + 1  # sync, both variants of it, and TOPR as a control


def test_a_configuration_without_all_seeds_is_left_out(study):
  assert "TOPR" not in study.table(10)


def test_a_study_without_sync_is_refused():
  rows = _table({("PPO", 10, 1e-4): [0.5, 0.6]})
  with pytest.raises(ValueError, match="no sync run on every seed"):
    paired.Study(rows, [rows])


def test_two_studies_together_pair_each_with_its_own_sync(study):
  fresh = _table({("sync", 0, 2e-4): [0.1, 0.2], ("PPO", 10, 2e-4): [0.0, 0.1], ("TOPR", 10, 2e-4): [0.5, 0.5]})
  earlier = _table({("sync", 0, 2e-4): [0.5]})
  other = paired.Study(fresh, [earlier], (0, 10))
  assert several.shared([study, other]) == [("PPO", 10, 2e-4)]
  *_, line = several.together([study, other], 1).splitlines()
  assert line == "| PPO | 10 | 2e-4 | **−.100 ± .000** | **−.100 ± .000** | 5 | **−.100 ± .000** |"
  third = paired.Study(_table({("sync", 0, 2e-4): [0.1, 0.2], ("TOPR", 10, 2e-4): [0.2, 0.3]}), [earlier], (0, 10))
  *_, line = several.together([study, other, third], 1).splitlines()
  assert line.startswith("| TOPR | 10 | 2e-4 |  | +.350 ± .635 (no difference) | **+.100 ± .000** | 4 | ")


def test_diagnostics_are_means_over_a_run():
  fresh = _table({("sync", 0, 2e-4): [0.6, 0.8], ("PPO", 10, 2e-4): [0.5, 0.7]})
  fresh.curves[1, runs.CURVES.index("kl")] = [0.0, 0.5, 1.0, 1.5]
  text = paired.Study(fresh, [fresh], (0, 10)).diagnostics((10,))
  assert text.splitlines()[2:] == ["| PPO | 10 | 2e-4 | .60 | .00 | .75 | .00 | .00 | .00 |"]


def test_a_rate_at_the_edge_is_starred():
  earlier = _table(
    {(name, lag, rate): [0.5 + rate] for name, lag in (("sync", 0), ("PPO", 10)) for rate in (1e-4, 2e-4)}
  )
  fresh = _table({("sync", 0, 2e-4): [0.6, 0.8], ("PPO", 10, 2e-4): [0.5, 0.7], ("PPO", 10, 1e-4): [0.5, 0.6]})
  lines = paired.Study(fresh, [earlier], (10,)).table(10).splitlines()[2:]
  assert [line.split(" | ")[1] for line in lines] == ["2e-4 c*", "1e-4"]


def test_a_study_is_drawn(study, tmp_path):
  study.draw(tmp_path / "figure.png")
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_differences_by_lag_are_drawn_over_the_seeds_of_all_studies(study, tmp_path, monkeypatch):
  other = paired.Study(_table({("sync", 0, 2e-4): [0.5], ("PPO", 10, 2e-4): [0.9]}), [study.fresh], (0, 10))
  np.testing.assert_allclose(several.minus_sync([study, other], ("PPO", 10, 2e-4)), [-0.1, -0.1, -0.1, 0.4], atol=1e-6)
  drawn, draw = [], axes.Axes.errorbar

  def errorbar(self, x, y, yerr, **style):
    drawn.append((y, yerr))
    return draw(self, x, y, yerr, **style)

  monkeypatch.setattr(axes.Axes, "errorbar", errorbar)
  several.draw_by_lag([study, other], {"PPO's clip": [("PPO", 10, 2e-4)]}, tmp_path / "figure.png")
  (([mean], [half]),) = drawn
  assert (mean, half) == pytest.approx(intervals.interval(np.array([-0.1, -0.1, -0.1, 0.4]))[:2], abs=1e-6)
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_every_control_is_a_method_and_differs():
  for method, control in paired.CONTROL_OF.items():
    assert method in sweep_methods.METHODS
    assert control in sweep_methods.METHODS
    assert method != control
