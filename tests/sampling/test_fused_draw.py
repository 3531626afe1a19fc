"""The kernels that draw tokens on GPUs, interpreted, against a slow form of them in float64 and against XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import models
from async_rl import rollout
from async_rl import sampling
from async_rl.sampling import _fused_draw
from async_rl.sampling._fused_draw import draw_in_kernels
from async_rl.sampling._fused_draw import fits_kernels

CONFIG = functools.partial(sampling.SamplerConfig, slots=4, group_size=2, max_prompt_tokens=8, max_new_tokens=8)
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
BORDER = 3e-6  # of a running sum in float32


def inputs(rows, vocab, scale=2.0, seed=0):
  rng = np.random.default_rng([seed, rows, vocab])
  logits = scale * rng.standard_normal((rows, vocab))
  return logits.astype(np.float32), rng.random((rows, 2)).astype(np.float32)


def draw(logits, uniforms, temperature=1.0, **options):
  call = lambda x, u: draw_in_kernels(x, u, temperature, interpret=True, **options)
  return [np.asarray(x) for x in jax.jit(call)(logits, uniforms)]


def by_xla(logits, uniforms, temperature=1.0):
  call = lambda x, u: sampling.draw_tokens(x, u, CONFIG(temperature=temperature))
  return [np.asarray(x) for x in jax.jit(call)(logits, uniforms)]


def invert_slowly(weights, uniform):
  """The index at which the running sum exceeds its part of the total, and how far from a border that part is."""
  running = np.cumsum(weights) / weights.sum()
  index = np.flatnonzero((running > uniform) & (weights > 0))[0]
  return index, np.abs(np.append(running[:-1], np.inf) - uniform).min()


def draw_slowly(logits, uniforms, temperature=1.0):
  """Tokens, their log-probabilities, and how far each row's uniforms are from a border, in float64."""
  drawn = []
  for row, (first, second) in zip(logits.astype(np.float64) / temperature, uniforms, strict=True):
    weights = np.exp(row - row.max())
    blocks = np.pad(weights, (0, -len(row) % 128)).reshape(-1, 128)
    block, margin = invert_slowly(blocks.sum(1), first)
    place, margin_inside = invert_slowly(blocks[block], second)
    token = 128 * block + place
    drawn.append((token, np.log(weights[token] / weights.sum()), min(margin, margin_inside)))
  return [np.array(x) for x in zip(*drawn, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(
  ("rows", "vocab", "scale"),
  [(1, 5, 2.0), (3, 128, 2.0), (64, 300, 9.0), (16, 2048, 2.0), (5, 5000, 0.1), (16, 4097, 30.0)],
)
def test_they_draw_what_the_uniforms_say(rows, vocab, scale, temperature):
  given = *inputs(rows, vocab, scale), temperature
  tokens, logprobs = draw(*given)
  expected, expected_logprobs, margins = draw_slowly(*given)
  clear = margins > BORDER
  assert clear.mean() >= 0.8
  np.testing.assert_array_equal(tokens[clear], expected[clear])
  np.testing.assert_allclose(logprobs[clear], expected_logprobs[clear], atol=2e-6, rtol=1e-6)
  assert tokens.dtype == np.int32
  others, other_logprobs = by_xla(*given)
  np.testing.assert_array_equal(tokens[clear], others[clear])
  np.testing.assert_allclose(logprobs[clear], other_logprobs[clear], atol=1e-6 * max(10, 2 * scale))  # of logits


@pytest.mark.parametrize("low", [-1e30, -np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("uniform", [0.0, 2**-23, 0.5, 1 - 2**-23, BELOW_ONE])
def test_impossible_tokens_are_never_drawn(uniform, low):
  logits, _ = inputs(32, 2500, scale=8.0)
  allowed = np.random.default_rng(1).random(logits.shape) < 0.004  # in a quarter of the blocks there is none
  allowed[:, 77] = True
  logits = np.where(allowed, logits, low).astype(np.float32)
  uniforms = np.full((32, 2), uniform, np.float32)
  tokens, logprobs = draw(logits, uniforms)
  assert allowed[np.arange(32), tokens].all()
  others, other_logprobs = by_xla(logits, uniforms)
  assert (tokens == others).all() or uniform > 0.9  # where the largest sums differ in their last bit
  np.testing.assert_allclose(logprobs[tokens == others], other_logprobs[tokens == others], atol=1e-5)


@pytest.mark.parametrize("high", [0.0, 300.0])
def test_blocks_whose_weights_underflow_are_never_drawn(high):
  logits, _ = inputs(4, 5000)
  logits[:, :2100] -= 200  # a chunk, a block and some tokens of one whose others have weights
  logits[:, 2500:] -= 200
  logits += high
  uniforms = np.array([[0, 0], [0, BELOW_ONE], [BELOW_ONE, 0], [BELOW_ONE, BELOW_ONE]], np.float32)
  tokens, logprobs = draw(logits, uniforms)
  np.testing.assert_array_equal(tokens[:2], [2100, 2175])
  np.testing.assert_array_equal(tokens[2:], [2432, 2499])
  np.testing.assert_array_equal(tokens, by_xla(logits, uniforms)[0])
  wide = logits.astype(np.float64)
  expected = wide[np.arange(4), tokens] - high - np.log(np.exp(wide - high).sum(1))
  np.testing.assert_allclose(logprobs, expected, atol=2e-6)


def test_one_token_may_have_all_the_probability():
  logits, uniforms = inputs(8, 3000)
  peaks = np.array([0, 127, 128, 2047, 2048, 2943, 2944, 2999])
  logits[np.arange(8), peaks] = 200
  uniforms[::2], uniforms[1::2] = 0, BELOW_ONE
  tokens, logprobs = draw(logits, uniforms)
  np.testing.assert_array_equal(tokens, peaks)
  np.testing.assert_array_equal(logprobs, 0)


def test_tokens_rarer_than_the_spacing_of_uniforms_keep_their_probability():
  logits = np.full((512, 128 * 3), np.log(1e-9), np.float32)
  logits[:, 1:128] = -1e30
  logits[:, 0] = 0
  uniforms = np.stack([np.full(512, BELOW_ONE), np.arange(512) / 512], -1).astype(np.float32)
  tokens, _ = draw(logits, uniforms)
  np.testing.assert_array_equal(np.bincount(tokens, minlength=384)[256:], 4)  # the last block, evenly


@pytest.mark.parametrize("limit", [1, 257, 2049, 2100, 4000])
def test_ids_behind_the_limit_are_padding(limit):
  logits, uniforms = inputs(16, 2100)
  uniforms[:8, 0] = BELOW_ONE
  logits[:, min(limit, 2100) :] += 50
  marked = np.where(np.arange(2100) < limit, logits, np.float32(-1e30))
  for x, y in zip(draw(logits, uniforms, limit=limit), draw(marked, uniforms), strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_logit_that_is_not_a_number_is_seen_in_the_log_probability():
  logits, uniforms = inputs(3, 2500)
  logits[0, 2400], logits[1], logits[2, 3] = np.nan, np.nan, np.inf
  tokens, logprobs = draw(logits, uniforms)
  assert ((tokens >= 0) & (tokens < 2500)).all()
  assert np.isnan(logprobs).all()


@pytest.mark.parametrize(
  ("weights", "running", "uniform", "expected"),
  [
    ([1, 0, 1], [1, 1.0000001, 2], 0.5, 2),
    ([1, 0, 1], [1, 0.9999999, 2], 0.5, 2),
    ([1, 3, 0], [1, 4, 4], 1.0, 1),  # nothing is beyond
    ([0, 0, 0], [0, 0, 0], 0.5, 0),
  ],
)
def test_rounding_of_the_running_sum_chooses_no_zero_weight(weights, running, uniform, expected, monkeypatch):
  monkeypatch.setattr(jnp, "cumsum", lambda _: jnp.array(running, jnp.float32))
  index, total = _fused_draw._invert(jnp.array(weights, jnp.float32), jnp.float32(uniform))
  assert (index, total) == (expected, running[-1])


def test_rows_may_be_split_over_devices():
  logits, uniforms = inputs(8, 700)
  mesh = models.named_mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
  for x, y in zip(draw(logits, uniforms, mesh=mesh), draw(logits, uniforms), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.usefixtures("lowers_for_gpus")
@pytest.mark.parametrize(("rows", "vocab", "limit"), [(64, 151936, 151669), (3, 32001, None), (1, 7, None)])
def test_it_becomes_two_kernels_for_gpus(rows, vocab, limit):
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  traced = jax.jit(lambda x, u: draw_in_kernels(x, u, 0.7, limit=limit)).trace(array(rows, vocab), array(rows, 2))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize(
  ("options", "axes", "expected"),
  [
    ({}, None, True),
    ({"temperature": 0.5}, {"fsdp": 4}, True),
    ({"temperature": 0.0}, None, False),
    ({"top_k": 5, "logprobs_of": "plain"}, None, False),
    ({"top_p": 0.5, "logprobs_of": "plain"}, None, False),
    ({}, {"fsdp": 2, "tensor": 2}, False),
  ],
)
def test_they_are_for_whole_vocabularies(options, axes, expected):
  mesh = axes and rollout.make_mesh(jax.devices()[:4], **axes)
  assert fits_kernels(CONFIG(**options), mesh) == expected
