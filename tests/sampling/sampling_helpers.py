"""A small policy, engines of it that compile once, and the learner's view of what they drew."""

import functools

import jax
import numpy as np

from async_rl import models
from async_rl import sampling
from async_rl.types import Prompt
from async_rl.types import Request

VOCAB = 150
STOPS = (1, 2)
CONFIG = sampling.SamplerConfig(
  slots=6,
  group_size=2,
  max_prompt_tokens=20,
  max_new_tokens=28,
  chunk=5,
  temperature=0.8,
  seed=4,
  length_buckets=1,
)


@functools.cache
def make(dtype="float32"):
  """A small policy with every option of the Qwen family, and parameters that make peaked distributions."""
  config = models.ModelConfig(
    vocab_size=VOCAB, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, qk_norm=True,
    qkv_bias=True, vocab_limit=VOCAB - 5,
  )  # fmt: skip
  policy = models.Policy(config, dtype=dtype)
  params = jax.jit(policy.init)(jax.random.key(0))
  return policy, jax.tree.map(lambda x: 1.2 * x, params)


def engine_of(dtype="float32", **options):
  """An engine with the weights of `make`. It is kept for its compiled programs; every test leaves it idle."""
  engine = _kept_engine(dtype, **options)
  engine.set_weights(make(dtype)[1], 3)
  return engine


@functools.cache
def _kept_engine(dtype, **options):
  config = sampling.SamplerConfig(**{**vars(CONFIG), **options})
  return sampling.Engine(make(dtype)[0], config, STOPS, pad_id=0)


def requests_of(tickets, seed=0, longest=20):
  """Prompts of 1 to `longest` tokens; each depends on its ticket and the seed only."""

  def tokens(ticket):
    rng = np.random.default_rng([seed, ticket])
    return rng.integers(3, VOCAB - 5, rng.integers(1, longest + 1)).astype(np.int32)

  return [Request(ticket, tokens(ticket), Prompt(ticket, "", None)) for ticket in tickets]


@functools.cache
def weights(version):
  """Weights that differ visibly from one version to the next."""
  _, params = make()
  rng = np.random.default_rng(version)
  return jax.tree.map(lambda x: x + 0.02 * np.std(x) * rng.standard_normal(x.shape, np.float32), params)


@functools.cache
def one_step():
  """One cached decode step of one sequence: its log-probabilities and the cache."""
  policy, _ = make()

  def step(params, token, position, cache):
    hidden, cache = policy.decode(params, token[None], position[None], cache)
    return jax.nn.log_softmax(policy.logits(params, hidden)[0] / CONFIG.temperature), cache

  return jax.jit(step)


@functools.cache
def scorer(dtype, temperature):
  policy, _ = make(dtype)
  return jax.jit(lambda p, *x: models.score(policy, p, *x, temperature=temperature, chunk=16).logprobs)


def rescore(completion, prompt, params, dtype="float32", temperature=CONFIG.temperature):
  """The learner's log-probabilities of a completion, in a padded row."""
  sequence = np.concatenate([prompt, completion.tokens])
  row = np.zeros((1, 64), np.int32)
  row[0, : len(sequence)] = sequence
  segments = (np.arange(64) < len(sequence)).astype(np.int32)[None]
  got = scorer(dtype, temperature)(params, row, segments, np.arange(64, dtype=np.int32)[None])
  return np.asarray(got)[0, len(prompt) : len(sequence)]


def same(a, b, exact=True):
  """Whether two lists of completions are the same samples."""
  assert [(c.ticket, c.sample) for c in a] == [(c.ticket, c.sample) for c in b]
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x.tokens, y.tokens)
    assert x.finish == y.finish
    if exact:
      np.testing.assert_array_equal(x.logprobs, y.logprobs)
    np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)
