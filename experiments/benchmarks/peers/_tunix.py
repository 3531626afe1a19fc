"""Tunix: its own sampler on its Qwen3, and a step of its trainer with its GRPO loss."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import peft_trainer

from experiments.benchmarks.decode_speed import GROUP
from experiments.benchmarks.peers._work import Work


def describe() -> dict[str, str]:
  """Returns the device and the versions."""
  tunix = importlib.metadata.version("google-tunix")
  return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "tunix": tunix}


class Numbers:
  """A tokenizer, as Tunix asks for it, of texts that are token ids; no token ends a completion."""

  def encode(self, text: str, **_: Any) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Any, **_: Any) -> str:
    return " ".join(map(str, ids))

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return -1

  def pad_id(self) -> int:
    return 0


def generation(work: Work) -> Callable[[], None]:
  """Returns what generates, log-probabilities included; top_p is 1, with which it sorts nothing."""
  c = work.config
  cache = tunix_sampler.CacheConfig(work.prompt + work.completion, c.num_layers, c.num_kv_heads, c.head_dim)
  sampler = tunix_sampler.Sampler(_make_model(work, work.dtype), Numbers(), cache)
  texts = [" ".join(map(str, prompt)) for prompt in np.repeat(work.prompts(), GROUP, axis=0)]
  seeds = itertools.count()

  def run() -> None:
    done = sampler(
      texts,
      max_generation_steps=work.completion,
      max_prompt_length=work.prompt,
      temperature=1.0,
      top_p=1.0,
      top_k=None,
      seed=next(seeds),
      return_logprobs=True,
    )
    work.check_generated([len(tokens) for tokens in done.tokens])

  return run


def learning_step(work: Work) -> Callable[[], None]:
  """Returns what takes a step over micro-batches: PPO's clip, no reference; the entropy is computed, too."""
  config = GRPOConfig(num_generations=GROUP, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean")
  config.temperature = 1.0  # as its learner sets it
  steps = work.sequences // work.micro_batch
  trainer = peft_trainer.PeftTrainer(
    _make_model(work, "float32"),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.1)),
    peft_trainer.TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=steps),
  )

  def loss(model: nnx.Module, train_example: common.TrainExample, algo_config: None) -> Any:
    del algo_config
    return algo_core.grpo_loss_fn(model, train_example, algo_config=config, pad_id=0, eos_id=-1)

  trainer.with_loss_fn(loss, has_aux=True)
  trainer.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": None})
  trainer.is_managed_externally = True  # as its learner has it: `train` can be called again
  examples = _make_examples(work)

  def run() -> None:
    before = trainer.train_steps
    trainer.train(examples)
    jax.block_until_ready(jax.tree.leaves(nnx.state(trainer.model)))
    if trainer.train_steps != before + 1:
      raise RuntimeError(f"took {trainer.train_steps - before} steps in place of one")

  return run


def _make_examples(work: Work) -> list[common.TrainExample]:
  tokens, advantages = work.random_sequences()
  examples = []
  for part in work.micro_batches():
    completions = jnp.asarray(tokens[part, work.prompt :])
    examples.append(
      common.TrainExample(
        prompt_ids=jnp.asarray(tokens[part, : work.prompt]),
        prompt_mask=jnp.ones((work.micro_batch, work.prompt), bool),
        completion_ids=completions,
        completion_mask=jnp.ones(completions.shape, bool),
        advantages=jnp.asarray(advantages[part]),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.full(completions.shape, -np.log(work.config.vocab_size), jnp.float32),
      )
    )
  return examples


def _make_model(work: Work, param_dtype: str) -> qwen3.Qwen3:
  """Returns a model with normal weights, .02 wide, and norms of one; its own initializer leaves zeros in the layers."""
  c = work.config
  config = qwen3.ModelConfig(
    num_layers=c.num_layers,
    vocab_size=c.vocab_size,
    embed_dim=c.d_model,
    hidden_dim=c.d_ff,
    num_heads=c.num_heads,
    head_dim=c.head_dim,
    num_kv_heads=c.num_kv_heads,
    rope_theta=int(c.rope_theta),
    norm_eps=c.norm_eps,
    use_tied_embedding=True,
    dtype=jnp.dtype(work.dtype),
    param_dtype=jnp.dtype(param_dtype),
  )
  graph, state = nnx.split(nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0))))
  leaves, tree = jax.tree.flatten(state)

  @functools.partial(jax.jit, static_argnums=(1, 2))  # a program for each shape: one for all compiles for minutes
  def fill(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.ones(shape, dtype) if len(shape) == 1 else (0.02 * jax.random.normal(key, shape)).astype(dtype)

  keys = jax.random.split(jax.random.key(0), len(leaves))
  values = [fill(key, x.shape, jnp.dtype(x.dtype)) for key, x in zip(keys, leaves)]
  return nnx.merge(graph, jax.tree.unflatten(tree, values))
