"""GGUF files as llama.cpp's converter writes them, against the Hugging Face folders they come from."""

import dataclasses
import pathlib

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy

from async_rl import models

GOLDEN = pathlib.Path(__file__).parent / "golden"
ARCHITECTURES = {
  "llama3": "llama", "smollm2": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3",
}  # fmt: skip
LLAMA3 = models.RopeScaling("llama3", factor=8.0)


def interleave(weights, heads):
  """The converter's reordering of Llama's q and k rows: pairs next to each other instead of halves."""
  shape = weights.shape
  return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def convert(name, path, quantization="F32", tokens=None):
  """Writes a golden model as GGUF, with the tensor names that gguf's own table gives."""
  config, kind = models.open_checkpoint(GOLDEN / name).config, ARCHITECTURES[name]
  writer = gguf.GGUFWriter(path, kind)
  writer.add_block_count(config.num_layers)
  writer.add_embedding_length(config.d_model)
  writer.add_feed_forward_length(config.d_ff)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  if kind.startswith("gemma"):
    writer.add_sliding_window(config.sliding_window)
  if kind == "gemma2":
    writer.add_attn_logit_softcapping(config.attention_softcap)
    writer.add_final_logit_softcapping(config.final_softcap)
  if kind == "gemma3":
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_scaling.factor)
  if name == "llama3":
    inverse = models.rope_frequencies(config.head_dim, config.rope_theta, None)
    scaled = models.rope_frequencies(config.head_dim, config.rope_theta, LLAMA3)
    writer.add_tensor("rope_freqs.weight", (inverse / scaled).astype(np.float32))
  if tokens is not None:
    writer.add_token_list(tokens)
  table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), config.num_layers)
  for file in (GOLDEN / name).glob("*.safetensors"):
    for stored, value in safetensors.numpy.load_file(file).items():
      value = value.astype(np.float32)
      if kind == "llama" and "q_proj" in stored:
        value = interleave(value, config.num_heads)
      if kind == "llama" and "k_proj" in stored:
        value = interleave(value, config.num_kv_heads)
      if kind.startswith("gemma") and stored.endswith("norm.weight"):
        value = value + 1
      target = table.get_name(stored, try_suffixes=(".weight", ".bias"))
      kept = value.ndim == 1 or value.shape[-1] % 32
      form = gguf.GGMLQuantizationType["F32" if kept else quantization]
      writer.add_tensor(target, gguf.quantize(value, form), raw_dtype=form)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_gives_the_same_model_as_hugging_face(name, tmp_path):
  convert(name, tmp_path / "model.gguf")
  source, checkpoint = models.open_checkpoint(GOLDEN / name), models.open_checkpoint(tmp_path / "model.gguf")
  # GGUF does not store these; the reader has them as in the public models, and the golden models are smaller.
  unstored = {"query_scale": None, "global_every": 2 if name == "gemma2" else 6} if name.startswith("gemma") else {}
  if name == "llama3":
    unstored = {"rope_scaling": LLAMA3}
  assert checkpoint.config == dataclasses.replace(source.config, **unstored)
  expected = models.load_params(source)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), models.load_params(checkpoint), expected)


def test_quantized_tensors_are_dequantized(tmp_path):
  convert("llama3", tmp_path / "model.gguf", "Q8_0")
  got = models.load_params(models.open_checkpoint(tmp_path / "model.gguf"))
  expected = models.load_params(models.open_checkpoint(GOLDEN / "llama3"))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), got, expected)


def test_entries_that_pad_the_token_list_are_no_tokens(tmp_path):
  convert("qwen2", tmp_path / "model.gguf", tokens=[f"t{i}" for i in range(90)] + [f"[PAD{i}]" for i in range(90, 96)])
  assert models.open_checkpoint(tmp_path / "model.gguf").config.vocab_limit == 90


def test_an_unknown_rope_table_is_refused(tmp_path):
  path = tmp_path / "model.gguf"
  convert("llama3", path)
  reader = gguf.GGUFReader(path, "r+")
  next(t for t in reader.tensors if t.name == "rope_freqs.weight").data[1] = 3.0
  reader.data.flush()
  with pytest.raises(ValueError, match="must be a scaling of Llama 3"):
    models.open_checkpoint(path)


def test_an_unknown_architecture_is_refused(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(ValueError, match="'mamba'; supported are 'llama'"):
    models.open_checkpoint(tmp_path / "model.gguf")


def test_smollm2_knows_the_capital_of_france(smollm2_path):
  checkpoint = models.open_checkpoint(smollm2_path)
  assert checkpoint.config == models.named("smollm2-135m")
  policy, params = models.Policy(checkpoint.config), models.load_params(checkpoint, dtype="bfloat16")
  tokens = np.array([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
  hidden = jax.jit(policy.hidden)(params, tokens, np.ones_like(tokens), np.arange(5)[None])
  assert int(policy.logits(params, hidden[:, -1]).argmax()) == 7042  # " Paris"


def test_a_package_that_is_not_installed_is_named():
  with pytest.raises(FileNotFoundError, match="pip install no-such-model"):
    models.packaged_gguf("no-such-model")
