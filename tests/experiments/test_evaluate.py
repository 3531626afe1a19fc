"""Evaluation of checkpoints: the estimator against enumeration, the command on a real run."""

import itertools
import re
import subprocess

import chex
import jax
import numpy as np
import pytest
import tiny
from hosts_program import finish
from hosts_program import start_processes

from async_rl import models
from async_rl import runtime
from experiments import evaluate
from experiments import export
from experiments import train
from experiments.configs import quickstart


@pytest.mark.parametrize(("samples", "k"), [(1, 1), (4, 1), (4, 2), (5, 5), (6, 3)])
def test_pass_at_k_is_the_mean_over_all_subsets(samples, k):
  for correct in range(samples + 1):
    outcomes = [True] * correct + [False] * (samples - correct)
    expected = np.mean([any(subset) for subset in itertools.combinations(outcomes, k)])
    np.testing.assert_allclose(evaluate.pass_at_k(np.array([correct]), samples, k), [expected])


def test_pass_at_k_beyond_the_samples_is_refused():
  with pytest.raises(ValueError, match="k=3"):
    evaluate.pass_at_k(np.array([1]), 2, 3)


def test_the_interval_covers_the_mean_of_coin_flips():
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(400):
    mean, half = runtime.mean_and_interval(rng.binomial(1, 0.3, 200).astype(float))
    covered += abs(mean - 0.3) <= half
  assert 0.92 <= covered / 400 <= 0.98


@pytest.fixture(scope="module")
def trained(tmp_path_factory, two_devices):
  """The experiment of a run of one step, whose folder is `run` in the working directory, and its summary."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(tmp_path_factory.mktemp("evaluate"))
    given = quickstart.SMOKE | {"steps": 1, "reward_workers": 0, "run_dir": "run"}
    experiment = quickstart.build(runtime.override(quickstart.Options(), **given))
    yield experiment, runtime.train(experiment)


def test_the_command_evaluates_what_the_run_evaluated(trained, capsys):
  experiment, summary = trained
  assert evaluate.main(["run", "--prompts", "8"]) == 0
  assert f"avg@1    {summary.accuracy:.4f}" in capsys.readouterr().out
  assert evaluate.main(["run", "--prompts", "4", "--samples", "4"]) == 0
  printed = capsys.readouterr().out
  assert "avg@4" in printed
  assert "pass@4" in printed
  assert "temperature 1" in printed
  assert export.main(["run", "exported", "--dtype", "float32"]) == 0
  assert "exported holds step 1 of run" in capsys.readouterr().out
  learner = experiment.make_learner(experiment.make_meshes().learner)
  params = experiment.make_checkpointer(summary.folder.checkpoints).restore_params(learner.abstract().params)
  chex.assert_trees_all_equal(models.load_params(models.open_checkpoint("exported")), jax.device_get(params))
  assert evaluate.main(["run", "--prompts", "8", "--weights", "exported"]) == 0
  assert f"avg@1    {summary.accuracy:.4f}" in capsys.readouterr().out
  assert evaluate.main(["run", "--weights", "no/such"]) == 2
  assert "no/such" in capsys.readouterr().err


@pytest.mark.usefixtures("two_devices")
def test_a_replay_is_evaluated_and_exported_without_its_schedule(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  sizes = [tiny.__file__, "--steps", "1", "--max-lag", "0", "--no-picture"]
  assert train.main([*sizes, "--run-dir", "recorded"]) == 0
  assert train.main([*sizes, "--run-dir", "replay", "--lag", "recorded/schedule.jsonl"]) == 0
  (tmp_path / "recorded" / "schedule.jsonl").unlink()
  capsys.readouterr()
  assert evaluate.main(["replay", "--prompts", "4"]) == 0
  assert "step 1, 4 test prompts" in capsys.readouterr().out
  assert export.main(["replay", "exported"]) == 0


@pytest.mark.usefixtures("two_devices")
@pytest.mark.slow
def test_several_processes_deal_the_prompts_and_the_first_prints_what_one_would(tmp_path, capsys):
  assert train.main([tiny.__file__, "--run-dir", str(tmp_path / "run"), "--mode", "simulated", "--steps", "1"]) == 0
  capsys.readouterr()
  arguments = [str(tmp_path / "run"), "--prompts", "7", "--samples", "2"]
  assert evaluate.main(arguments) == 0
  expected = capsys.readouterr().out
  assert "7 test prompts" in expected
  assert "avg@2    0.0000" not in expected

  def command(i, port):
    names = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id", str(i)]
    return ["-m", "experiments.evaluate", *arguments, *names]

  processes = start_processes(command, count=2, devices=2, stdout=subprocess.PIPE)
  printed = [process.stdout.read() for process in processes]
  finish(processes, 0, 0)
  assert [re.sub(r"\[Gloo\].*\n", "", text) for text in printed] == [expected, ""]

  processes = start_processes(lambda i, port: [*command(i, port), "--step", str(i)], count=2, devices=1)
  for error in finish(processes, 2, 2):
    assert "process 1 was not started like process 0 (step: 0 -> 1)" in error


def test_a_folder_without_a_run_is_one_sentence(tmp_path, capsys):
  assert evaluate.main([str(tmp_path)]) == 2
  assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": 5}', '{"config": "quicks'])
def test_a_damaged_configuration_is_one_sentence(tmp_path, capsys, content):
  (tmp_path / "config.txt").write_text(content)
  assert evaluate.main([str(tmp_path)]) == 2
  assert "config.txt is damaged: rerun the command" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("option", "value", "message"),
  [
    ("samples", "0", "*samples* must be an integer at least 1, got samples=0"),
    ("prompts", "0", "*prompts* must be an integer at least 1, got prompts=0"),
    ("prompts", "-3", "got prompts=-3; leave it out for all"),
    ("temperature", "-1", "got temperature=-1.0; 0 is greedy"),
    ("temperature", "1e-9", "*temperature* must be a number at least 0.001, got temperature=1e-09; 0 is greedy"),
    ("config", "/no/such.py", "error: there is no config file /no/such.py"),
  ],
)
def test_options_are_refused_by_name(trained, capsys, option, value, message):
  assert evaluate.main(["run", f"--{option}", value]) == 2
  assert message in capsys.readouterr().err


def test_a_home_folder_is_expanded(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("HOME", str(tmp_path))
  assert evaluate.main(["~/my runs/a"]) == 2
  assert f"{tmp_path}/my runs/a holds no run" in capsys.readouterr().err


def _fails(self, prompt, text, finish):
  raise ZeroDivisionError("no verifier")


def _fails_on_odd_prompts(self, prompt, text, finish):
  return 1.0 if prompt.id % 2 == 0 else _fails(self, prompt, text, finish)


def test_rewards_that_fail_are_counted_and_shown(trained, monkeypatch, capsys):
  task = type(trained[0].task)
  monkeypatch.setattr(task, "reward", _fails_on_odd_prompts)
  assert evaluate.main(["run", "--prompts", "8"]) == 0
  printed = capsys.readouterr().out
  assert "4 of 8 rewards failed and count as 0, the first: raised ZeroDivisionError: no verifier" in printed
  assert "avg@1    0.5000" in printed
  monkeypatch.setattr(task, "reward", _fails)
  assert evaluate.main(["run", "--prompts", "8"]) == 2
  assert "all 8 rewards failed, the first: raised ZeroDivisionError: no verifier" in capsys.readouterr().err
  assert evaluate.main(["run", "--prompts", "8", "--max-prompt-tokens", "2"]) == 2
  assert "8 of 8 prompts cannot be used" in capsys.readouterr().err
