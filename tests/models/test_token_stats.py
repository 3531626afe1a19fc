"""The chunked head against plain log_softmax and its autodiff, and that it never forms [tokens, vocabulary]."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest

from async_rl import models

ROWS, LENGTH, WIDTH, VOCAB = 2, 10, 8, 64
CAPPED = dataclasses.replace(reference.LLAMA, final_softcap=3.0, vocab_limit=50)


def inputs(dtype=np.float32):
  random = np.random.default_rng(0)
  hidden, kernel = random.normal(size=(ROWS, LENGTH, WIDTH)), random.normal(size=(WIDTH, VOCAB))
  return hidden.astype(dtype), kernel.astype(np.float32), random.integers(0, 50, (ROWS, LENGTH))


def plain(config, temperature, hidden, kernel, targets):
  logits = hidden.astype(jnp.float32) @ kernel.astype(hidden.dtype).astype(jnp.float32)
  if config.final_softcap:
    logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
  logits = logits[..., : config.vocab_limit] / temperature
  logp = jax.nn.log_softmax(logits)
  picked = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
  return picked, -jnp.sum(jnp.exp(logp) * logp, -1), jnp.sum(jnp.exp(2 * logp), -1)


@pytest.mark.parametrize("config", [reference.LLAMA, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("chunk", [4, 16])  # not dividing the length; longer than it
def test_statistics_and_gradients_agree_with_autodiff(config, temperature, chunk):
  hidden, kernel, targets = inputs()
  policy = models.Policy(config, dtype="float32")
  weights = np.random.default_rng(1).normal(size=(ROWS, LENGTH)).astype(np.float32)
  stats = models.token_stats(policy, temperature, chunk, hidden, kernel, targets)
  for got, expected in zip(jax.tree.leaves(stats), plain(config, temperature, hidden, kernel, targets), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)

  def gradient(f):
    return jax.grad(lambda h, k: jnp.sum(weights * f(h, k)), argnums=(0, 1))(hidden, kernel)

  got = gradient(lambda h, k: models.token_stats(policy, temperature, chunk, h, k, targets).logprobs)
  expected = gradient(lambda h, k: plain(config, temperature, h, k, targets)[0])
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("remat", ["none", "full"])  # the slopes at the logits are kept, or formed again
@pytest.mark.parametrize("needed", [0, 3, 10])
def test_only_needed_tokens_are_scored(needed, remat):
  hidden, kernel, targets = inputs()
  policy = models.Policy(CAPPED, dtype="float32", remat=remat)
  mask = np.arange(ROWS * LENGTH) % 2 * 10 >= 10
  mask &= np.cumsum(mask) <= needed
  scored = models.Scored(jnp.argsort(~mask)[None], jnp.int32(mask.sum()))
  mask = mask.reshape(ROWS, LENGTH)

  def loss(h, k, scored):
    stats = models.token_stats(policy, 0.7, 4, h, k, targets, scored)
    return jnp.sum(jnp.where(mask, stats.logprobs, 0.0) * jnp.cos(jnp.arange(LENGTH))[None]), stats

  run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, stats), grads = run(hidden, kernel, scored)
  (_, expected_stats), expected = run(hidden, kernel, None)
  for got, full in zip(*map(jax.tree.leaves, (stats, expected_stats)), strict=True):
    np.testing.assert_allclose(got[mask], full[mask], atol=1e-6)
    assert np.count_nonzero(got) <= -(-needed // 4) * 4  # whole chunks
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, expected)
  assert np.any(grads[0]) == (needed > 0)


def test_bfloat16_hidden_states_keep_the_kernel_gradient_in_float32():
  hidden, kernel, targets = inputs(jnp.bfloat16)
  policy = models.Policy(reference.LLAMA)
  loss = lambda f: jax.grad(lambda h, k: jnp.sum(f(h, k)), argnums=(0, 1))(hidden, kernel)
  got = loss(lambda h, k: models.token_stats(policy, 1.0, 4, h, k, targets).logprobs)
  expected = loss(lambda h, k: plain(policy.config, 1.0, h, k, targets)[0])
  assert (got[0].dtype, got[1].dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(got[1], expected[1], atol=0.05)
  np.testing.assert_allclose(got[0].astype(np.float32), expected[0].astype(np.float32), atol=0.05)


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_tied_table_has_a_gradient_in_bfloat16(chunk):
  # jaxlib 0.10 fails to run this on CPUs if it folds the transposition into the product; see `_backward`.
  policy = models.Policy(dataclasses.replace(reference.LLAMA, tie_embeddings=True))
  random = np.random.default_rng(0)
  hidden, table = jnp.asarray(random.normal(size=(2, 64, 128)), jnp.bfloat16), random.normal(size=(256, 128))
  targets = random.integers(0, 256, (2, 64))
  loss = lambda table: jnp.mean(models.token_stats(policy, 1.0, chunk, hidden, table.T, targets).logprobs)
  gradient = jax.jit(jax.grad(loss))(table.astype(np.float32))
  assert np.isfinite(gradient).all()
  assert np.abs(gradient).max() > 0


def sizes(jaxpr):
  """Sizes of all arrays that a jaxpr forms, inner ones included."""
  for equation in jaxpr.eqns:
    yield from (math.prod(v.aval.shape) for v in equation.outvars)
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from sizes(inner)


def test_tokens_times_vocabulary_never_exists():
  config = dataclasses.replace(reference.LLAMA, vocab_size=1000, num_layers=1)
  policy = models.Policy(config, dtype="float32", remat="attention")
  tokens, params = jnp.zeros((2, 64), jnp.int32), policy.abstract()

  def largest(chunk):
    loss = lambda p: jnp.sum(models.score(policy, p, tokens, tokens, tokens, chunk=chunk).logprobs)
    return max(sizes(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))

  assert largest(chunk=128) >= 2 * 64 * 1000  # the measure sees it where it exists
  assert largest(chunk=8) < 2 * 64 * 1000 / 3
