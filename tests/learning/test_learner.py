"""The learner step against a direct float32 computation, and what it must not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import BIGRAM
from learning_helpers import CONFIG
from learning_helpers import LONGEST
from learning_helpers import POLICY
from learning_helpers import assert_same
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import make_mesh
from learning_helpers import run
from learning_helpers import shape_of
from learning_helpers import stabilized
from learning_helpers import start

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import stabilizers


def padded(groups):
  """One sequence to a row with nothing but padding after it: tokens [16, 19], trained positions and log-probs."""
  rows = []
  for prompt, c in ((group.request.tokens, c) for group in groups for c in group.completions):
    before, after = len(prompt), LONGEST - len(prompt) - len(c.tokens)
    ids = np.pad(np.concatenate([prompt, c.tokens]), (0, after))
    rows.append((ids, *(np.pad(x, (before, after)) for x in (c.mask, np.where(c.mask, c.logprobs, 0.0)))))
  return [np.stack(column) for column in zip(*rows, strict=True)]


def direct_gradient(params, groups, temperature, method):
  """No packing, no chunks: the published loss written out."""
  rewards = np.array([g.rewards for g in groups])
  advantages = ((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)).reshape(-1)
  ids, mask, behavior = padded(groups)

  def loss(params):
    ones, positions = jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(LONGEST), ids.shape)
    logits = POLICY.logits(params, POLICY.hidden(params, ids, ones, positions)) / temperature
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=2)[..., 0]
    logp = jnp.where(mask[:, 1:], logp, 0.0).sum(1)
    weight = jnp.minimum(jnp.exp(logp - behavior.sum(1)), 8.0)
    terms = -jax.lax.stop_gradient(weight) * advantages * logp
    if method == "sequence_mean":
      return jnp.sum(terms / np.maximum(mask.sum(1), 1)) / mask.any(1).sum()
    return jnp.sum(terms) / mask.sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("method", ["sequence_mean", "token_mean"])
def test_gradient_is_that_of_the_written_out_loss(method):
  groups, temperature = make_groups(), 0.7
  learner = make_learner(
    shape_of(rows=2, row_tokens=40),
    optimizer=optax.sgd(1.0),
    objective=learning.objective("sequence_tis", advantages="grpo", aggregate=method),
    temperature=temperature,
  )
  state = start(learner)
  before = jax.device_get(state.params)
  state, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
  expected_loss, expected = direct_gradient(before, groups, temperature, method)
  gradient = jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params))
  scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
  assert_same(jax.tree.map(lambda x: x / scale, gradient), jax.tree.map(lambda x: np.asarray(x) / scale, expected))
  assert float(metrics["loss"]) == pytest.approx(float(expected_loss), rel=1e-5)


@functools.cache
def plain():
  """The learner that several tests share."""
  return make_learner(shape_of())


@functools.cache
def reference():
  return run(plain(), make_groups())


@pytest.mark.parametrize(
  ("rows", "row_tokens", "axes"),
  [
    (1, 20, {}),
    (4, 96, {}),
    (16, 20, dict(data=2, fsdp=2, tensor=2)),
    (8, 32, dict(data=8)),
    (4, 20, dict(fsdp=4, tensor=2)),
  ],
)
def test_nothing_depends_on_packing_micro_batches_or_mesh(rows, row_tokens, axes):
  params, metrics = run(make_learner(shape_of(rows, row_tokens), make_mesh(**axes)), make_groups())
  expected_params, expected_metrics = reference()
  assert_same(params, expected_params)
  for name in expected_metrics.keys() - {"tokens/fill"}:
    assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-5), name


def test_samples_whose_rewards_failed_count_nowhere():
  """The step equals that of a batch without them, whatever stands in for their rewards and log-probabilities."""
  groups = make_groups(samples=4)
  groups[1], groups[3] = groups[1]._replace(failed=(0, 2)), groups[3]._replace(failed=(3,))

  def spoil(group):
    rewards = np.where(np.isin(np.arange(4), group.failed), 1e6, group.rewards).astype(np.float32)
    completions = [c._replace(logprobs=c.logprobs - 50 * (c.sample in group.failed)) for c in group.completions]
    return group._replace(rewards=rewards, completions=tuple(completions))

  def leave_out(group):
    kept = [k for k in range(4) if k not in group.failed]
    return group._replace(completions=tuple(group.completions[k] for k in kept), rewards=group.rewards[kept], failed=())

  options = dict(optimizer=stabilized(optax.sgd(0.1)), policy=BIGRAM)
  params, metrics = run(make_learner(shape_of(), **options), list(map(spoil, groups)))
  smaller = dataclasses.replace(shape_of(), sequences=13)
  expected, expected_metrics = run(make_learner(smaller, **options), list(map(leave_out, groups)))
  assert_same(params, expected)
  for name in expected_metrics.keys() - {"tokens/fill"}:
    assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-5), name


def test_nothing_depends_on_the_order_of_groups():
  params, _ = run(plain(), make_groups()[::-1])
  assert_same(params, reference()[0])


@functools.cache
def run_wide(attention, mesh=None):
  policy = models.Policy(dataclasses.replace(CONFIG, head_dim=32), dtype="float32", attention=attention)
  return run(make_learner(shape_of(row_tokens=40, row_sequences=4), mesh, policy=policy), make_groups())


@pytest.mark.parametrize(
  "axes",
  [
    {},
    pytest.param(dict(data=2, tensor=2), marks=pytest.mark.slow),
    dict(data=2, fsdp=2, tensor=2),
  ],
)
def test_the_programs_of_gpus_compute_the_same(axes):
  """Layers are unrolled (but over "fsdp") and norms kernels, interpreted; attention is the compiler's in float32."""
  params, metrics = run_wide("cudnn", make_mesh(**axes))
  expected, expected_metrics = run_wide("xla")
  assert_same(params, expected)
  for name, value in expected_metrics.items():
    assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_remat_and_head_chunks_change_nothing():
  policy = models.Policy(CONFIG, dtype="float32", attention="xla", remat="full")
  params, _ = run(make_learner(shape_of(), policy=policy, head_chunk=7), make_groups())
  assert_same(params, reference()[0])


def test_parameters_and_moments_are_sharded():
  learner = make_learner(shape_of(), make_mesh(data=2, fsdp=2, tensor=2), stabilized(optax.adamw(1e-3)))
  state = learner.init(jax.random.key(0))
  kernel = lambda tree: tree["layers"]["gate"]["kernel"]
  moments = optax.tree.get(state.opt_state, "mu")
  for tree in (state.params, moments, optax.tree.get(state.opt_state, "alignment_previous")):
    assert kernel(tree).sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert kernel(tree).addressable_shards[0].data.size * 4 == kernel(tree).size
  abstract = learner.abstract()
  assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), abstract) == jax.tree.map(
    lambda x: (x.shape, x.dtype, x.sharding), state
  )


def test_one_compilation_no_implicit_transfer_whatever_the_lengths():
  learner = make_learner(shape_of())
  state = start(learner)
  state, _ = learner.step(state, learner.put(learning.pack(make_groups(0), learner.shape)))
  with jax.transfer_guard("disallow"):
    for seed, completion in ((1, (1, 3)), (2, (10, 12)), (3, (1, 12))):
      batch = learning.pack(make_groups(seed, completion=completion), learner.shape)
      state, _ = learner.step(state, learner.put(batch))
  assert learner.compilations() == 1


def test_a_batch_without_a_trainable_token_changes_nothing():
  groups = [
    g._replace(completions=tuple(c._replace(mask=np.zeros_like(c.mask)) for c in g.completions)) for g in make_groups()
  ]
  learner = make_learner(shape_of(), optimizer=optax.sgd(1.0), policy=BIGRAM)
  state = start(learner)
  before = jax.device_get(state.params)
  state, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
  assert_same(jax.device_get(state.params), before, 0.0)
  assert all(np.isfinite(float(v)) for v in metrics.values()), metrics


@pytest.mark.parametrize(
  "optimizer",
  [optax.adam(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), stabilized(optax.adam(0.1))],
  ids=["adam", "clipped", "stabilized"],
)
def test_a_gradient_that_is_not_finite_is_skipped_and_counted_whatever_the_optimizer(optimizer):
  objective = learning.objective("reinforce", advantages="grpo")
  learner = make_learner(shape_of(), optimizer=optimizer, policy=BIGRAM, objective=objective)
  groups = make_groups()
  state = start(learner)
  before = jax.device_get(state)
  for skipped, reward in enumerate((np.nan, np.inf, 3e38), start=1):
    bad = [groups[0]._replace(rewards=np.array([reward, -reward, 0, 0], np.float32)), *groups[1:]]
    state, metrics = learner.step(state, learner.put(learning.pack(bad, learner.shape)))
    after = jax.device_get(state)
    assert metrics["update/skipped"] == 1
    assert metrics["update/norm"] == 0
    assert after.version == before.version + skipped
    assert_same((after.params, after.opt_state), (before.params, before.opt_state), 0.0)
  state, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
  assert metrics["update/skipped"] == 0
  assert metrics["update/norm"] > 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))


def test_lag_is_counted_from_the_oldest_token():
  learner = plain()
  state = start(learner)._replace(version=jnp.int32(5))
  state = jax.device_put(state, learner.state_shardings)
  batch = learning.pack(make_groups(), learner.shape)
  _, metrics = learner.step(state, learner.put(batch))
  versions = batch.versions[batch.mask]
  assert float(metrics["staleness/max"]) == 5 - versions.min()
  assert float(metrics["staleness/min"]) == 5 - versions.max()
  assert float(metrics["staleness/mean"]) == pytest.approx(5 - versions.mean())


def test_the_proximal_log_probabilities_are_those_that_the_loss_sees():
  def loss(logprobs, behavior, advantages, mask, *, proximal):
    out = losses.reinforce(logprobs, behavior, advantages, mask)
    difference = jnp.where(mask, jnp.abs(proximal - logprobs), 0.0)
    return out._replace(loss=jax.lax.stop_gradient(difference) + 0.0 * logprobs)

  objective = learning.Objective(loss, losses.reinforce_advantages, learning.AGGREGATIONS["token_mean"])
  _, metrics = run(make_learner(shape_of(), optimizer=optax.sgd(0.0), objective=objective), make_groups(), steps=1)
  assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)


def test_rows_that_the_mesh_cannot_divide_are_refused():
  with pytest.raises(ValueError, match="multiple of 4, .* rows=3; the next is rows=4"):
    make_learner(shape_of(rows=3), make_mesh(data=2, fsdp=2))


def test_advantages_can_use_the_current_policy():
  """OPOB by the gradient at the logits, against the direct computation from a separate scoring pass."""
  groups, shape = make_groups(), shape_of()
  batch = learning.pack(groups, shape)

  objective = learning.objective("reinforce", advantages="opob_by_logits")
  learner = make_learner(shape, optimizer=optax.sgd(0.0), policy=BIGRAM, objective=objective)
  state = start(learner)
  params = jax.device_get(state.params)
  _, metrics = learner.step(state, learner.put(batch))
  ids, mask, behavior = map(jnp.asarray, padded(groups))
  stats = models.score(BIGRAM, params, ids, jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(LONGEST), ids.shape))
  log_weights = np.sum(np.where(mask, stats.logprobs - behavior, 0.0), axis=1)
  norms = np.sum(np.where(mask, 1 - 2 * np.exp(stats.logprobs) + stats.sum_squares, 0.0), axis=1)
  weight = np.exp(2 * log_weights.reshape(4, 4)) * norms.reshape(4, 4)
  rewards = batch.rewards.reshape(4, 4)
  expected = rewards - (weight * rewards).sum(1, keepdims=True) / weight.sum(1, keepdims=True)
  assert float(metrics["advantage/abs_mean"]) == pytest.approx(np.abs(expected).mean(), rel=1e-4)


def test_the_step_can_be_scaled_by_the_mean_lag():
  learner = make_learner(shape_of(), optimizer=optax.chain(optax.sgd(0.1), stabilizers.scale_by_lag()), policy=BIGRAM)
  state = start(learner)._replace(version=jnp.int32(7))
  groups = make_groups()
  _, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
  lags = np.concatenate([7 - c.versions[c.mask] for group in groups for c in group.completions])
  assert float(metrics["staleness/mean"]) == pytest.approx(lags.mean(), rel=1e-6)
  assert float(metrics["stabilizers/lag_scale"]) == pytest.approx(1 / lags.mean(), rel=1e-6)
