"""What the OPOB baseline costs with exact and with estimated gradient norms, and how good the estimates are.

    python -m experiments.benchmarks.opob_cost                        # one GPU with 80 GB, about 10 minutes
    python -m experiments.benchmarks.opob_cost --track gsm8k  # estimates on a real model's samples
    python -m experiments.benchmarks.opob_cost --smoke                # any machine, a minute; checks that it runs

1. Cost. Learner steps (gradient, clip, AdamW; donated) of a Qwen2.5-0.5B-shaped model on 64 sequences of 512 tokens in
   groups of 8, all with truncated sequence weights, one sequence per row. The baseline step uses the group's mean
   reward and micro-batches of one group. The estimates need the current policy's log-weights before the loss: either a
   micro-batch holds whole groups, so that its own forward pass gives them, or a scoring pass comes first.
2. Estimates. A config's policy (after its warm start) completes training prompts, and every sample's exact squared norm
   is compared with each estimate: Spearman's rank correlation over all samples and, since only ratios within a group
   matter to the baseline, its mean over the groups; and the mean distance of the estimated from the exact baseline, and
   of the group's mean reward from it, in units of the rewards' standard deviation.

Prints two tables and writes opob_cost.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

from async_rl import losses
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl.rollout import PromptStream
from async_rl.runtime import StageInputs
from experiments import configs
from experiments.benchmarks.stabilizer_cost import QWEN25_05B
from experiments.benchmarks.stabilizer_cost import SMOKE

Array = jax.Array
Gradient = Callable[[Any, "Rows"], Any]
GROUP = 8
BASELINE = "mean reward"


class Rows(NamedTuple):
  """Sequences, one per row; N of them, groups in a run.

  Attributes:
    tokens: int32 [N, T].
    mask: bool [N, T], trained tokens.
    behavior: float32 [N, T].
    rewards: float32 [N].
  """

  tokens: Array
  mask: Array
  behavior: Array
  rewards: Array

  @property
  def groups(self) -> Array:
    return jnp.arange(self.rewards.shape[0]) // GROUP


def score(policy: models.Policy, params: Any, tokens: Array) -> models.TokenStats:
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return models.score(policy, params, tokens, jnp.ones_like(tokens), positions)


def log_weights_of(stats: models.TokenStats, rows: Rows) -> Array:
  return losses.sequence_log_weights(losses.log_ratios(stats.logprobs, rows.behavior, rows.mask))


def norms_of(estimate: str, stats: models.TokenStats, rows: Rows) -> Array:
  if estimate == "length":
    return losses.squared_norms_by_length(rows.mask)
  return losses.squared_norms_by_logits(stats.logprobs, stats.sum_squares, rows.mask)


def opob(estimate: str, stats: models.TokenStats, rows: Rows) -> Array:
  """Advantages of whole groups under an estimate of the norms."""
  return losses.opob_advantages(
    rows.rewards,
    rows.groups,
    rows.rewards.shape[0] // GROUP,
    log_weights=log_weights_of(stats, rows),
    squared_norms=norms_of(estimate, stats, rows),
  )


def accumulated(
  policy: models.Policy, params: Any, rows: Rows, advantages: Array | None, *, micro: int, estimate: str | None = None
) -> Any:
  """Summed gradient over micro-batches; without *advantages* each micro-batch makes its own by an estimate."""

  def numerator(params, batch):
    rows, advantages = batch
    stats = score(policy, params, rows.tokens)
    advantages = opob(estimate, stats, rows) if estimate else advantages
    out = losses.sequence_tis(stats.logprobs, rows.behavior, advantages, rows.mask)
    return losses.aggregate(out.loss, rows.mask, "sequence_mean")[0]

  def body(total, batch):
    return jax.tree.map(jnp.add, total, jax.grad(numerator)(params, batch)), None

  split = jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), (rows, advantages))
  return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), split)[0]


def mean_reward(policy: models.Policy, micro: int, params: Any, rows: Rows) -> Any:
  advantages = losses.grpo_advantages(rows.rewards, rows.groups, rows.rewards.shape[0] // GROUP, normalize_std=False)
  return accumulated(policy, params, rows, advantages, micro=micro)


def estimated(policy: models.Policy, estimate: str, params: Any, rows: Rows) -> Any:
  return accumulated(policy, params, rows, None, micro=GROUP, estimate=estimate)


def scored(policy: models.Policy, estimate: str, params: Any, rows: Rows) -> Any:
  stats = jax.lax.map(
    lambda tokens: score(policy, params, tokens), rows.tokens.reshape(-1, GROUP, rows.tokens.shape[1])
  )
  stats = jax.tree.map(lambda x: x.reshape(rows.tokens.shape), stats)
  return accumulated(policy, params, rows, opob(estimate, stats, rows), micro=GROUP)


def exact(policy: models.Policy, params: Any, rows: Rows) -> losses.OpobGradient:
  def log_weight(params, row):
    row = jax.tree.map(lambda x: x[None], row)
    return log_weights_of(score(policy, params, row.tokens), row)[0]

  return losses.opob_gradient(
    functools.partial(jax.value_and_grad(log_weight), params),
    rows,
    rows.rewards,
    rows.groups,
    rows.rewards.shape[0] // GROUP,
    scale=losses.divide_or_zero(1.0, jnp.sum(rows.mask, axis=1)),
  )


def gradients(policy: models.Policy) -> dict[str, Gradient]:
  return {
    BASELINE: functools.partial(mean_reward, policy, GROUP),
    "mean reward, one sequence at a time": functools.partial(mean_reward, policy, 1),
    "OPOB by length": functools.partial(estimated, policy, "length"),
    "OPOB by logits": functools.partial(estimated, policy, "logits"),
    "OPOB by logits, scoring pass first": functools.partial(scored, policy, "logits"),
    "OPOB exact": lambda params, rows: exact(policy, params, rows).gradient,
  }


def random_rows(vocab_size: int, sequences: int, length: int) -> Rows:
  rng = np.random.default_rng(0)
  return Rows(
    jnp.asarray(rng.integers(0, vocab_size, (sequences, length)), jnp.int32),
    jnp.broadcast_to(jnp.arange(length) >= length // 2, (sequences, length)),
    jnp.full((sequences, length), -np.log(vocab_size), jnp.float32),
    jnp.asarray(rng.normal(size=sequences), jnp.float32),
  )


def measure_cost(smoke: bool, repeats: int) -> dict[str, dict[str, float]]:
  """Median seconds and peak temporaries of each step, the variants taking turns."""
  config, sequences, length = (SMOKE, 2 * GROUP, 32) if smoke else (QWEN25_05B, 8 * GROUP, 512)
  policy = models.Policy(config, dtype="float32" if smoke else "bfloat16", remat="attention")
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.1))
  rows = random_rows(config.vocab_size, sequences, length)
  params = jax.jit(policy.init)(jax.random.key(0))
  state = params, jax.jit(optimizer.init)(params)
  steps, results = {}, {}
  for name, gradient in gradients(policy).items():

    def step(state, rows, gradient=gradient):
      params, opt_state = state
      grads = jax.tree.map(lambda g: g / sequences, gradient(params, rows))
      updates, opt_state = optimizer.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    steps[name] = jax.jit(step, donate_argnums=0).lower(state, rows).compile()
    memory = steps[name].memory_analysis()
    results[name] = {"temp_bytes": float(memory.temp_size_in_bytes) if memory else float("nan")}
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for _ in range(repeats + 1):
    for name, compiled in steps.items():
      start = time.perf_counter()
      state = jax.block_until_ready(compiled(state, rows))
      seconds[name].append(time.perf_counter() - start)
  for name, times in seconds.items():
    results[name]["seconds"] = float(np.median(times[1:]))
  for row in results.values():
    row["added_share"] = row["seconds"] / results[BASELINE]["seconds"] - 1.0
  return results


def sample_rows(run: StageInputs, params: Any, prompts: int) -> Rows:
  """Groups of the policy's own samples on the first training prompts, with their rewards."""
  prepared = jax.jit(functools.partial(sampling.prepare_weights, run.learner.policy))(params)
  run.sampler.set_weights(jax.device_get(prepared), 0)
  stream = PromptStream(run.encoder, run.prompts, run.seed)
  requests = [stream.request(ticket) for ticket in range(prompts)]
  completions = sampling.generate(run.sampler, requests)
  length = max(len(requests[c.ticket].tokens) + len(c.tokens) for c in completions)
  length = -(-length // 128) * 128 if length > 128 else length
  tokens, mask = np.zeros((len(completions), length), np.int32), np.zeros((len(completions), length), bool)
  behavior, rewards = np.zeros((len(completions), length), np.float32), []
  for i, c in enumerate(completions):
    request = requests[c.ticket]
    start, end = len(request.tokens), len(request.tokens) + len(c.tokens)
    tokens[i, :start], tokens[i, start:end] = request.tokens, c.tokens
    mask[i, start:end], behavior[i, start:end] = c.mask, c.logprobs
    rewards.append(run.encoder.task.reward(request.prompt, run.encoder.decode_last_turn(c), c.finish))
  return Rows(jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(behavior), jnp.asarray(rewards, jnp.float32))


def estimates(policy: models.Policy, params: Any, rows: Rows) -> dict[str, Array]:
  """Estimated squared norms of all sequences, and their log-weights."""

  def one(row):
    row = jax.tree.map(lambda x: x[None], row)
    stats = score(policy, params, row.tokens)
    positions = jnp.arange(row.tokens.shape[1])[None]
    hidden = policy.hidden(params, row.tokens, jnp.ones_like(row.tokens), positions).astype(jnp.float32)
    hidden = jnp.concatenate([jnp.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)  # entry t predicts token t
    with_hidden = losses.squared_norms_by_logits(
      stats.logprobs, stats.sum_squares, row.mask, hidden_squared_norms=jnp.sum(hidden**2, axis=-1)
    )
    out = {"length": norms_of("length", stats, row), "logits": norms_of("logits", stats, row)}
    return jax.tree.map(lambda x: x[0], {**out, "logits and hidden states": with_hidden})

  return jax.lax.map(one, rows)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
  """Spearman's; NaN where one of them is constant."""
  return float("nan") if np.ptp(x) == 0 or np.ptp(y) == 0 else float(scipy.stats.spearmanr(x, y).statistic)


def measure_tracking(name: str, prompts: int, overrides: dict[str, Any]) -> dict[str, dict[str, float]]:
  """How well each estimate follows the exact squared norms on a config's own samples."""
  with tempfile.TemporaryDirectory() as folder:
    config = configs.load(name)
    experiment = config.experiment(config.options(run_dir=folder, samples=GROUP, **overrides))
    with tasks.RewardPool(experiment.task, workers=0) as pool:
      run = experiment.make_stage_inputs(pool)
      params = experiment.start(run) if experiment.start is not None else None
    params = jax.jit(experiment.policy.init)(jax.random.key(0)) if params is None else params
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    rows = sample_rows(run, params, prompts)
    policy = dataclasses.replace(experiment.policy, dtype="float32")
  found = jax.jit(lambda params, rows: exact(policy, params, rows))(params, rows)
  guesses = jax.jit(lambda params, rows: estimates(policy, params, rows))(params, rows)
  norms, rewards = np.asarray(found.squared_norms), np.asarray(rows.rewards)
  by_group = norms.reshape(-1, GROUP)
  spread = float(np.std(rewards)) or 1.0
  baseline = rewards - np.asarray(found.advantages)
  mean = rewards - np.asarray(losses.grpo_advantages(rows.rewards, rows.groups, prompts, normalize_std=False))
  results = {"the group's mean reward": {"baseline_distance": float(np.mean(np.abs(mean - baseline))) / spread}}
  for guess_name, guess in guesses.items():
    within = [rank_correlation(a, b) for a, b in zip(np.asarray(guess).reshape(-1, GROUP), by_group, strict=True)]
    advantages = losses.opob_advantages(
      rows.rewards, rows.groups, prompts, log_weights=found.log_weights, squared_norms=guess
    )
    distance = np.abs(rewards - np.asarray(advantages) - baseline)
    results[guess_name] = {
      "rank_correlation": rank_correlation(np.asarray(guess), norms),
      "rank_correlation_within_groups": float(np.nanmean(within)) if not np.all(np.isnan(within)) else float("nan"),
      "baseline_distance": float(np.mean(distance)) / spread,
    }
  return results


def main(arguments: list[str] | None = None) -> dict[str, Any]:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--smoke", action="store_true", help="tiny sizes, for any machine")
  parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind; 0 leaves the cost out")
  parser.add_argument("--track", default="quickstart", help="config whose policy makes the samples; '' for none")
  parser.add_argument("--prompts", type=int, default=64, help="groups of 8 samples to compare the norms on")
  parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="text fields of that config")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("opob_cost.json"))
  options = parser.parse_args(arguments)
  device = jax.devices()[0].device_kind
  overrides: dict[str, Any] = dict(item.split("=", 1) for item in options.set)
  if options.smoke:
    overrides |= {"warm_accuracy": 0.0}
  result: dict[str, Any] = {"device": device}
  print(device)

  if options.repeats:
    result["cost"] = measure_cost(options.smoke, 2 if options.smoke else options.repeats)
    print(f"{'learner step':40}{'ms':>10}{'added %':>10}{'temp GB':>10}")
    for name, row in result["cost"].items():
      print(f"{name:40}{1e3 * row['seconds']:10.1f}{100 * row['added_share']:10.1f}{row['temp_bytes'] / 1e9:10.2f}")

  if options.track:
    result["tracking"] = measure_tracking(options.track, 4 if options.smoke else options.prompts, overrides)
    print(f"{'norms (' + options.track + ')':40}{'rank corr':>10}{'in groups':>10}{'baseline distance':>19}")
    for name, row in result["tracking"].items():
      cells = (row.get("rank_correlation", np.nan), row.get("rank_correlation_within_groups", np.nan))
      print(f"{name:40}{cells[0]:10.3f}{cells[1]:10.3f}{row['baseline_distance']:19.3f}")
  options.out.write_text(json.dumps(result, indent=1) + "\n")
  return result


if __name__ == "__main__":
  main()
