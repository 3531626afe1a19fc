"""Makes the golden folders beside this file: tiny random models of every family and the logits `transformers` gives.

    python -m venv golden && golden/bin/pip install torch==2.13.0 transformers==5.24.0
    golden/bin/python tests/models/golden/make.py

Each folder is what `save_pretrained` writes (weights in bfloat16), plus golden.npz with `tokens` int [B, T] and
`logits` float32 [B, T, V], computed in float32 with eager attention, once whole and once token by token with a cache;
the script fails if the two differ. versions.json says what made them.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, VOCAB = 2, 14, 96
COMMON = {
  "vocab_size": VOCAB,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": 0,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500_000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
MODELS = {
  "llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5, "head_dim": 8}),
  "smollm2": (
    transformers.LlamaConfig,
    {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1},
  ),
  "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True, "rope_theta": 1e6}),
  "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "rope_theta": 1e6}),
  "gemma2": (
    transformers.Gemma2Config,
    {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 4, "attn_logit_softcapping": 5.0,
     "final_logit_softcapping": 4.0},
  ),
  "gemma3": (
    transformers.Gemma3TextConfig,
    {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 4, "num_hidden_layers": 3,
     "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
     "rope_parameters": {
       "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
     }},
  ),
}  # fmt: skip


def randomize(model, seed):
  """Weights large enough that every part of the model shows in the logits, all exact in bfloat16."""
  random = torch.Generator().manual_seed(seed)
  for name, weight in model.named_parameters():
    noise = torch.randn(weight.shape, generator=random)
    if weight.ndim == 1:
      value = (0.0 if name.endswith("bias") or "gemma" in model.config.model_type else 1.0) + 0.3 * noise
    else:
      value = 0.3 * noise if "embed_tokens" in name else 1.5 * noise / weight.shape[1] ** 0.5
    weight.data = value.to(torch.bfloat16).float()


@torch.no_grad()
def main():
  for seed, (name, (config_class, options)) in enumerate(MODELS.items()):
    config = config_class(**{**COMMON, **options}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize(model, seed)
    model.tie_weights()
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 + seed))
    logits = model(tokens, use_cache=False).logits
    cache, stepwise = None, []
    for t in range(LENGTH):
      out = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
      cache = out.past_key_values
      stepwise.append(out.logits)
    torch.testing.assert_close(torch.cat(stepwise, 1), logits, atol=2e-5, rtol=0)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    # One of them in several files, as large models come.
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB" if name == "qwen3" else "5GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / "golden.npz", tokens=tokens.numpy(), logits=logits.float().numpy())
    print(name, f"{sum(file.stat().st_size for file in folder.iterdir()) / 1e3:.0f} kB", float(logits.std()))
  versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
  (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
  main()
