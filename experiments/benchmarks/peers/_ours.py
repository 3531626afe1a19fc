"""This project: the slot engine, and a learner step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import optax

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import sampling
from experiments.benchmarks.decode_speed import GROUP
from experiments.benchmarks.decode_speed import make_request
from experiments.benchmarks.decode_speed import random_weights
from experiments.benchmarks.peers._work import Work
from experiments.benchmarks.stabilizer_cost import make_batch


def describe() -> dict[str, str]:
  """Returns the device and the versions."""
  return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def generation(work: Work) -> Callable[[], None]:
  """Returns what generates; log-probabilities come with the tokens, and a prompt is computed once for its group."""
  policy = models.Policy(work.config, work.dtype)
  config = sampling.SamplerConfig(
    slots=work.sequences, group_size=GROUP, max_prompt_tokens=work.prompt, max_new_tokens=work.completion
  )
  engine = sampling.Engine(policy, config, stop_ids=(), pad_id=0)
  engine.set_weights(random_weights(policy), 0)
  tickets = itertools.count()

  def run() -> None:
    requests = [make_request(policy, next(tickets), work.prompt) for _ in range(work.sequences // GROUP)]
    done = sampling.generate(engine, requests)
    work.check_generated([len(completion.tokens) for completion in done])

  return run


def learning_step(work: Work) -> Callable[[], None]:
  """Returns what takes a step, with PPO's clip, GRPO's advantages, clipping by norm and AdamW."""
  shape = learning.BatchShape(
    work.sequences, work.prompt + work.completion, work.micro_batch, work.completion, work.prompt, row_sequences=1
  )
  learner = learning.Learner(
    models.Policy(work.config, work.dtype, remat="activations"),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.1)),
    learning.objective("ppo_clip", advantages="grpo", aggregate="token_mean"),
    shape,
    rollout.make_mesh(jax.devices()[:1]),
  )
  batch = learner.put(make_batch(shape, work.config.vocab_size))
  state = learner.init(jax.random.key(0))

  def run() -> None:
    nonlocal state
    state, _ = jax.block_until_ready(learner.step(state, batch))

  return run
