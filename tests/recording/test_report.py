"""Pictures are drawn from whatever a run measured."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._report import _PANELS
from async_rl.recording._report import _curve
from async_rl.recording._report import _draw
from async_rl.recording._report import _read
from async_rl.recording._report import compare_runs
from async_rl.recording._report import write_report
from async_rl.recording._run_folder import RunFolder


def make_run(path, steps=120, seed=0):
  folder = RunFolder.open(path, "text", {"seed": seed})
  folder.close()
  rng = np.random.default_rng(seed)
  writer = MetricsWriter(folder)
  for step in range(1, steps + 1):
    progress = step / steps
    writer.write(
      step,
      {
        "reward/mean": 0.2 + 0.3 * progress + 0.05 * rng.normal(),
        "staleness/mean": min(step, 3.5) + 0.2 * rng.normal(),
        "staleness/max": float(min(step, 4)),
        "ess/sequence": 0.6 + 0.1 * rng.normal() if step % 17 else float("nan"),
        "ess/token": 0.98,
        "idle/learner": 0.1 + 0.05 * rng.random(),
        "idle/generator": 0.02,
        "grad/cosine_to_previous": 0.1 * rng.normal(),
      },
    )
    if step % 30 == 0:
      writer.write(step, {"eval/accuracy": 0.2 + 0.25 * progress})
  writer.close()
  return folder


def colors(path):
  pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
  return {"#" + "".join(f"{channel:02X}" for channel in pixel) for pixel in np.unique(pixels, axis=0)}


def test_report_of_a_run(tmp_path):
  folder = make_run(tmp_path / "quickstart")
  assert write_report(folder) == folder.report
  assert {"#0072B2", "#D55E00"} <= colors(folder.report)


def test_curves_lie_within_their_panels(tmp_path):
  rows = _read(make_run(tmp_path / "run").path)
  figure = _draw([[_curve(label, metric, rows) for label, metric in panel.metrics.items()] for panel in _PANELS])
  for axes, panel in zip(figure.axes, _PANELS):
    assert len({line.get_label() for line in axes.lines} & panel.metrics.keys()) == len(panel.metrics)
    for line in axes.lines:
      x, y = line.get_data()
      assert axes.get_xlim()[0] <= x.min() <= x.max() <= axes.get_xlim()[1]
      assert axes.get_ylim()[0] <= np.nanmin(y) <= np.nanmax(y) <= axes.get_ylim()[1]


def test_report_of_a_run_that_measured_little(tmp_path):
  folder = RunFolder.open(tmp_path / "short", "text", {})
  folder.close()
  write_report(folder)  # no rows at all
  assert "#0072B2" not in colors(folder.report)
  with pytest.raises(FileNotFoundError, match=r"short has no metrics.jsonl with values: is it the folder of a run"):
    compare_runs([folder.path], tmp_path / "compare.png")
  writer = MetricsWriter(folder)
  writer.write(1, {"reward/mean": float("nan")})
  writer.close()
  write_report(folder)
  assert "#0072B2" not in colors(folder.report)


def test_comparison(tmp_path):
  runs = [make_run(tmp_path / f"run{i}" / "same name", steps=30, seed=i).path for i in range(3)]
  output = compare_runs(runs, tmp_path / "compare.png")
  assert {"#0072B2", "#D55E00", "#009E73"} <= colors(output)


def test_matplotlib_is_imported_only_to_draw():
  code = "import sys, async_rl.runtime; assert 'matplotlib' not in sys.modules and 'tensorboardX' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
