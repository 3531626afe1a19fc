"""OPOB with exact norms, from one backward pass per trajectory, against brute force; and the estimates of the norms."""

import functools

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from async_rl import losses

B, T, D, H, V = 8, 4, 8, 8, 5
GROUPS = np.array([2, 0, 1, 0, 2, 1, 2, 0])


def log_weight(params, trajectory):
  """log π(τ) − log μ(τ) of a two-layer softmax policy."""
  inputs, tokens, mask, behavior = trajectory
  logp = jax.nn.log_softmax(jnp.tanh(inputs @ params["a"]) @ params["b"])
  return jnp.sum(jnp.where(mask, jnp.take_along_axis(logp, tokens[:, None], axis=1)[:, 0], 0.0)) - behavior


def make_problem(seed=0):
  rng = np.random.default_rng(seed)
  params = {
    "a": jnp.asarray(rng.normal(size=(D, H)), jnp.float32),
    "b": jnp.asarray(rng.normal(size=(H, V)), jnp.float32),
  }
  mask = rng.random((B, T)) < 0.7
  mask[:, 0] = True
  trajectories = (
    jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32),
    jnp.asarray(rng.integers(0, V, (B, T))),
    jnp.asarray(mask),
    jnp.zeros(B),
  )
  data = dict(rewards=rng.normal(size=B).astype(np.float32), scale=rng.uniform(0.2, 2, B).astype(np.float32))
  return params, with_log_weights(params, trajectories, rng.normal(0, 1, B)), data


def with_log_weights(params, trajectories, log_weights):
  """The trajectories, with behavior log-probabilities that give them these log-weights."""
  *rest, behavior = trajectories
  logp = jax.vmap(log_weight, (None, 0))(params, (*rest, jnp.zeros_like(behavior)))
  return *rest, logp - jnp.asarray(log_weights, jnp.float32)


def brute_force(params, trajectories, data, groups, cap=8.0, code_cap=None, normalize_std=False):
  """Gradient and squared norms from all per-trajectory gradients at once, combined in float64."""
  log_weights, scores = jax.vmap(jax.value_and_grad(log_weight), (None, 0))(params, trajectories)
  scores = np.concatenate([np.asarray(x, np.float64).reshape(B, -1) for x in jax.tree.leaves(scores)], axis=1)
  squares, w = (scores**2).sum(1), np.exp(np.asarray(log_weights, np.float64))
  weights = w**2 * squares * (1 if code_cap is None else np.minimum(w, code_cap) ** 2)
  advantages = reference.group_advantages(data["rewards"], groups, weights, normalize_std)
  return -(np.minimum(w, cap) * data["scale"] * advantages) @ scores, squares, advantages


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def opob(params, trajectories, data, groups, num_groups=3, **options):
  score = functools.partial(jax.value_and_grad(log_weight), params)
  return losses.opob_gradient(score, trajectories, groups=groups, num_groups=num_groups, **data, **options)


@pytest.mark.parametrize("options", [{}, dict(cap=0.7), dict(code_cap=0.8), dict(normalize_std=True)])
def test_against_brute_force(options):
  params, trajectories, data = make_problem()
  got = jax.jit(functools.partial(opob, **options))(params, trajectories, data, GROUPS)
  gradient, squares, advantages = brute_force(params, trajectories, data, GROUPS, **options)
  np.testing.assert_allclose(got.squared_norms, squares, rtol=1e-5)
  np.testing.assert_allclose(got.advantages, advantages, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(flat(got.gradient), gradient, rtol=1e-4, atol=1e-4)
  if options:
    assert not np.allclose(flat(got.gradient), brute_force(params, trajectories, data, GROUPS)[0], atol=1e-2)


def test_equals_the_policy_loss_under_the_same_baseline():
  """The gradient is that of `sequence_tis` with advantages from the exact norms, times the number of sequences."""
  params, trajectories, data = make_problem()
  inputs, tokens, mask, behavior = trajectories
  lengths = mask.sum(1)
  got = opob(params, trajectories, {**data, "scale": 1 / lengths}, GROUPS)

  def loss(params):
    logits = jnp.tanh(inputs @ params["a"]) @ params["b"]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    mu = jnp.broadcast_to((behavior / lengths)[:, None], logp.shape)
    log_weights = losses.sequence_log_weights(losses.log_ratios(logp, mu, mask))
    advantages = losses.opob_advantages(
      data["rewards"], GROUPS, 3, log_weights=log_weights, squared_norms=got.squared_norms
    )
    return losses.aggregate(losses.sequence_tis(logp, mu, advantages, mask).loss, mask, "sequence_mean")[0]

  np.testing.assert_allclose(flat(got.gradient), flat(jax.grad(loss)(params)), rtol=1e-4, atol=1e-5)


def test_extremes():
  params, trajectories, data = make_problem()
  inputs, tokens, mask, behavior = trajectories
  # One trajectory outweighs its group by e^10000 (its reward is the baseline); another has nothing trained.
  trajectories = with_log_weights(
    params, (inputs, tokens, mask.at[7].set(False), behavior), [1e4, 0, 0, 1, -1e4, 1e4, 0, 2]
  )
  got = opob(params, trajectories, data, GROUPS)
  assert got.squared_norms[7] == 0
  assert np.isfinite(flat(got.gradient)).all()
  np.testing.assert_allclose(got.advantages[0], 0, atol=1e-6)
  np.testing.assert_allclose(got.advantages[6], data["rewards"][6] - data["rewards"][0], rtol=1e-5)
  # What was accumulated and the reported advantages belong together.
  scores = jax.vmap(jax.grad(log_weight), (None, 0))(params, trajectories)
  factors = losses.clamped_exp(jnp.minimum(got.log_weights, jnp.log(8.0))) * data["scale"] * got.advantages
  expected = jax.tree.map(lambda s: -jnp.tensordot(factors, s, 1), scores)
  np.testing.assert_allclose(flat(got.gradient), flat(expected), rtol=1e-4, atol=1e-4)
  # Nothing trained at all, equal rewards, groups of one: a zero gradient.
  nothing = opob(params, (inputs, tokens, jnp.zeros_like(mask), behavior), data, GROUPS)
  assert not flat(nothing.gradient).any()
  equal = opob(params, trajectories, {**data, "rewards": np.full(B, 0.1, np.float32)}, GROUPS)
  assert not flat(equal.gradient).any()
  alone = opob(params, trajectories, data, np.arange(B), num_groups=B)
  assert not flat(alone.gradient).any()


def test_order_and_padding_rows_do_not_matter():
  params, trajectories, data = make_problem()
  run = jax.jit(opob)
  whole = run(params, trajectories, data, GROUPS)
  order = np.random.default_rng(1).permutation(B)
  moved = run(params, *jax.tree.map(lambda x: x[order], (trajectories, data, GROUPS)))
  np.testing.assert_allclose(flat(moved.gradient), flat(whole.gradient), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(moved.squared_norms, whole.squared_norms[order], rtol=1e-5)
  padded = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), (trajectories, data))
  padded[0][2][B] = False
  got = opob(params, *padded, np.append(GROUPS, losses.NO_GROUP))
  np.testing.assert_allclose(flat(got.gradient), flat(whole.gradient), rtol=1e-4, atol=1e-5)


def test_sharded_parameters_under_jit():
  params, trajectories, data = make_problem()
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  sharded = jax.device_put(params, NamedSharding(mesh, P("fsdp")))
  got = jax.jit(opob)(sharded, trajectories, data, GROUPS)
  gradient, squares, _ = brute_force(params, trajectories, data, GROUPS)
  np.testing.assert_allclose(flat(got.gradient), gradient, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(got.squared_norms, squares, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_trajectory_per_data_shard(check_vma):
  """Data over 4 shards with whole groups on each, columns of a linear policy over 2; norms summed over the latter."""
  rng = np.random.default_rng(0)
  weights = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
  rows, groups = 16, np.tile([0, 1, 0, 0], 4)  # of each shard
  inputs, tokens = jnp.asarray(rng.normal(size=(rows, T, D)), jnp.float32), jnp.asarray(rng.integers(0, V, (rows, T)))
  data = dict(zip(("rewards", "scale"), rng.normal(size=(2, rows)).astype(np.float32)))
  log_weights = rng.normal(size=rows).astype(np.float32)
  mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def score(weights, trajectory):
    """A given log-weight, and hand-written ∇_W log π of this shard's rows of W."""
    x, a, log_weight = trajectory
    p = jax.nn.softmax(jax.lax.psum(x @ weights, "fsdp"))
    return log_weight, x.T @ (jax.nn.one_hot(a, V) - p)

  def local(weights, trajectories, data, groups):
    out = losses.opob_gradient(
      functools.partial(score, jax.lax.pcast(weights, "data", to="varying")),
      trajectories,
      groups=groups,
      num_groups=2,
      squared_norm=lambda g: jax.lax.psum(losses.tree_squared_norm(g), "fsdp"),
      **data,
    )
    return jax.lax.psum(out.gradient, "data"), out.squared_norms

  x = P("data", None, "fsdp")
  run = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(P("fsdp"), (x, P("data"), P("data")), P("data"), P("data")),
    out_specs=(P("fsdp"), P("data")),
    check_vma=check_vma,
  )
  gradient, squares = jax.jit(run)(weights, (inputs, tokens, log_weights), data, groups)
  scores = jnp.einsum("btd,btv->bdv", inputs, jax.nn.one_hot(tokens, V) - jax.nn.softmax(inputs @ weights))
  np.testing.assert_allclose(squares, jnp.sum(scores**2, (1, 2)), rtol=1e-5)
  advantages = reference.group_advantages(
    data["rewards"], groups + 2 * np.repeat(np.arange(4), 4), np.exp(2 * log_weights.astype(float)) * squares
  )
  expected = -np.einsum("b,bdv->dv", np.minimum(np.exp(log_weights), 8) * data["scale"] * advantages, scores)
  np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_norm_estimates():
  rng = np.random.default_rng(0)
  logits, hidden = rng.normal(size=(3, T, V)), rng.normal(size=(3, T, D))
  tokens, mask = rng.integers(0, V, (3, T)), rng.random((3, T)) < 0.7
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  squares = ((np.eye(V)[tokens] - p) ** 2).sum(-1)
  arguments = np.log(np.take_along_axis(p, tokens[..., None], -1)[..., 0]), (p**2).sum(-1), mask
  np.testing.assert_allclose(losses.squared_norms_by_logits(*arguments), (squares * mask).sum(1), rtol=1e-5)
  with_hidden = losses.squared_norms_by_logits(*arguments, hidden_squared_norms=(hidden**2).sum(-1))
  np.testing.assert_allclose(with_hidden, (squares * (hidden**2).sum(-1) * mask).sum(1), rtol=1e-5)
  np.testing.assert_array_equal(losses.squared_norms_by_length(mask), mask.sum(1))
  # For one token and a linear output layer it is the exact norm of that layer's gradient.
  h, w = jnp.asarray(hidden[0, 0], jnp.float32), jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
  grad = jax.grad(lambda w: jax.nn.log_softmax(h @ w)[2])(w)
  probs = jax.nn.softmax(h @ w)
  one = jnp.ones((1, 1))
  estimate = losses.squared_norms_by_logits(
    jnp.log(probs[2]) * one, jnp.sum(probs**2) * one, one > 0, hidden_squared_norms=jnp.sum(h**2) * one
  )
  np.testing.assert_allclose(estimate[0], jnp.sum(grad**2), rtol=1e-5)
  certain = losses.squared_norms_by_logits(0.0 * one, (1 - 1e-7) * one, one > 0)
  assert 0 <= float(certain[0]) < 1e-6
  assert float(losses.squared_norms_by_logits(-1e4 * one, one, one > 0)[0]) == pytest.approx(2.0)
