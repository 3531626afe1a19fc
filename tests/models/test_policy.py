"""The policy against a float64 reference, and against itself: cached, packed, padded, unrolled, rematerialized."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest

from async_rl import models

CONFIGS = reference.CONFIGS
LENGTH = 11


@functools.cache
def make(name, dtype="float32"):
  """A policy with weights that make every option matter: norms away from their start, large attention logits."""
  policy = models.Policy(CONFIGS[name], dtype=dtype)
  params = jax.jit(policy.init)(jax.random.key(1))
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(2), len(leaves))
  leaves = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
  return policy, jax.tree.unflatten(structure, leaves)


def rows(batch=2, length=LENGTH, seed=0):
  tokens = np.random.default_rng(seed).integers(0, 50, (batch, length)).astype(np.int32)
  return tokens, np.ones_like(tokens), np.tile(np.arange(length, dtype=np.int32), (batch, 1))


def stack(params):
  return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def logprobs(policy, params, *inputs, **options):
  return np.asarray(jax.jit(lambda p, *x: models.score(policy, p, *x, **options).logprobs)(params, *inputs))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_score_agrees_with_float64_reference(name, temperature):
  policy, params = make(name)
  tokens, segments, positions = rows()
  got = logprobs(policy, params, tokens, segments, positions, temperature=temperature, chunk=4)
  host = jax.tree.map(np.asarray, params)
  for b, row in enumerate(tokens):
    expected = reference.log_softmax(reference.logits(policy.config, host, row) / temperature)
    np.testing.assert_allclose(got[b, 1:], expected[np.arange(LENGTH - 1), row[1:]], atol=2e-5)


OPTIONS = (
  "query_scale",
  "attention_softcap",
  "final_softcap",
  "sliding_window",
  "activation",
  "norm_offset",
  "embed_scale",
  "global_every",
  "rope_theta_local",
  "rope_scaling",
)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_result(option):
  policy, params = make("everything")
  default = next(f.default for f in dataclasses.fields(models.ModelConfig) if f.name == option)
  without = dataclasses.replace(policy, config=dataclasses.replace(policy.config, **{option: default}))
  assert np.max(np.abs(logprobs(policy, params, *rows()) - logprobs(without, params, *rows()))[:, 1:]) > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_agrees_with_full_forward(name):
  policy, params = make(name)
  tokens, segments, positions = rows()
  full = policy.logits(params, jax.jit(policy.hidden)(params, tokens, segments, positions))
  step = jax.jit(policy.decode)
  unstacked = models.unstack_layers(params)
  cache = policy.init_cache(2, LENGTH + 5)
  for t in range(LENGTH):
    hidden, cache = step(unstacked, tokens[:, t], positions[:, t], cache)
    np.testing.assert_allclose(policy.logits(unstacked, hidden), full[:, t], atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_continues_from_prefill_at_different_positions(name):
  policy, params = make(name)
  tokens, segments, positions = rows()
  full = jax.jit(policy.hidden)(params, tokens, segments, positions)
  _, kv = jax.jit(policy.prefill)(params, tokens, segments, positions)
  cache = tuple(
    tuple(new.at[:, :, :LENGTH].set(old) for new, old in zip(*layers, strict=True))
    for layers in zip(policy.init_cache(2, LENGTH + 3), kv, strict=True)
  )
  at = jnp.array([5, 8])  # later entries of the cache must not matter
  hidden, _ = jax.jit(policy.decode)(models.unstack_layers(params), tokens[jnp.arange(2), at], at, cache)
  np.testing.assert_allclose(hidden, full[jnp.arange(2), at], atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_decode_agrees_with_score(name):
  policy, params = make(name, "bfloat16")
  tokens, segments, positions = rows(batch=4)
  whole = logprobs(policy, params, tokens, segments, positions)[:, 1:]
  unstacked, cache = models.unstack_layers(params), policy.init_cache(4, LENGTH)
  step, stepwise = jax.jit(policy.decode), []
  for t in range(LENGTH - 1):
    hidden, cache = step(unstacked, tokens[:, t], positions[:, t], cache)
    logp = jax.nn.log_softmax(policy.logits(unstacked, hidden))
    stepwise.append(logp[jnp.arange(4), tokens[:, t + 1]])
  assert np.mean(np.abs(whole - np.stack(stepwise, 1))) < 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_scanned_layers_equal_unrolled_layers(name):
  policy, params = make(name)
  both = (logprobs(policy, p, *rows()) for p in (params, models.unstack_layers(params)))
  np.testing.assert_allclose(*both, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_packing_and_padding_change_nothing(name):
  policy, params = make(name)
  sequences = [rows(1, n, seed=n)[0][0] for n in (7, 4, 9)]
  packed = np.zeros((3, 1, 26), np.int32)  # tokens, segments, positions: 20 of sequences, 6 of padding
  apart = np.zeros((3, 3, 9), np.int32)
  packed[0], apart[0] = 13, 13  # padding is told by its segment, not by its token
  ends = np.cumsum([len(s) for s in sequences])
  for i, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
    size = len(sequence)
    packed[:, 0, end - size : end] = sequence, np.full(size, i + 1), np.arange(size)
    apart[:, i, :size] = sequence, np.ones(size), np.arange(size)
  together, separate = logprobs(policy, params, *packed)[0], logprobs(policy, params, *apart)
  assert np.isfinite(together).all()
  assert np.isfinite(separate).all()
  for i, end in enumerate(ends):
    size = len(sequences[i])
    np.testing.assert_allclose(together[end - size + 1 : end], separate[i, 1:size], atol=1e-5)


def test_remat_and_unrolling_leave_gradients_alone():
  policy, params = make("everything")
  inputs = rows()

  def gradient(remat, params):
    p = dataclasses.replace(policy, remat=remat)
    return jax.jit(jax.grad(lambda x: jnp.mean(models.score(p, x, *inputs).logprobs[:, 1:])))(params)

  expected = gradient("none", params)
  got = [gradient(remat, params) for remat in models.REMAT if remat != "none"]
  for each in (*got, stack(gradient("full", models.unstack_layers(params)))):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), each, expected)


def test_padding_ids_are_never_likely():
  policy, params = make("everything")
  logits = policy.logits(params, jax.jit(policy.hidden)(params, *rows()))
  limit = policy.config.vocab_limit
  assert np.all(jax.nn.softmax(logits / 0.1)[..., limit:] == 0.0)
  assert np.all(np.isfinite(logits))


@pytest.mark.parametrize("name", CONFIGS)
def test_num_params_counts_them(name):
  assert sum(x.size for x in jax.tree.leaves(models.Policy(CONFIGS[name]).abstract())) == CONFIGS[name].num_params()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_kv_heads": 3}, "num_kv_heads=3"),
    ({"head_dim": 7}, "head_dim=7"),
    ({"activation": "relu"}, "activation='relu'"),
    ({"vocab_limit": 65}, "vocab_limit=65"),
  ],
)
def test_bad_configs_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(reference.LLAMA, **change)


@pytest.mark.parametrize(
  "change", [{"remat": "all"}, {"dtype": "float8"}, {"residual_dtype": "int8"}, {"attention": "flash"}]
)
def test_bad_policies_are_refused(change):
  with pytest.raises(ValueError, match=next(iter(change.values()))):
    models.Policy(reference.LLAMA, **change)


@pytest.mark.parametrize("dtype", models.DTYPES)
@pytest.mark.parametrize("residual_dtype", models.DTYPES)
def test_a_residual_stream_in_less_than_what_is_added_to_it_is_refused(dtype, residual_dtype):
  if residual_dtype in (dtype, "float32"):
    models.Policy(reference.LLAMA, dtype=dtype, residual_dtype=residual_dtype)
    return
  with pytest.raises(ValueError, match=f"got residual_dtype='{residual_dtype}' and dtype='{dtype}'"):
    models.Policy(reference.LLAMA, dtype=dtype, residual_dtype=residual_dtype)


def test_float16_is_refused_on_tpus(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(platform="tpu")])
  with pytest.raises(ValueError, match="dtype='float16' is not for TPUs, .* choose dtype='bfloat16'"):
    models.Policy(reference.LLAMA, dtype="float16")


@pytest.mark.parametrize("name", CONFIGS)
def test_float16_with_a_float32_residual_stream_is_close_to_float32(name):
  policy, params = make(name)
  tokens, segments, positions = rows()
  exact = np.asarray(policy.hidden(params, tokens, segments, positions))

  def error(**dtypes):
    hidden = models.Policy(CONFIGS[name], **dtypes).hidden(params, tokens, segments, positions)
    assert hidden.dtype == dtypes["dtype"]
    return float(np.abs(np.asarray(hidden, np.float32) - exact).mean())

  assert error(dtype="float16") < error(dtype="bfloat16") / 4
