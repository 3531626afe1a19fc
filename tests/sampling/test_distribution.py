"""What is drawn from given logits, and the log-probability that comes with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import sampling
from async_rl.sampling._draw import invert_cdf
from async_rl.sampling._draw import truncate_logits

CONFIG = functools.partial(sampling.SamplerConfig, slots=4, group_size=2, max_prompt_tokens=8, max_new_tokens=8)
VOCAB = 300  # three blocks, the last one not full


def logits_of(seed, rows=1, scale=2.0):
  return (scale * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def softmax(x):
  e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def counts(logits, config, draws):
  uniforms = jax.random.uniform(jax.random.key(3), (draws, 2))
  tokens, logprobs = jax.jit(lambda x, u: sampling.draw_tokens(x, u, config))(np.repeat(logits, draws, 0), uniforms)
  return np.bincount(tokens, minlength=VOCAB), np.asarray(tokens), np.asarray(logprobs)


def chi_square(observed, expected):
  """Standard deviations by which chi-square exceeds its mean, over tokens expected often enough."""
  often = expected >= 5
  observed = np.append(observed[often], observed[~often].sum())
  expected = np.append(expected[often], expected[~often].sum())
  observed, expected = observed[expected > 0], expected[expected > 0]
  value, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
  return (value - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_draws_follow_the_tempered_softmax(temperature):
  logits, draws = logits_of(0), 40_000
  probs = softmax(logits / temperature)[0]
  got, tokens, logprobs = counts(logits, CONFIG(temperature=temperature), draws)
  assert abs(chi_square(got, probs * draws)) < 4
  np.testing.assert_allclose(logprobs, np.log(probs)[tokens], atol=1e-5)


def test_chi_square_sees_a_wrong_temperature():
  logits, draws = logits_of(0), 40_000
  got, _, _ = counts(logits, CONFIG(temperature=1.1), draws)
  assert chi_square(got, softmax(logits)[0] * draws) > 10


def test_tokens_rarer_than_the_spacing_of_uniforms_keep_their_probability():
  # 256 tokens of 1e-9 each behind one of almost 1: one float32 uniform could not tell them apart.
  logits = np.full((1, 128 * 3), np.log(1e-9), np.float32)
  logits[0, :128] = -1e30
  logits[0, 0] = 0.0
  uniforms = np.stack([np.full(4096, 1 - 2**-24), np.arange(4096) / 4096], -1).astype(np.float32)
  tokens = np.asarray(invert_cdf(jnp.asarray(np.repeat(logits, 4096, 0)), jnp.asarray(uniforms)))
  assert set(tokens) == set(range(256, 384))  # the last block, evenly
  assert np.ptp(np.bincount(tokens)[256:]) <= 1


@pytest.mark.parametrize("uniform", [0.0, 2**-23, 0.5, 1 - 2**-23, np.nextafter(np.float32(1), np.float32(0))])
def test_impossible_tokens_are_never_drawn(uniform):
  rng = np.random.default_rng(1)
  logits = logits_of(2, 256, scale=8.0)
  allowed = rng.random(logits.shape) < 0.02
  allowed[:, 77] = True
  logits = np.where(allowed, logits, -1e30).astype(np.float32)
  tokens = np.asarray(invert_cdf(jnp.asarray(logits), jnp.full((256, 2), uniform, jnp.float32)))
  assert allowed[np.arange(256), tokens].all()


def test_greedy_takes_the_most_likely_token_with_its_probability_at_temperature_one():
  logits = logits_of(4, 5)
  tokens, logprobs = sampling.draw_tokens(jnp.asarray(logits), jnp.zeros((5, 2)), CONFIG(temperature=0.0))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))
  np.testing.assert_allclose(logprobs, np.log(softmax(logits).max(-1)), atol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(7, None), (None, 0.8), (50, 0.5), (1000, None), (None, 1.0)])
def test_truncation_keeps_the_most_likely_tokens(top_k, top_p):
  logits = logits_of(5, 3)
  kept = np.isfinite(truncate_logits(jnp.asarray(logits), top_k, top_p))
  for row, mask in zip(logits, kept, strict=True):
    order = np.argsort(-row)
    order = order[: top_k or VOCAB]
    if top_p is not None:
      probs = softmax(row[order])
      order = order[: 1 + int((np.cumsum(probs) < top_p - 1e-6).sum())]
    assert set(np.flatnonzero(mask)) == set(order)


def test_ties_with_the_last_token_kept_are_kept():
  logits = jnp.asarray([[0.0, 1.0, 1.0, 2.0, -1.0]])
  np.testing.assert_array_equal(np.isfinite(truncate_logits(logits, 2, None))[0], [False, True, True, True, False])


@pytest.mark.parametrize("logprobs_of", ["plain", "truncated"])
def test_truncated_sampling_says_what_its_logprobs_are_of(logprobs_of):
  logits, draws = logits_of(6), 20_000
  got, tokens, logprobs = counts(logits, CONFIG(top_k=9, temperature=0.8, logprobs_of=logprobs_of), draws)
  plain = softmax(logits / 0.8)[0]
  truncated = np.where(logits[0] >= np.sort(logits[0])[-9], plain, 0)
  truncated /= truncated.sum()
  assert abs(chi_square(got, truncated * draws)) < 4
  expected = np.log((plain if logprobs_of == "plain" else truncated)[tokens])
  np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"slots": 1}, "slots=1, group_size=2"),
    ({"chunk": 0}, "chunk=0"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"on_update": "drop"}, "on_update='drop'"),
    ({"seed": 2**32}, "seed=4294967296"),
    ({"top_k": 0, "logprobs_of": "plain"}, "top_k=0"),
    ({"top_p": 1.5, "logprobs_of": "plain"}, "top_p=1.5"),
    ({"top_k": 5}, "logprobs_of"),
    ({"top_p": 0.9, "logprobs_of": "both"}, "logprobs_of"),
    ({"logprobs_of": "plain"}, "drop it"),
    ({"top_k": 5, "logprobs_of": "plain", "temperature": 0.0}, "no effect"),
  ],
)
def test_bad_settings_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    CONFIG(**options)


def test_length_buckets_cover_the_limits():
  config = CONFIG(max_prompt_tokens=100, max_new_tokens=33, length_buckets=3)
  assert config.prompt_lengths == (48, 80, 112)
  assert config.lengths == (48, 96, 144)
  assert config.capacity == 144
  assert config.prefix_lengths == (48, 80, 112, 144)
  assert CONFIG(length_buckets=4).lengths == (16,)
