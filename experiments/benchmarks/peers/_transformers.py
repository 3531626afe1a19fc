"""transformers in PyTorch: `generate`, and the step that TRL's GRPOTrainer takes, without the trainer around it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import transformers

from experiments.benchmarks.decode_speed import GROUP
from experiments.benchmarks.peers._work import Work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def describe() -> dict[str, str]:
  """Returns the device and the versions."""
  name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
  return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def generation(work: Work) -> Callable[[], None]:
  """Returns what generates with a dynamic cache and PyTorch's fused attention; no log-probabilities are returned."""
  model = _make_model(work, getattr(torch, work.dtype)).eval()
  # Plain sampling from the whole softmax, which nothing ends.
  settings = transformers.GenerationConfig(
    do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=work.completion, pad_token_id=0
  )
  prompts = torch.as_tensor(np.repeat(work.prompts(), GROUP, axis=0), dtype=torch.int64, device=DEVICE)

  @torch.inference_mode()
  def run() -> None:
    tokens = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
    work.check_generated([len(row) - work.prompt for row in tokens.cpu()])

  return run


def learning_step(work: Work) -> Callable[[], None]:
  """Returns what takes a step as TRL does: float32 weights under autocast, logits of completions only, accumulation.

  Nothing is recomputed in the backward pass; TRL's default, gradient checkpointing, takes longer and less memory.
  """
  model = _make_model(work, torch.float32).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1, fused=DEVICE == "cuda")
  tokens, advantages = (torch.as_tensor(x, device=DEVICE) for x in work.random_sequences())
  tokens, advantages = tokens.long(), advantages[:, None]
  behavior = -math.log(work.config.vocab_size)

  def backward(ids: torch.Tensor, advantages: torch.Tensor) -> None:
    with torch.autocast(DEVICE, getattr(torch, work.dtype), enabled=work.dtype != "float32"):
      kept = work.completion + 1
      logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, :-1].float()
    drawn = torch.gather(logits, -1, ids[:, -work.completion :, None])[..., 0]
    # By rows, as TRL does: no log-softmax of all is kept.
    logprobs = drawn - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    ratio = torch.exp(logprobs - behavior)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (loss.sum() / (work.sequences * work.completion)).backward()

  def run() -> None:
    for part in work.micro_batches():
      backward(tokens[part], advantages[part])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if DEVICE == "cuda":
      torch.cuda.synchronize()

  return run


def _make_model(work: Work, dtype: torch.dtype) -> torch.nn.Module:
  c = work.config
  config = transformers.Qwen3Config(
    vocab_size=c.vocab_size,
    hidden_size=c.d_model,
    intermediate_size=c.d_ff,
    num_hidden_layers=c.num_layers,
    num_attention_heads=c.num_heads,
    num_key_value_heads=c.num_kv_heads,
    head_dim=c.head_dim,
    rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    rms_norm_eps=c.norm_eps,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
  )
  torch.manual_seed(0)
  with torch.device(DEVICE):
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
