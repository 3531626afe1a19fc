"""Export: the folder holds the policy of the checkpoint, adapters merged; evaluation takes both."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import runtime
from experiments import evaluate
from experiments import export
from experiments import train
from experiments.configs import gsm8k
from experiments.configs import quickstart

pytestmark = pytest.mark.usefixtures("two_devices")


def test_the_folder_computes_what_the_checkpoint_does(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  build = quickstart.build

  def changed(options):
    """Other adapters and no warm start; advantages that do not depend on the rewards, since random sums earn none."""
    objective = learning.Objective(losses.reinforce, lambda rewards, groups, num_groups: groups + 1.0)
    policy = dataclasses.replace(build(options).policy, lora=models.LoRA(rank=2))
    return dataclasses.replace(build(options), policy=policy, start=None, objective=objective)

  monkeypatch.setattr(quickstart, "build", changed)
  given = quickstart.SMOKE | {"steps": 2, "learning_rate": 1e-2, "run_dir": "run"}
  experiment = quickstart.build(runtime.override(quickstart.Options(), **given))
  summary = runtime.train(experiment)
  assert evaluate.main(["run", "--prompts", "8"]) == 0
  assert f"avg@1    {summary.accuracy:.4f}" in capsys.readouterr().out
  assert export.main(["run", "folder", "--dtype", "float32"]) == 0
  assert "folder holds step 2 of run" in capsys.readouterr().out
  assert json.loads(pathlib.Path("folder/config.json").read_text())["eos_token_id"] == 1
  assert evaluate.main(["run", "--prompts", "8", "--weights", "folder"]) == 0
  assert f"avg@1    {summary.accuracy:.4f}" in capsys.readouterr().out

  learner = experiment.make_learner(experiment.make_meshes().learner)
  params = experiment.make_checkpointer(summary.folder.checkpoints).restore_params(learner.abstract().params)
  exported = models.load_params(models.open_checkpoint("folder"))
  tokens = np.random.default_rng(0).integers(0, 30, (2, 12)).astype(np.int32)
  rows = tokens, np.ones_like(tokens), np.tile(np.arange(12, dtype=np.int32), (2, 1))
  score = lambda policy, params: jax.jit(lambda p: models.score(policy, p, *rows).logprobs)(jax.device_get(params))
  plain = dataclasses.replace(experiment.policy, lora=None)
  got, expected = score(plain, exported)[:, 1:], score(experiment.policy, params)[:, 1:]
  np.testing.assert_allclose(got, expected, atol=1e-5)
  assert np.abs(got - score(plain, models.split_trainable(params)[1])[:, 1:]).max() > 1e-2
  assert export.main(["run", "folder"]) == 2
  assert "folder exists" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_on_pretrained_weights_from_the_command_line(tmp_path, monkeypatch, capsys):
  """A Hugging Face folder, its adapters warmed up, trained, resumed and exported."""
  data = pathlib.Path(__file__).parents[1] / "data" / "gsm8k"
  config = models.ModelConfig(
    vocab_size=384, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32
  )
  monkeypatch.chdir(tmp_path)
  models.save_hf("tiny", config, jax.jit(models.Policy(config).init)(jax.random.key(0)))
  pathlib.Path("tiny/tokenizer.model").write_bytes(
    models.train_sentencepiece((data / "train.jsonl").read_text().splitlines(), "bpe", 380)
  )

  def command(run_dir, **options):
    options = {"steps": 1, "rows": 8, "row_tokens": 288, "max_prompt_tokens": 256, "gsm8k_folder": data} | options
    smoke = gsm8k.SMOKE | {"eval_prompts": 0, "dtype": "bfloat16"}
    fields = smoke | options | {"run_dir": run_dir}
    return ["gsm8k", "--no-chat", *(x for k, v in fields.items() for x in (f"--{k.replace('_', '-')}", str(v)))]

  first = dict(weights="tiny", lora_rank=2, supervised_steps=1, max_completion_tokens=200, row_tokens=512)
  assert train.main(command("run", **first)) == 0
  assert "supervised step 1" in capsys.readouterr().out
  assert train.main(command("run", **first, **{"steps": 2})) == 0
  assert "supervised step" not in capsys.readouterr().out
  assert export.main(["run", "merged", "--like", "tiny"]) == 0
  shapes = models.open_checkpoint("merged").shapes
  assert shapes == models.open_checkpoint("tiny").shapes
  assert pathlib.Path("merged/tokenizer.model").exists()
