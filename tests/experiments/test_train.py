"""The command: every config runs, runs are killed and resumed; help and errors are those of a good tool."""

import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import time

import pytest
import tiny
from tiny_weights import chatting_weights
from tiny_weights import tiny_weights

from async_rl import tasks
from async_rl.recording import read_metrics
from experiments import configs
from experiments import train

ROOT = pathlib.Path(__file__).parents[2]
GSM8K = ROOT / "tests" / "data" / "gsm8k"
#: The configs that start from pretrained weights, for which the tests give tiny ones.
PRETRAINED = ("countdown", "gsm8k", "gsm8k_calculator")


def posts(folder):
  """The files of the summaries task, made of the key-word task."""
  if not (folder / "posts").exists():
    (folder / "posts").mkdir()
    task = tasks.KeyWords(train=8, test=4)
    for split in ("train", "test"):
      records = [{"post": p.text, "summary": p.answer} for p in task.prompts(split)]
      pairs = [{**pair._asdict(), "prompt": f"POST: {pair.prompt}\n\nTL;DR:"} for pair in task.preferences(split)]
      for name, rows in ((split, records), (f"{split}_preferences", pairs)):
        (folder / "posts" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  return folder / "posts"


def arguments(name, run_dir, **changed):
  options = configs.load(name).smoke | changed | {"run_dir": run_dir}
  if "gsm8k" in name:
    options["gsm8k_folder"] = GSM8K
  if name == "summaries":
    options |= {"folder": posts(run_dir.parent), "weights": tiny_weights(run_dir.parent)}
  elif name in PRETRAINED:
    options |= {"weights": chatting_weights(run_dir.parent), "max_prompt_tokens": 512, "row_tokens": 640}
  return [name, *(part for field, value in options.items() for part in (f"--{field.replace('_', '-')}", str(value)))]


def rows_of(run_dir):
  return [r for r in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in r]


def assert_whole(run_dir, steps):
  rows = rows_of(run_dir)
  assert [r["step"] for r in rows] == list(range(1, steps + 1))
  fresh = [r["logprob_difference/lag_zero"] for r in rows if r["staleness/min"] == 0]
  assert max(fresh) < 1e-4
  for file in ("config.txt", "schedule.jsonl", "tensorboard", "checkpoints"):
    assert (run_dir / file).exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, two_devices):
  """Trains a config for two steps, once; returns the folder of its run."""

  @functools.cache
  def train_once(name):
    if name == "countdown":
      pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    run_dir = tmp_path_factory.mktemp(name) / "run"
    with pytest.MonkeyPatch.context() as patch:
      patch.chdir(run_dir.parent)
      assert train.main(arguments(name, run_dir, steps=2)) == 0
    return run_dir

  return train_once


@pytest.mark.parametrize("name", [name for name in configs.NAMES if name != "quickstart"])
def test_every_config_runs(name, trained, monkeypatch, capfd):
  run_dir = trained(name)
  assert_whole(run_dir, 2)
  # Made again at every start: generated problems; a reference policy and a reward model of stages that were kept.
  if name in ("countdown", "keywords"):
    monkeypatch.chdir(run_dir.parent)
    capfd.readouterr()
    assert train.main(arguments(name, run_dir, steps=3)) == 0
    printed = "".join(capfd.readouterr())
    assert "resumed at step 2" in printed
    assert "supervised step" not in printed
    assert_whole(run_dir, 3)


@pytest.mark.slow  # test_run_folders.py kills a run likewise, and above the command resumes
@pytest.mark.usefixtures("two_devices")
def test_a_killed_run_is_resumed(tmp_path, monkeypatch, capfd, draws_pictures):
  """The command in a process of its own, on two devices, is killed; the same command ends the run."""
  monkeypatch.chdir(tmp_path)
  run_dir = tmp_path / "run"
  flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"  # the last one counts
  environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
  options = [tiny.__file__, "--run-dir", str(run_dir), "--checkpoint-every", "1", "--steps", "12"]
  command = [sys.executable, "-m", "experiments.train", *options]
  streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  with subprocess.Popen(command, env=environment, **streams) as killed:
    while killed.poll() is None and not (run_dir / "checkpoints" / "1").exists():
      time.sleep(0.02)
    assert killed.poll() is None, killed.stdout.read()
    killed.kill()
  assert train.main(options) == 0
  printed = "".join(capfd.readouterr())
  assert "resumed at step" in printed
  assert "Done: 12 optimizer steps." in printed
  assert_whole(run_dir, 12)
  assert (run_dir / "report.png").exists()


def test_help_lists_the_configs(capsys):
  with pytest.raises(SystemExit) as exit_:
    train.main(["--help"])
  assert exit_.value.code == 0
  printed = capsys.readouterr().out
  for name in configs.NAMES:
    assert name in printed
    assert configs.load(name).description in printed


def parameters(name):
  """Every option of a config, by the part that has it."""
  found, parts = {}, [configs.load(name).defaults]
  while parts:
    part = parts.pop()
    for field in dataclasses.fields(part):
      value = getattr(part, field.name)
      if dataclasses.is_dataclass(value):
        parts.append(value)
      else:
        found[field.name] = type(part)
  return found


source_of = functools.cache(inspect.getsource)  # which parses the whole file of a class


@pytest.mark.parametrize("name", configs.NAMES)
def test_help_explains_every_option(name, capsys):
  with pytest.raises(SystemExit) as exit_:
    train.main([name, "--help"])
  assert exit_.value.code == 0
  printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
  for option, part in parameters(name).items():
    above = source_of(part).split(f"\n  {option}: ")[0].splitlines()
    comment = [line.strip() for line in itertools.takewhile(lambda line: line.startswith("  #: "), reversed(above))]
    assert comment, f"{part} does not explain {option}"
    assert f"--{option.replace('_', '-')}" in printed
    assert " ".join(line.removeprefix("#: ") for line in reversed(comment)) in printed


@pytest.mark.parametrize("name", configs.NAMES)
def test_no_config_inherits_defaults(name):
  """Where a class has two parents, the settings of one are lost without a word."""
  assert type(configs.load(name).defaults).__mro__[1:] == (object,)


def test_a_misspelt_option_is_refused_with_the_right_name(capsys):
  with pytest.raises(SystemExit) as exit_:
    train.main(["quickstart", "--max-lagg", "3"])
  assert exit_.value.code == 2
  assert "--max-lag" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
  file = tmp_path / "file"
  file.write_text("")
  assert train.main(["quickstart", "--run-dir", str(file / "run")]) == 2
  assert "cannot write the run folder" in capsys.readouterr().err


def test_a_read_only_folder_is_one_sentence(tmp_path, capsys):
  tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
  folder = tmp_path if os.geteuid() else pathlib.Path("/sys")  # root may write everywhere but there
  assert train.main(["quickstart", "--run-dir", str(folder / "run")]) == 2
  assert "cannot write the run folder" in capsys.readouterr().err


def test_a_bad_value_is_one_sentence(tmp_path, capsys):
  with pytest.raises(SystemExit) as exit_:
    train.main(["quickstart", "--run-dir", str(tmp_path), "--steps", "0"])
  assert exit_.value.code == 2
  assert "*steps* must be an integer at least 1, got steps=0." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["keywords", "quickstart"])
def test_one_sample_cannot_be_compared(name, tmp_path, capsys):
  assert train.main([name, "--run-dir", str(tmp_path / "run"), "--samples", "1"]) == 2
  assert "*samples* must be at least 2" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_summaries_ask_for_their_posts(tmp_path, capsys):
  assert train.main(["summaries", "--run-dir", str(tmp_path / "run")]) == 2
  assert "error: give either folder (with train.jsonl" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()  # or the same command with a folder would find another run there
  folders = {"--run-dir": "run2", "--folder": "nowhere", "--weights": tiny_weights(tmp_path).name}
  assert train.main(["summaries", *(part for k, v in folders.items() for part in (k, str(tmp_path / v)))]) == 2
  assert "nowhere" in capsys.readouterr().err


def test_stages_of_other_weights_or_steps_are_refused(trained, monkeypatch, capsys):
  folder = trained("summaries").parent
  monkeypatch.chdir(folder)
  shutil.copytree(folder / "weights", folder / "others")
  command = arguments("summaries", folder / "another run")
  assert train.main([*command, "--supervised-steps", "2"]) == 2
  assert "options.supervised_steps: 1 -> 2" in capsys.readouterr().err
  assert train.main([*command, "--weights", str(folder / "others")]) == 2
  assert re.search("options.weights: .*weights' -> .*others'", capsys.readouterr().err)


def test_rlhf_without_a_supervised_stage_starts_from_random_parameters():
  config = configs.load("keywords")
  assert config.experiment(config.options(supervised_steps=0)).start is None


def test_missing_data_is_one_sentence(tmp_path, capsys):
  options = arguments("gsm8k", tmp_path / "run")
  options[options.index("--gsm8k-folder") + 1] = str(tmp_path / "nowhere")
  assert train.main(options) == 2
  assert "nowhere" in capsys.readouterr().err


def test_an_unknown_config_suggests_the_right_one(capsys):
  assert train.main(["quikstart"]) == 2
  assert "did you mean 'quickstart'" in capsys.readouterr().err


@pytest.mark.parametrize(
  "options",
  [("--learning-rate", "nan"), ("--warm-accuracy", "2"), ("--reward-timeout", "nan"), ("--objective", "m2p0")],
)
def test_a_bad_value_of_any_part_is_refused_in_the_words_of_the_command_line(options, tmp_path, capsys):
  try:
    status = train.main(["quickstart", "--run-dir", str(tmp_path / "run"), *options])
  except SystemExit as stop:
    status = stop.code
  assert status == 2
  name = options[0].removeprefix("--").replace("-", "_")
  assert re.search(
    rf"\*{name}\* must .*{name}='?{options[1]}", " ".join(capsys.readouterr().err.replace("│", " ").split())
  )
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("quickstart", dict(ess_power=-1.0), "got ess_power=-1.0"),
    ("gsm8k", dict(ess_power=math.nan), "got ess_power=nan"),
    ("gsm8k", dict(supervised_steps=-1), "got supervised_steps=-1"),
    ("gsm8k_calculator", dict(supervised_rate=0.0), "got supervised_rate=0.0"),
    ("gsm8k", dict(lora_rank=-2), "got lora_rank=-2"),
    ("gsm8k", dict(weights=""), "got weights=''"),
    ("countdown", dict(first_moment_dtype="float16"), "got first_moment_dtype='float16'"),
    ("countdown", dict(problems=0), "got problems=0"),
    ("countdown", dict(numbers=(4, 3)), r"got numbers=\(4, 3\)"),
    ("keywords", dict(supervised_rate=-1.0), "got supervised_rate=-1.0"),
    ("keywords", dict(reward_model_rate=0.0), "got reward_model_rate=0.0"),
    ("keywords", dict(reward_model_steps=-1), "got reward_model_steps=-1"),
    ("keywords", dict(stages=""), "got stages=''"),
    ("keywords", dict(stages="s3://a/b"), "got stages='s3://a/b'"),
    ("keywords", dict(beta=0.0), "got beta=0.0"),
    ("keywords", dict(kl_coefficient=-0.1), "got kl_coefficient=-0.1"),
  ],
)
def test_options_of_configs_are_refused_by_their_names_on_the_command_line(name, options, message):
  config = configs.load(name)
  with pytest.raises(ValueError, match=message):
    config.experiment(config.options(**options))
