"""Exact gradient norms of trajectories: both ways against one gradient per unpacked sequence; what OPOB makes of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import CONFIG
from learning_helpers import LONGEST
from learning_helpers import POLICY
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import make_mesh
from learning_helpers import params_of
from learning_helpers import shape_of
from learning_helpers import start

from async_rl import learning
from async_rl import models
from async_rl.learning._norms import packed_squared_norms
from async_rl.learning._norms import resolve_exact_norms
from async_rl.learning._norms import squared_gradient_norms

CHUNK = 24  # tokens whose logits are formed at a time: of two sequences
WIDE = dataclasses.replace(POLICY, config=dataclasses.replace(CONFIG, d_model=512, d_ff=2048, num_heads=64))
PROMPTS = (8, 256, 1000)
#: What Gemma 2 and 3 have that the tiny policy lacks.
GEMMA = dict(
  tie_embeddings=True, embed_scale=True, post_norms=True, norm_offset=1.0, activation="gelu",
  attention_softcap=2.0, final_softcap=5.0, sliding_window=4, global_every=2,
)  # fmt: skip


def squared_norms(params, groups, policy=POLICY, trained=lambda tree: tree, temperature=1.0):
  """One sequence at a time, with nothing but padding after it; and the sequences' log-weights."""

  @jax.jit
  @jax.value_and_grad
  def log_probability(params, ids, mask):
    ids = ids[None]
    hidden = policy.hidden(params, ids, jnp.ones_like(ids), jnp.arange(LONGEST)[None])
    logits = jax.nn.log_softmax(policy.logits(params, hidden)[0, :-1] / temperature)
    logp = jnp.take_along_axis(logits, ids[0, 1:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(mask[1:], logp, 0.0))

  norms, weights = [], []
  for group in groups:
    prompt = group.request.tokens
    for c in group.completions:
      after = (0, LONGEST - len(prompt) - len(c.tokens))
      ids = np.pad(np.concatenate([prompt, c.tokens]), after)
      mask = np.pad(np.concatenate([np.zeros(len(prompt), bool), c.mask]), after)
      value, gradient = log_probability(params, ids, mask)
      norms.append(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in jax.tree.leaves(trained(gradient))))
      weights.append(float(value) - float(np.sum(np.where(c.mask, c.logprobs, 0.0))))
  return np.array(norms), np.array(weights)


@pytest.fixture(scope="module")
def groups():
  return make_groups()


@pytest.fixture(scope="module")
def expected(groups):
  return squared_norms(params_of(POLICY), groups)


def packed_norms(policy, params, groups, shape, mesh=None, temperature=1.0):
  """Computes the norms of a batch in the packed way."""
  mesh = mesh or make_mesh()
  policy = dataclasses.replace(policy, mesh=mesh, max_segments=shape.max_segments)
  batch = make_learner(shape, mesh, policy=policy).put(learning.pack(groups, shape))
  compute = functools.partial(packed_squared_norms, policy, shape=shape, temperature=temperature, chunk=CHUNK)
  return jax.jit(compute)(params, batch)


def single_norms(policy, params, groups, shape, mesh=None):
  """Computes the norms of a batch with one gradient for each sequence."""
  mesh = mesh or make_mesh()
  score = functools.partial(models.score, dataclasses.replace(policy, mesh=mesh))
  batch = jax.tree.map(jnp.asarray, learning.pack(groups, shape))
  copies = mesh.shape["data"] * mesh.shape["fsdp"]
  return jax.jit(lambda params: squared_gradient_norms(score, params, batch, LONGEST, copies))(params)


@pytest.mark.parametrize(
  ("norms", "rows", "row_tokens", "row_sequences", "axes"),
  [
    pytest.param(single_norms, 1, 20, None, {}, marks=pytest.mark.slow),
    (single_norms, 4, 96, None, {}),
    (single_norms, 8, 33, None, dict(data=2, fsdp=2, tensor=2)),
    pytest.param(single_norms, 8, 20, None, dict(data=8), marks=pytest.mark.slow),
    pytest.param(packed_norms, 1, 20, None, {}, marks=pytest.mark.slow),
    (packed_norms, 4, 97, None, {}),  # blocks do not divide the row
    (packed_norms, 4, 96, 3, {}),
    (packed_norms, 8, 33, 2, dict(data=2, fsdp=2, tensor=2)),
    pytest.param(packed_norms, 8, 20, 1, dict(data=8), marks=pytest.mark.slow),
  ],
)
def test_norms_are_those_of_unpacked_sequences(groups, expected, norms, rows, row_tokens, row_sequences, axes):
  shape = shape_of(rows, row_tokens, row_sequences=row_sequences, prompt_tokens=7)
  found = norms(POLICY, params_of(POLICY), groups, shape, make_mesh(**axes))
  np.testing.assert_allclose(found, expected[0], rtol=1e-4)


@pytest.mark.parametrize(
  ("changes", "axes"),
  [
    (dict(qkv_bias=True, qk_norm=False), {}),
    (dict(tie_embeddings=True, vocab_limit=30), dict(data=2, fsdp=2, tensor=2)),
    (GEMMA, {}),
  ],
  ids=["biases", "a tied table on a mesh", "a scaled tied table, all norms, windows and soft-caps"],
)
def test_packed_norms_are_of_all_parameters(changes, axes):
  policy = dataclasses.replace(POLICY, config=dataclasses.replace(CONFIG, **changes))
  groups = make_groups(vocab=30)
  found = packed_norms(policy, params_of(policy), groups, shape_of(8, 48), make_mesh(**axes), temperature=0.5)
  expected, _ = squared_norms(params_of(policy), groups, policy, temperature=0.5)
  np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_in_half_precision_they_are_those_of_single_gradients(dtype):
  """The square root of 34, by which embeddings are scaled, is .2 % more in bfloat16."""
  policy = dataclasses.replace(POLICY, config=dataclasses.replace(CONFIG, d_model=34, **GEMMA), dtype=dtype)
  groups, shape = make_groups(), shape_of(row_tokens=48, prompt_tokens=7)
  found, expected = (norms(policy, params_of(policy), groups, shape) for norms in (packed_norms, single_norms))
  np.testing.assert_allclose(found, expected, rtol=2e-3)
  assert np.mean(found / expected) == pytest.approx(1.0, abs=2e-4)


def test_sequences_without_a_completion_take_nothing_from_others():
  """Rows may hold more of them than of sequences with a completion."""
  policy = dataclasses.replace(POLICY, config=dataclasses.replace(CONFIG, tie_embeddings=True))
  (group,) = make_groups(groups=1, samples=3, prompt=(1, 2), completion=(1, 2))
  full, other, empty = (c._replace(mask=np.ones(1, bool)) for c in group.completions)
  empty = empty._replace(**{name: getattr(empty, name)[:0] for name in ("tokens", "logprobs", "versions", "mask")})
  groups = [group._replace(completions=(full, other, empty))]
  shape = learning.BatchShape(sequences=3, row_tokens=5, rows=1, completion_tokens=1)
  found = packed_norms(policy, params_of(policy), groups, shape)
  np.testing.assert_allclose(found, squared_norms(params_of(policy), groups, policy)[0], rtol=1e-4)


@pytest.mark.parametrize(
  ("norms", "targets"),
  [(single_norms, models.LoRA().targets), (packed_norms, models.LoRA().targets), (packed_norms, ("v", "up"))],
)
def test_with_adapters_they_are_of_the_adapters(groups, norms, targets):
  policy = dataclasses.replace(POLICY, lora=models.LoRA(rank=2, targets=targets))
  params = policy.init(jax.random.key(0))
  params["adapters"] = jax.tree.map(lambda x: x + 0.1, params["adapters"])  # b is zero at the start, and so its effect
  expected, _ = squared_norms(params, groups, policy, lambda gradient: gradient["adapters"])
  np.testing.assert_allclose(norms(policy, params, groups, shape_of()), expected, rtol=1e-4)


@pytest.mark.parametrize("remat", ["full", pytest.param("projections", marks=pytest.mark.slow)])
def test_packed_norms_with_less_kept(groups, expected, remat):
  policy = dataclasses.replace(POLICY, remat=remat)
  found = packed_norms(policy, params_of(policy), groups, shape_of(prompt_tokens=7))
  np.testing.assert_allclose(found, expected[0], rtol=1e-4)


def test_a_sample_without_a_reward_has_no_norm(groups):
  failed = [groups[0]._replace(failed=frozenset({1})), *groups[1:]]
  found = packed_norms(POLICY, params_of(POLICY), failed, shape_of())
  assert found[1] == 0.0
  assert np.all(np.delete(found, 1) > 0.0)


def test_auto_packs_short_sequences_of_wide_models():
  shape = learning.BatchShape(sequences=4, row_tokens=2048, rows=1, completion_tokens=256, prompt_tokens=256)
  lengths = {}
  for name, policy in {"plain": POLICY, "wide": WIDE, "adapted": dataclasses.replace(WIDE, lora=models.LoRA())}.items():
    ways = {n: resolve_exact_norms("auto", policy, dataclasses.replace(shape, prompt_tokens=n), 4096) for n in PROMPTS}
    lengths[name] = [n for n, way in ways.items() if way == "packed"]
  assert lengths == {"plain": [], "wide": [8, 256], "adapted": [8, 256]}
  assert resolve_exact_norms("auto", WIDE, shape, chunk=255) == "single"  # logits of 256 tokens at once
  assert resolve_exact_norms("packed", POLICY, shape, 4096) == "packed"


@pytest.mark.parametrize("exact_norms", ["packed", "single"])
def test_the_learner_offers_them_to_opob(groups, expected, exact_norms):
  norms, log_weights = expected
  rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
  weight = (np.exp(2 * log_weights) * norms).reshape(4, 4)
  baseline = (weight * rewards.reshape(4, 4)).sum(1) / weight.sum(1)
  objective = learning.objective("sequence_tis", advantages="opob")
  learner = make_learner(
    shape_of(prompt_tokens=7), optimizer=optax.sgd(0.1), objective=objective, exact_norms=exact_norms
  )
  assert learner.shape.sequence_tokens == LONGEST
  batch = learner.put(learning.pack(groups, learner.shape))
  _, metrics = learner.step(start(learner), batch)
  advantages = rewards - np.repeat(baseline, 4)
  assert float(metrics["advantage/abs_mean"]) == pytest.approx(np.abs(advantages).mean(), rel=1e-3)
