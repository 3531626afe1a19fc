"""The benchmark of whole runs: what it reads off the metrics, and how it lends devices."""

import json
import pathlib
import sys
import threading
import time
import types

import pytest

from experiments.benchmarks import mesh_throughput
from experiments.benchmarks._run_on_devices import run_on_devices

GSM8K = pathlib.Path(__file__).parents[1] / "data" / "gsm8k"


def row(seconds, **changes):
  names = ("generation", "waiting", "weight_push")
  zeros = {f"time/{name}": 0.0 for name in names} | {"idle/learner": 0.0, "idle/generator": 0.0}
  zeros |= {"sampler/occupancy": 0.5, "bytes/weight_push": 1.0, "staleness/max": 1.0, "reward/mean": 0.0}
  return zeros | {"time/step": seconds, "time/learning": 1.0, "tokens/trained": 100.0} | changes


def test_steps_of_the_start_and_of_the_end_do_not_count():
  rows = [row(50.0)] * 2 + [{"step": 2, "eval/accuracy": 0.0}] + [row(1.0), row(3.0)] + [row(50.0)] * 2
  found = mesh_throughput.summarize(rows, max_lag=2)
  assert (found["mean"], found["slowest"], found["tokens/s"]) == (2.0, 3.0, 50.0)


@pytest.mark.parametrize(
  ("options", "message"),
  [(["--steps", "6", "--lags", "4"], "--steps 6 leaves none that count"), ([], "no/such has no train.jsonl")],
)
def test_what_no_run_could_use_is_refused_before_the_first(options, message, capsys):
  with pytest.raises(SystemExit):
    mesh_throughput.main(["--smoke", "--gsm8k-folder", "no/such", *options])
  assert message in capsys.readouterr().err


def test_a_split_is_compared_with_its_slower_side():
  runs = [
    {"run": "sync", "devices": 1, "learning": 0.5},
    {"run": "sync", "devices": 2, "learning": 0.3},
    {"run": "async, split, lag 4", "devices": 2, "tokens": 1200.0, "mean": 0.9},
    {"run": "async, split, lag 4", "devices": 4, "tokens": 300.0, "mean": 0.9},
    {"run": "async, split, lag 4", "devices": 8, "tokens": 300.0, "mean": 0.9},  # half of them were not measured
    {"run": "sync, shared prompts", "devices": 1, "learning": 0.4},
    {"run": "async, split, lag 4, shared prompts", "devices": 2, "tokens": 1200.0, "mean": 0.6},
    {"run": "async, split, lag 4, shared prompts", "devices": 4, "tokens": 300.0, "mean": 0.9},  # its half was not
  ]
  sampler = [
    {"devices": 1, "shared_prompts": False, "tokens/s": 2000.0},
    {"devices": 1, "shared_prompts": True, "tokens/s": 6000.0},
    {"devices": 2, "shared_prompts": False, "tokens/s": 3000.0},
  ]
  found = list(mesh_throughput.compare({"runs": runs, "sampler": sampler}))
  assert [(row["devices"], row["sampling"], row["learning"]) for row in found] == [
    (2, 0.6, 0.5), (4, 0.1, 0.3), (2, 0.2, 0.4)
  ]  # fmt: skip
  assert [row["ratio"] for row in found] == pytest.approx([1.5, 3.0, 1.5])


def test_a_run_that_fails_leaves_the_others_their_rows(tmp_path, monkeypatch):
  options = types.SimpleNamespace(smoke=True, lags=[4], shared=[False], only=["sync", "split"], steps=1)

  def command(_, given):
    return [sys.executable, "-c", "" if given.get("mode") == "sync" else "raise SystemExit('no memory')"]

  monkeypatch.setattr(mesh_throughput, "_command", command)
  monkeypatch.setattr(mesh_throughput, "read_metrics", lambda path: [row(1.0)] * 9)
  rows = list(mesh_throughput.measure_runs(2, options, tmp_path))
  assert [(row["run"], row["devices"], "failed" in row) for row in rows] == [
    ("sync", 1, False), ("sync", 2, False), ("async, split, lag 4", 2, True)
  ]  # fmt: skip
  assert "no memory" in rows[2]["failed"]
  sampler = [{"devices": 1, "shared_prompts": False, "tokens/s": 1.0}]
  assert list(mesh_throughput.compare({"runs": rows, "sampler": sampler})) == []


@pytest.mark.parametrize(
  ("only", "expected"),
  [
    ([], ["sync"] * 2 + ["async, colocated, lag 2"] * 2 + ["async, split, lag 2", "async, split, lag 3"]),
    (["--only", "sync"], ["sync"] * 2),
    (["--only", "split", "sync"], ["sync"] * 2 + ["async, split, lag 2", "async, split, lag 3"]),
    (["--only", "sync", "--shared-prompts"], ["sync"] * 2 + ["sync, shared prompts"] * 2),
  ],
)
def test_all_runs_are_made_but_where_kinds_are_asked_for(only, expected, tmp_path, monkeypatch):
  (tmp_path / "train.jsonl").touch()
  monkeypatch.setattr(mesh_throughput, "_ask", lambda question: "cpu")
  monkeypatch.setattr(mesh_throughput, "train", lambda run, *_: {"run": run.name, "devices": 1, "learning": 1.0})
  given = ["--smoke", "--parts", "runs", "--lags", "2", "3", "--gsm8k-folder", tmp_path, "--out", tmp_path / "out"]
  mesh_throughput.main([*map(str, given), *only])
  assert sorted(row["run"] for row in json.loads((tmp_path / "out").read_text())["runs"]) == sorted(expected)


def test_no_token_ends_a_long_completion_and_each_step_has_a_row(tmp_path, monkeypatch):
  experiment = mesh_throughput.build(str(GSM8K), smoke=True, stops=False, **mesh_throughput.SMOKE_LONG)
  assert experiment.tokenizer.stop_ids == ()
  assert experiment.options.devices.row_tokens == 720 + experiment.options.rollout.max_completion_tokens
  steps = [row(i + 1.0, step=i, **{"response/length_mean": 128.0}) for i in range(3)]
  monkeypatch.setattr(mesh_throughput, "run_on_devices", lambda command, *_, **__: commands.append(command))
  monkeypatch.setattr(mesh_throughput, "read_metrics", lambda path: [*steps, {"step": 3, "eval/accuracy": 0.0}])
  commands = []
  options = types.SimpleNamespace(smoke=True, gsm8k_folder="DIR")
  found = list(mesh_throughput.measure_long(options, tmp_path))
  assert [(x["step"], x["seconds"], x["length"]) for x in found] == [(0, 1.0, 128.0), (1, 2.0, 128.0), (2, 3.0, 128.0)]
  assert "'stops': False" in commands[0][-1]


@pytest.mark.parametrize(("given", "expected"), [(None, "1,0"), ("3,5,7", "5,3"), ("GPU-8a,GPU-1f", "GPU-1f,GPU-8a")])
def test_devices_are_counted_among_those_that_the_caller_leaves(given, expected, tmp_path, monkeypatch):
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  if given is not None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
  program = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
  run_on_devices([sys.executable, "-c", program], [1, 0], tmp_path, forced=False)
  assert (tmp_path / "seen").read_text() == expected


@pytest.mark.parametrize("given", ["", "3"])
def test_more_devices_than_the_caller_leaves_are_refused(given, tmp_path, monkeypatch):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
  with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={given} must name 2 devices"):
    run_on_devices([sys.executable, "-c", ""], [0, 1], tmp_path, forced=False)


def test_who_needs_few_devices_does_not_overtake_who_needs_many():
  machine, order = mesh_throughput.Machine(2), []

  def use(count):
    with machine.lend(count) as devices:
      order.append(devices)

  both, one = (threading.Thread(target=use, args=(count,)) for count in (2, 1))
  with machine.lend(1):
    both.start()
    while not machine._turn.locked():  # until it waits
      time.sleep(0.001)
    one.start()
    one.join(0.05)
    assert order == []
  both.join()
  one.join()
  assert order == [[0, 1], [0]]
