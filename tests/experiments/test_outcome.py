"""The last lines of a run: commands that work as they are printed, and nothing that is already so."""

import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from async_rl import recording
from async_rl import runtime
from experiments import _outcome
from experiments import configs
from experiments import train


@pytest.fixture(autouse=True)
def _activated(monkeypatch):
  """The shell finds this interpreter as `python`, as in an activated environment."""
  monkeypatch.setenv("PATH", os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))


def describe(folder, arguments, version=7, ended_early=False):
  """The last lines of a run with a command line, as commands by label."""
  _, options = train.parse(arguments)
  folder = recording.RunFolder(pathlib.Path(folder), resumed=False, _lock=None)
  summary = runtime.Summary(folder, version, None, None, ended_early, options.schedule.lag_bound)
  return by_label(_outcome.describe_outcome(summary, options, arguments))


def by_label(text):
  return {line.split()[0] + " on" * (line.split()[0] == "Go"): line[12:] for line in text.splitlines() if line.strip()}


def test_the_command_is_the_runs_own_with_more_steps():
  given = ["gsm8k", "--gsm8k-folder", "my data", "--steps=7", "--lora-rank", "8", "--overwrite", "--max_lag", "2"]
  found = describe("runs/gsm8k", given)
  assert found["Go on"] == (
    "python -m experiments.train gsm8k --gsm8k-folder 'my data' --lora-rank 8 --max_lag 2 --steps 14"
  )
  assert found["Try"] == (
    "python -m experiments.train gsm8k --gsm8k-folder 'my data' --steps=7 --lora-rank 8 --max-lag 16 "
    "--run-dir runs/gsm8k-lag16"
  )
  assert found["Evaluate"] == "python -m experiments.evaluate runs/gsm8k --samples 8"


def test_the_commands_of_a_run_of_several_processes_are_for_all_of_them():
  given = ["quickstart", "--coordinator", "host:1", "--num-processes=2", "--process_id", "0", "--steps", "7"]
  _, options = train.parse(given)
  summary = runtime.Summary(recording.RunFolder(pathlib.Path("r"), resumed=False, _lock=None), 7, None, None, False)
  text = _outcome.describe_outcome(summary, options, given)
  assert text.endswith("(commands that train: in every process, with its number as I)")
  common = "python -m experiments.train quickstart --coordinator host:1 --num-processes=2"
  assert by_label(text)["Go on"] == f"{common} --process-id I --steps 14"


def test_plots_that_were_not_drawn_are_not_named():
  assert describe("r", ["quickstart"])["Plots"] == "r/report.png"
  assert "Plots" not in describe("r", ["quickstart", "--no-picture"])


@pytest.mark.parametrize(
  ("options", "proposed"),
  [
    ([], ["--max-lag", "16", "--run-dir", "r-lag16"]),
    (["--max-lag", "16"], ["--max-lag", "4", "--run-dir", "r-lag4"]),
    (["--max-lag", "64"], ["--max-lag", "4", "--run-dir", "r-lag4"]),
    (["--mode", "simulated", "--lag", "rounds"], ["--max-lag", "16", "--run-dir", "r-lag16"]),
    (["--mode", "sync", "--max-lag", "8"], ["--mode", "async", "--run-dir", "r-async"]),
  ],
)
def test_another_lag_is_proposed_than_that_of_the_run(options, proposed):
  command = shlex.split(describe("r", ["quickstart", *options])["Try"])
  assert command[-len(proposed) :] == proposed
  _, parsed = train.parse(command[3:])
  assert parsed.schedule.lag_bound != train.parse(["quickstart", *options])[1].schedule.lag_bound


@pytest.mark.parametrize(("lag_bound", "said"), [(0, ""), (1, "the first step after"), (3, "the first 3 steps after")])
def test_what_an_extension_changes_is_said(lag_bound, said):
  folder = recording.RunFolder(pathlib.Path("r"), resumed=False, _lock=None)
  summary = runtime.Summary(folder, 7, None, None, ended_early=False, lag_bound=lag_bound)
  text = _outcome.describe_outcome(summary, configs.load("quickstart").defaults, ["quickstart"])
  assert said in text
  assert ("is less than in a run planned longer" in text) == bool(lag_bound)


def test_nothing_is_proposed_that_could_not_work(tmp_path, monkeypatch):
  assert "Go on" not in describe("r", ["quickstart"], ended_early=True)
  falling = ["quickstart", "--steps", "7", "--decay-steps"]
  assert "Go on" not in describe("r", [*falling, "13"])
  assert describe("r", [*falling, "14"])["Go on"].endswith(" --decay-steps 14 --steps 14")
  schedule = tmp_path / "schedule.jsonl"
  schedule.write_text("")
  assert not {"Go on", "Try"} & describe("r", ["quickstart", "--mode", "simulated", "--lag", str(schedule)]).keys()
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
  assert "Watch" not in describe("r", ["quickstart"])
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboard" or find(name))
  assert describe("my r", ["quickstart"])["Watch"] == "python -m tensorboard.main --logdir 'my r/tensorboard'"


def test_a_run_that_is_already_there_is_compared_and_not_proposed(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("r-lag16").mkdir()
  assert not {"Try", "Compare"} & describe("r", ["quickstart"]).keys()
  pathlib.Path("r-lag16", "metrics.jsonl").write_text("")
  found = describe("r", ["quickstart"])
  assert found["Compare"] == "python -m experiments.report r r-lag16"
  assert "Try" not in found
  lag16 = ["quickstart", "--max-lag", "16"]
  assert describe("r-lag16", lag16)["Try"].endswith(" --max-lag 4 --run-dir r-lag4")
  pathlib.Path("r").mkdir()
  pathlib.Path("r", "metrics.jsonl").write_text("")
  assert describe("r-lag16", lag16)["Compare"] == "python -m experiments.report r-lag16 r"


def test_the_interpreter_is_named_so_that_the_shell_finds_it(tmp_path, monkeypatch):
  assert subprocess.run(["which", _outcome._python()], capture_output=True, check=False).returncode == 0
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
  assert describe("r", ["quickstart"])["Go on"].startswith(".venv/bin/python -m experiments.train quickstart ")
  monkeypatch.setattr(sys, "executable", "/my envs/bin/python3")
  assert describe("r", ["quickstart"])["Evaluate"].startswith("'/my envs/bin/python3' -m experiments.evaluate r")


def test_a_script_that_trains_is_proposed_itself(monkeypatch):
  monkeypatch.setenv(_outcome.COMMAND, "bash experiments/quickstart.sh")
  assert describe("r", ["quickstart", "--seed", "1"])["Go on"] == ("bash experiments/quickstart.sh --seed 1 --steps 14")
  script = pathlib.Path(_outcome.__file__).with_name("quickstart.sh").read_text()
  assert f"export {_outcome.COMMAND}=" in script
