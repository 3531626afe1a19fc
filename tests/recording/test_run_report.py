"""Pictures are drawn from whatever a run measured, and tables hold the values that it ended with."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from async_rl import recording
from async_rl.recording import _plots
from async_rl.recording import _run_report
from experiments import report


def make_run(path, steps=45, seed=0, only=None, **constant):
  """Writes the folder of a run with every metric that a panel shows, except for the reference policy's.

  With `only` some metrics, its picture is drawn in a fraction of the time.
  """
  folder = recording.RunFolder.open(path, "text", {"seed": seed})
  folder.close()
  rng = np.random.default_rng(seed)
  writer = recording.MetricsWriter(folder)
  for step in range(1, steps + 1):
    progress = step / steps
    evaluation = 0.6 if step % 30 == 1 else 0.0
    values = {
      "reward/mean": 0.2 + 0.3 * progress + 0.05 * rng.normal(),
      "response/length_mean": 20 + rng.normal(),
      "response/length_max": 24.0,
      "entropy": 0.3 - 0.1 * progress,
      "kl/behavior": 1e-3 * min(step, 4) + 1e-3 * rng.random(),
      "staleness/mean": min(step, 3.5) + 0.2 * rng.normal(),
      "staleness/max": float(min(step, 4)),
      "ess/sequence": 0.6 + 0.1 * rng.normal() if step % 17 else float("nan"),
      "ess/token": 0.98,
      "grad/norm": float(np.exp(rng.normal())),
      "grad/cosine_to_previous": 0.1 * rng.normal(),
      "optimizer/learning_rate": 2e-4 * min(1, step / 20),
      "throughput/generated": 9000 + 500 * rng.normal(),
      "throughput/trained": 8000 + 500 * rng.normal(),
      "time/step": 0.5 + evaluation + 0.1 * rng.random(),
      "time/generation": 0.4 + 0.1 * rng.random(),
      "time/weight_push": 0.01,
      "time/learning": 0.35,
      "time/waiting": 0.1,
      "time/evaluation": evaluation,
      "time/checkpoint": 0.0,
      "idle/learner": 0.1 + 0.05 * rng.random(),
      "idle/generator": 0.02,
    }
    writer.write(step, {name: value for name, value in (values | constant).items() if only is None or name in only})
    if step % 30 == 0:
      writer.write(step, {"eval/accuracy": 0.2 + 0.25 * progress})
  writer.close()
  return folder


def colors(path):
  red, green, blue = np.moveaxis((imread(path)[..., :3] * 255).round().astype(int), -1, 0)
  return {f"#{code:06X}" for code in np.unique((red << 16) + (green << 8) + blue)}


def drawn(path):
  """The figure of a run and its panels that have values, in the order of its axes."""
  rows = _run_report._read_run(path)
  figure = _plots.draw([(panel, _plots.make_curves(panel, rows)) for panel in _plots.PANELS])
  return figure, {axes.get_title("left"): axes for axes in figure.axes}


def test_a_panel_is_shown_for_every_metric_that_was_measured_and_for_no_other(tmp_path):
  _, axes = drawn(make_run(tmp_path / "run").path)
  assert {panel.title for panel in _plots.PANELS} - axes.keys() == {"KL(sampler || reference)"}
  for panel in _plots.PANELS:
    if panel.title in axes:
      labels = axes[panel.title].get_legend_handles_labels()[1]
      assert sorted(labels) == sorted([*panel.stacked, *panel.metrics])
      assert axes[panel.title].get_ylabel() == panel.unit


def test_curves_lie_within_their_panels(tmp_path):
  _, axes = drawn(make_run(tmp_path / "run").path)
  for panel in axes.values():
    for line in panel.lines:
      x, y = line.get_data()
      assert panel.get_xlim()[0] <= x.min() <= x.max() <= panel.get_xlim()[1]
      assert panel.get_ylim()[0] <= np.nanmin(y) <= np.nanmax(y) <= panel.get_ylim()[1]


def test_no_two_texts_of_a_picture_overlap(tmp_path, monkeypatch):
  """Panels with all that belongs to them, titles and legends, each beside the others and on the picture."""
  figures = []
  monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
  runs = [make_run(tmp_path / f"a run with a rather long name {i}", steps=45, seed=i).path for i in range(8)]
  recording.report_run(runs[0])
  recording.compare_runs(runs, tmp_path / "compare.png")
  assert len(figures) == 2
  for figure in figures:
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    boxes += [text.get_window_extent() for text in (figure._suptitle, figure._supxlabel) if text is not None]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    inside = [(axes.bbox, axes.get_legend().get_window_extent()) for axes in figure.axes if axes.get_legend()]
    assert all(axes.x0 <= legend.x0 and legend.x1 <= axes.x1 for axes, legend in inside)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_the_breakdown_of_a_step_adds_up_to_the_step(tmp_path):
  times = {"time/step": 2.0, "time/learning": 1.0, "time/waiting": 0.5, "time/evaluation": 0.3, "time/checkpoint": 0.2}
  _, axes = drawn(make_run(tmp_path / "run", steps=10, **times).path)
  *_, top = axes["Step breakdown"].collections
  np.testing.assert_allclose(top.get_datalim(axes["Step breakdown"].transData).y1, 1.0)
  shares = {line.get_label(): line.get_ydata() for line in axes["Step breakdown"].lines}
  np.testing.assert_allclose(shares["weight push"], 0.01 / 2)


def test_a_metric_without_a_value_at_some_steps_is_a_gap():
  rows = [
    {"step": 1, "time/learning": 0.5},
    {"step": 2, "time/step": 2.0, "time/learning": None},
    {"step": 3, "time/step": 2.0, "time/learning": 0.5},
  ]
  np.testing.assert_array_equal(_plots.make_curve("", "time/learning/share", rows).values, [np.nan, np.nan, 0.25])


def test_report_of_a_run_that_measured_little(tmp_path):
  folder = recording.RunFolder.open(tmp_path / "short", "text", {})
  folder.close()
  recording.write_report(folder)  # no rows at all
  assert "#0072B2" not in colors(folder.report)
  writer = recording.MetricsWriter(folder)
  writer.write(1, {"reward/mean": float("nan")})
  writer.close()
  recording.write_report(folder)
  assert "#0072B2" not in colors(folder.report)
  assert recording.tabulate_final_values([folder.path]).splitlines()[1].split() == ["short", "1", *"-" * 8]


def test_a_run_has_the_same_color_in_every_panel_of_a_comparison():
  rows = [[{"step": 1, "entropy": 1.0}], [{"step": 1, "entropy": 1.0, "reward/mean": 0.5}]]
  panels = [(panel, [_plots.make_curve(str(i), next(iter(panel.metrics.values())), of_run) for i, of_run in
             enumerate(rows)]) for panel in _plots.COMPARED]  # fmt: skip
  reward, entropy = _plots.draw(panels).axes
  assert [line.get_color() for line in entropy.lines] == ["#0072B2", "#D55E00"]
  assert [(line.get_label(), line.get_color()) for line in reward.lines] == [("1", "#D55E00")]


def test_the_table_holds_means_over_the_last_twentieth_the_last_accuracy_and_rates_of_the_run(tmp_path):
  folder = recording.RunFolder.open(tmp_path / "run", "text", {})
  folder.close()
  writer = recording.MetricsWriter(folder)
  for step in range(1, 41):
    seconds = 3.0 if step <= 20 else 1.0
    writer.write(step, {"reward/mean": step / 100, "throughput/generated": 900.0 / seconds, "time/step": seconds})
    writer.write(step, {"eval/accuracy": step / 1000})
  writer.close()
  heading, values = recording.tabulate_final_values([folder.path]).splitlines()
  found = dict(zip(heading.split(), values.split(), strict=True))
  assert found["run"] == "run"
  assert found["steps"] == "40"
  assert (found["reward"], found["accuracy"]) == ("0.395", "0.040")
  assert (found["tokens/s"], found["s/step"]) == ("450", "2")  # 900 tokens in each step, of 2 s on average
  assert found["entropy"] == "-"


def test_the_command_draws_one_run_or_compares_several(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  runs = [make_run(tmp_path / name / "run", steps=4).path for name in "ab"]
  assert report.main(["a/run"]) == 0
  assert f"Plots: {runs[0] / 'report.png'}" in capsys.readouterr().out
  assert {"#0072B2", "#D55E00"} <= colors(runs[0] / "report.png")
  assert report.main(["a/run", "b/run", "--output", "both.png"]) == 0
  printed = capsys.readouterr().out
  assert [line.split()[0] for line in printed.splitlines()[:3]] == ["run", "a/run", "b/run"]
  assert {"#0072B2", "#D55E00"} <= colors(tmp_path / "both.png")


def test_runs_that_cannot_be_drawn_are_one_sentence(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  make_run(tmp_path / "good", steps=4)
  (tmp_path / "other").mkdir()
  recording.RunFolder.open(tmp_path / "empty", "text", {}).close()
  (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 1, "cut o')
  damaged = make_run(tmp_path / "damaged", steps=4)
  lines = damaged.metrics.read_text().splitlines(keepends=True)
  damaged.metrics.write_text("".join([lines[0], "\x00\x00\n", *lines[1:]]))
  for runs, message in {
    (): "give the folder of a run",
    ("good", "nowhere"): "nowhere holds no run: there is no such folder",
    ("other",): "other holds no run: metrics.jsonl is missing",
    ("good", "empty"): "empty has no metrics yet: metrics.jsonl holds no complete line",
    ("damaged",): "metrics.jsonl, line 2: .*is not a row of metrics; delete the line, or resume",
    ("good", "./good"): "the same run is given twice",
  }.items():
    assert report.main(list(runs)) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 1
    assert re.search(message, printed.err), printed.err
  assert report.main(["good", "--output", "picture.xyz"]) == 2
  assert "xyz" in capsys.readouterr().err


def test_names_that_the_plots_would_read_otherwise_stand_as_they_are(tmp_path, monkeypatch):
  """Matplotlib sets $...$ as a formula, and hides labels that begin with an underscore; a font lacks most letters."""
  names = ["a$_$b", "_draft", "日本"]
  for seed, name in enumerate(names):
    make_run(tmp_path / name, steps=2, seed=seed, only=["entropy"])
    recording.report_run(tmp_path / name)
  figures, save = [], _run_report._save
  monkeypatch.setattr(_run_report, "_save", lambda figure, output: figures.append(figure) or save(figure, output))
  recording.compare_runs([tmp_path / name for name in names], tmp_path / "both.png")
  (legend,) = figures[0].legends
  assert [text.get_text() for text in legend.get_texts()] == names


def test_the_path_that_is_told_is_that_of_the_picture(tmp_path):
  make_run(tmp_path / "run", steps=2, only=["entropy"])
  for given, written in (("plot", "plot.png"), ("v1.5.svg", "v1.5.svg")):
    assert recording.report_run(tmp_path / "run", tmp_path / given) == tmp_path / written
    assert (tmp_path / written).exists()
  with pytest.raises(IsADirectoryError, match="must be a file, got output='.*run', which is a folder"):
    recording.report_run(tmp_path / "run", tmp_path / "run")
  assert not (tmp_path / "run.png").exists()
