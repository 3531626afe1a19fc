"""A config in a file of the user's own: it is trained, exported and evaluated as those of the project are."""

import shlex
import shutil
import sys

import pytest

from async_rl.recording import read_metrics
from experiments import evaluate
from experiments import export
from experiments import report
from experiments import train

MINE = """
'''Sums of mine.'''

import dataclasses

from async_rl import learning
from async_rl import losses
from async_rl import runtime
from async_rl import tasks
from experiments.configs import quickstart


@dataclasses.dataclass(frozen=True)
class Digits(tasks.Sums):
  def reward(self, prompt, text, finish):
    return sum(c.isdigit() for c in text) / 24


@dataclasses.dataclass(frozen=True)
class Options:
  #: How often the reward counts.
  scale: float = 1.0
  #: Whether the loss raises.
  broken: bool = False
  training: runtime.Training = runtime.Training(groups=2, samples=2)
  rollout: runtime.Rollout = runtime.Rollout(
    max_prompt_tokens=16, max_completion_tokens=24, slots=8, length_buckets=1
  )
  schedule: runtime.Schedule = runtime.Schedule(mode="sync")
  devices: runtime.Devices = runtime.Devices(reward_workers=1)
  length: runtime.Length = runtime.Length(steps=1)
  output: runtime.Output = runtime.Output(run_dir="runs/mine", eval_prompts=4)


def build(options):
  def loss(logprobs, behavior, advantages, mask):
    if options.broken:
      raise ValueError("of the user")
    return losses.reinforce(logprobs, behavior, advantages * options.scale, mask)

  given = quickstart.build(quickstart.Options())
  objective = learning.Objective(loss, losses.rloo_advantages)
  task = Digits(data_dir="data")
  return dataclasses.replace(given, name="mine", options=options, task=task, start=None, objective=objective)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory, two_devices):
  """The file of a config of the user's own, outside of the package, in the working directory's folder `mine`."""
  folder = tmp_path_factory.mktemp("home")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    patch.setattr(sys, "path", [*sys.path])
    (folder / "mine").mkdir()
    file = folder / "mine" / "config_of_mine.py"
    file.write_text(MINE)
    yield file
  sys.modules.pop("config_of_mine", None)


def test_an_error_in_a_users_loss_keeps_its_traceback(mine):
  with pytest.raises(ValueError, match="of the user"):
    train.main([str(mine), "--broken", "--run-dir", "broken"])


@pytest.mark.slow
def test_a_config_of_ones_own_is_trained_exported_and_evaluated_by_the_commands_that_are_printed(mine, capsys):
  def run(command):
    _, module, name, *arguments = shlex.split(command)
    assert (module, name) == ("-m", "experiments.train")
    assert train.main(arguments) == 0
    printed = capsys.readouterr().out
    return {line[:12].strip(): line[12:] for line in printed.splitlines() if " -m experiments." in line}

  first = run(f"python -m experiments.train {mine} --scale 2 --run-dir 'my run' --overwrite --steps=1")
  shutil.copytree("my run", shlex.split(first["Try"])[-1])
  again = run(first["Go on"])
  assert "--steps 4" in again["Go on"]
  metrics = mine.parents[1] / "my run" / "metrics.jsonl"
  assert [row["step"] for row in read_metrics(metrics) if "reward/mean" in row] == [1, 2]
  assert report.main(shlex.split(again["Compare"])[3:]) == 0
  assert "my run-async" in capsys.readouterr().out
  assert export.main(["my run", "exported"]) == 0

  moved = mine.parents[1] / "config_of_mine.py"
  mine.rename(moved)
  del sys.modules["config_of_mine"]
  evaluation = shlex.split(again["Evaluate"])[3:]
  assert evaluate.main(evaluation) == 2
  assert "give the path of its file with --config" in capsys.readouterr().err
  assert evaluate.main([*evaluation, "--config", str(moved), "--prompts", "4"]) == 0
  assert "config_of_mine.py, step 2, " in capsys.readouterr().out
  options = ["--scale", "2", "--run-dir", "my run"]
  assert train.main([str(moved), *options, "--steps", "2"]) == 0  # the name is the same, so it resumes
  assert "resumed at step 2" in "".join(capsys.readouterr())
  assert train.main([str(moved), "--scale", "3", "--run-dir", "my run"]) == 2
  assert "scale: 2.0 -> 3.0" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("name", "text", "message"),
  [
    ("nowhere.py", None, "there is no config file"),
    ("no_config.py", "x = 1", "must define Options"),
    ("json.py", MINE, "has the name of another module"),
  ],
)
def test_a_file_that_is_no_config_is_one_sentence(tmp_path, capsys, monkeypatch, name, text, message):
  monkeypatch.setattr(sys, "path", [*sys.path])
  if text is not None:
    (tmp_path / name).write_text(text)
  assert train.main([str(tmp_path / name)]) == 2
  assert message in capsys.readouterr().err
