"""Hugging Face folders of every family: the logits that transformers gave, loading into shardings, saving back."""

import dataclasses
import json
import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from async_rl import models
from async_rl import rollout

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = ("llama3", "smollm2", "qwen2", "qwen3", "gemma2", "gemma3")


def tensors(folder):
  """Everything in a folder's safetensors files."""
  return {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}


def rewrite(source, target, change):
  """Copies a golden folder with its tensors changed by `change`, in place."""
  shutil.copytree(source, target)
  content = tensors(target)
  for file in target.glob("model*.safetensors*"):
    file.unlink()
  change(content)
  safetensors.numpy.save_file(content, target / "model.safetensors")
  return target


@pytest.mark.parametrize("name", NAMES)
def test_logits_agree_with_transformers(name):
  checkpoint = models.open_checkpoint(GOLDEN / name)
  policy, params = models.Policy(checkpoint.config, dtype="float32"), models.load_params(checkpoint)
  golden = np.load(GOLDEN / name / "golden.npz")
  tokens, expected = golden["tokens"].astype(np.int32), golden["logits"]
  batch, length = tokens.shape
  positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
  full = policy.logits(params, jax.jit(policy.hidden)(params, tokens, np.ones_like(tokens), positions))
  np.testing.assert_allclose(full, expected, atol=2e-5)
  step, cache, unstacked = jax.jit(policy.decode), policy.init_cache(batch, length), models.unstack_layers(params)
  for t in range(length):
    hidden, cache = step(unstacked, tokens[:, t], positions[:, t], cache)
    np.testing.assert_allclose(policy.logits(unstacked, hidden), expected[:, t], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_saving_back_gives_the_same_tensors_and_architecture(name, tmp_path):
  checkpoint = models.open_checkpoint(GOLDEN / name)
  models.save_hf(tmp_path / "saved", checkpoint.config, models.load_params(checkpoint))
  expected, got = tensors(GOLDEN / name), tensors(tmp_path / "saved")
  assert expected.keys() == got.keys()
  for key, value in expected.items():
    assert got[key].dtype == value.dtype
    np.testing.assert_array_equal(got[key].astype(np.float32), value.astype(np.float32))
  assert models.open_checkpoint(tmp_path / "saved").config == checkpoint.config
  theirs = json.loads((GOLDEN / name / "config.json").read_text())
  ours = json.loads((tmp_path / "saved" / "config.json").read_text())
  assert ours["architectures"] == theirs["architectures"]


@pytest.mark.parametrize("name", models.FAMILIES)
def test_every_named_config_survives_config_json(name, tmp_path):
  config = models.named(name)
  assert models.read_hf_config(json.loads(json.dumps(models.write_hf_config(config)))) == config


def test_sharded_parameters_are_loaded_and_saved_in_several_files(tmp_path):
  checkpoint = models.open_checkpoint(GOLDEN / "qwen3")
  policy = models.Policy(checkpoint.config)
  mesh = rollout.make_mesh(jax.devices(), fsdp=2, tensor=2)
  shardings = models.param_shardings(policy.abstract(), mesh)
  params = models.load_params(checkpoint, shardings)
  jax.tree.map(np.testing.assert_array_equal, params, models.load_params(checkpoint))
  assert jax.tree.map(lambda x: x.sharding, params) == shardings
  shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path / "tokenizer.json")  # any small file
  for file in (GOLDEN / "qwen3").iterdir():
    shutil.copy(file, tmp_path / file.name)
  models.save_hf(tmp_path / "saved", checkpoint.config, params, like=tmp_path, shard_bytes=20_000)
  files = sorted(file.name for file in (tmp_path / "saved").iterdir())
  count = len(list((tmp_path / "saved").glob("*.safetensors")))
  assert count > 1
  assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < set(files)
  assert f"model-00001-of-{count:05}.safetensors" in files
  again = models.load_params(models.open_checkpoint(tmp_path / "saved"))
  jax.tree.map(np.testing.assert_array_equal, again, params)
  kept = json.loads((tmp_path / "saved" / "config.json").read_text())
  assert (kept["max_window_layers"], kept["torch_dtype"]) == (28, "bfloat16")  # theirs, and what was written


def test_reading_takes_pieces_only():
  checkpoint = models.open_checkpoint(GOLDEN / "qwen3")
  mesh = rollout.make_mesh(jax.devices(), fsdp=4, tensor=2)
  largest, read = {}, checkpoint.read

  def spy(name, index):
    piece = read(name, index)
    largest[name] = max(largest.get(name, 0), piece.size)
    return piece

  checkpoint.read = spy
  models.load_params(checkpoint, models.param_shardings(models.Policy(checkpoint.config).abstract(), mesh))
  for name, size in largest.items():
    shape = checkpoint.shapes[name]
    assert size == np.prod(shape) // (8 if len(shape) == 2 else 1), name


def test_parameters_can_be_loaded_in_bfloat16():
  params = models.load_params(models.open_checkpoint(GOLDEN / "llama3"), dtype="bfloat16")
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}


def test_the_text_part_of_a_multimodal_folder_is_loaded(tmp_path):
  def wrap(content):
    for name in list(content):
      content["language_model." + name] = content.pop(name)
    content["vision_tower.weight"] = np.zeros(3, np.float32)

  folder = rewrite(GOLDEN / "gemma3", tmp_path / "wrapped", wrap)
  text = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
  wrapped = models.load_params(models.open_checkpoint(folder))
  jax.tree.map(np.testing.assert_array_equal, wrapped, models.load_params(models.open_checkpoint(GOLDEN / "gemma3")))


def test_tensors_that_do_not_fit_are_named(tmp_path):
  def spoil(content):
    del content["model.layers.1.mlp.up_proj.weight"]
    content["model.layers.0.extra.weight"] = np.zeros(2, np.float32)
    content["model.norm.weight"] = np.zeros(5, np.float32)

  folder = rewrite(GOLDEN / "llama3", tmp_path / "spoilt", spoil)
  with pytest.raises(ValueError, match="do not fit") as error:
    models.load_params(models.open_checkpoint(folder))
  message = str(error.value)
  assert "missing model.layers.1.mlp.up_proj.weight (48, 32)" in message
  assert "left over model.layers.0.extra.weight (2,)" in message
  assert "model.norm.weight is (5,), expected (32,)" in message


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "mamba"}, "'mamba' is not supported; supported are 'llama'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_act": "relu"}, "'relu'"),
    ({"rope_parameters": None, "rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*'fp8'.*; use the model's unquantized"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types=.* of a llama model"),
    ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window=None of a gemma3_text"),
  ],
)
def test_unsupported_architectures_are_refused(change, message):
  content = json.loads((GOLDEN / "llama3" / "config.json").read_text())
  with pytest.raises(ValueError, match=message):
    models.read_hf_config(content | change)


def read_changed(name, **change):
  return models.read_hf_config(json.loads((GOLDEN / name / "config.json").read_text()) | change)


@pytest.mark.parametrize(
  ("option", "field"),
  [
    ("attn_logit_softcapping", "attention_softcap"),
    ("final_logit_softcapping", "final_softcap"),
    ("sliding_window", "sliding_window"),
  ],
)
def test_null_switches_an_option_off_and_survives_saving(option, field):
  config = read_changed("gemma2", **{option: None})
  assert getattr(config, field) is None
  others = dataclasses.replace(config, **{field: getattr(read_changed("gemma2"), field)})
  assert others == dataclasses.replace(read_changed("gemma2"), global_every=config.global_every)
  assert models.read_hf_config(models.write_hf_config(config)) == config


def test_layers_are_local_where_layer_types_say_so():
  for layers in (5, 6, 7, 13):
    config = read_changed("gemma3", num_hidden_layers=layers, layer_types=["sliding_attention"] * layers)
    assert all(config.is_local(i) for i in range(layers))
    assert models.read_hf_config(models.write_hf_config(config)) == config
    config = read_changed("gemma3", num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    assert not any(config.is_local(i) for i in range(layers))
  with pytest.raises(ValueError, match="global at every n-th layer"):
    read_changed("gemma3", layer_types=["full_attention", "sliding_attention", "sliding_attention"])


def test_saved_files_have_the_mode_of_the_umask_and_the_tokenizers_ids(tmp_path):
  checkpoint = models.open_checkpoint(GOLDEN / "llama3")
  params = models.load_params(checkpoint)
  tokenizer = models.SentencePieceTokenizer(models.train_sentencepiece(["0123456789"]))
  before = os.umask(0o027)
  try:
    models.save_hf(tmp_path / "saved", checkpoint.config, params, tokenizer=tokenizer)
  finally:
    os.umask(before)
  modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()}
  assert modes == {"config.json": 0o640, "model.safetensors": 0o640}
  content = json.loads((tmp_path / "saved" / "config.json").read_text())
  assert (content["bos_token_id"], content["eos_token_id"], content["pad_token_id"]) == (2, 1, 0)
  assert models.open_checkpoint(tmp_path / "saved").config == checkpoint.config
  tokenizer = models.SentencePieceTokenizer(models.train_sentencepiece(["0123456789"]), add_bos=False)
  models.save_hf(tmp_path / "without", checkpoint.config, params, tokenizer=tokenizer)
  assert json.loads((tmp_path / "without" / "config.json").read_text())["bos_token_id"] is None


def test_configs_without_a_public_architecture_are_not_saved():
  config = dataclasses.replace(models.named("qwen3-0.6b"), qkv_bias=True)
  with pytest.raises(ValueError, match=r"qwen3 model.*cannot have qkv_bias=True"):
    models.write_hf_config(config)


def test_saving_overwrites_nothing_and_checks_the_source(tmp_path):
  checkpoint = models.open_checkpoint(GOLDEN / "llama3")
  params = models.load_params(checkpoint)
  with pytest.raises(FileExistsError, match="choose another folder"):
    models.save_hf(tmp_path, checkpoint.config, params)
  with pytest.raises(ValueError, match="another architecture"):
    models.save_hf(tmp_path / "new", checkpoint.config, params, like=GOLDEN / "qwen3")
  with pytest.raises(ValueError, match="apply merge_adapters"):
    models.save_hf(tmp_path / "new", checkpoint.config, {**params, "adapters": {}})
  assert not (tmp_path / "new").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path):
  with pytest.raises(ValueError, match="is no checkpoint"):
    models.open_checkpoint(tmp_path)
  shutil.copy(GOLDEN / "llama3" / "config.json", tmp_path)
  with pytest.raises(FileNotFoundError, match=r"lacks model.safetensors"):
    models.open_checkpoint(tmp_path)


def test_names_are_suggested():
  with pytest.raises(ValueError, match=r"did you mean 'qwen3-0.6b'\?"):
    models.named("Qwen3-0.5B")


@pytest.mark.parametrize(
  ("name", "count"),
  [
    ("llama-3.1-8b", 8_030_261_248),
    ("llama-3.2-1b", 1_235_814_400),
    ("smollm2-135m", 134_515_008),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-8b", 8_190_735_360),
    ("gemma-2-2b", 2_614_341_888),
    ("gemma-3-1b", 999_885_952),
  ],
)
def test_named_configs_have_the_published_number_of_parameters(name, count):
  assert models.named(name).num_params() == count
  assert sum(leaf.size for leaf in jax.tree.leaves(models.Policy(models.named(name)).abstract())) == count


@pytest.mark.parametrize("name", ["no/such/folder", "/no/such", "../such", "missing.gguf"])
def test_a_path_without_weights_is_named(name):
  with pytest.raises(FileNotFoundError, match=f"There are no weights at {re.escape(name)}: no such file or folder"):
    models.find_weights(name)


@pytest.mark.parametrize("name", ["no-such-package", "No/Model-0.5B"])
def test_weights_that_were_not_fetched_name_the_command_that_fetches_them(name):
  with pytest.raises(FileNotFoundError, match=f"python -m experiments.fetch_weights {name}"):
    models.find_weights(name)


def test_weights_are_found_as_a_path(tmp_path):
  assert models.find_weights(str(tmp_path)) == tmp_path
