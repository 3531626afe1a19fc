"""PPO with a value head: values, advantages and gradient against loops and whole, unpacked sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import CONFIG
from learning_helpers import LORA
from learning_helpers import assert_same
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import make_mesh
from learning_helpers import params_of
from learning_helpers import shape_of
from learning_helpers import start

from async_rl import learning
from async_rl import models
from async_rl import stabilizers

#: One layer: programs are most of the time.
POLICY = models.Policy(dataclasses.replace(CONFIG, num_layers=1), dtype="float32", attention="xla")
GAE = learning.GAE(discount=0.9, trace_decay=0.7, value_coefficient=0.3)
PPO = learning.objective("ppo_clip", advantages="gae", aggregate="token_mean", gae=GAE)
#: The same with a KL penalty of every token, advantages as they are, and a faster head.
PENALIZED = learning.rlhf_objective(
  "ppo", kl_coefficient=0.3, gae=dataclasses.replace(GAE, whiten=False, value_rate=2.0)
)
PACKED = shape_of(rows=2, row_tokens=40)
ON_A_MESH = shape_of(rows=4, row_tokens=40)


def make(objective=PPO, shape=PACKED, mesh=None, policy=POLICY, optimizer=None):
  return make_learner(shape, mesh, optimizer or optax.sgd(1.0), policy, objective)


@functools.cache
def plain():
  """The learner that several tests share."""
  return make()


def with_head(state):
  """The state with values that are far from 0."""
  kernel = np.random.default_rng(1).normal(size=POLICY.config.d_model).astype(np.float32) / 8
  like = jax.tree.map(lambda x: x.sharding, state.critic)
  return state._replace(critic=jax.device_put({"value_head": {"kernel": kernel, "bias": np.float32(0.3)}}, like))


def one_step(learner, state=None, groups=None):
  """The state before and after a step, and the metrics."""
  state = with_head(start(learner)) if state is None else state
  before = jax.device_get(state)
  state, metrics = learner.step(state, learner.put(learning.pack(groups or make_groups(), learner.shape)))
  return before, state, {name: float(x) for name, x in metrics.items()}


@jax.jit
def whole_sequences(state):
  """Log-probabilities and values of each completion's tokens, one sequence to a row, [16, 12] each."""
  groups = make_groups()
  sequences = [np.concatenate([g.request.tokens, c.tokens]) for g in groups for c in g.completions]
  first = [len(g.request.tokens) for g in groups for _ in g.completions]
  ids = jnp.asarray(np.stack([np.pad(s, (0, 24 - len(s))) for s in sequences]))  # causal: the padding is not seen
  positions = jnp.broadcast_to(jnp.arange(24), ids.shape)
  hidden = POLICY.hidden(state.params, ids, jnp.ones_like(ids), positions)
  logp = jax.nn.log_softmax(POLICY.logits(state.params, hidden))
  index = jnp.asarray(np.clip(np.asarray(first)[:, None] + np.arange(12), 0, 23))
  before = jnp.take_along_axis(hidden, index[..., None] - 1, axis=1)
  tokens = jnp.take_along_axis(ids, index, axis=1)
  logprobs = jnp.take_along_axis(jnp.take_along_axis(logp, index[..., None] - 1, axis=1), tokens[..., None], axis=2)
  head = state.critic["value_head"]
  return logprobs[..., 0], before @ head["kernel"] + head["bias"]


def loop(rewards, values, mask, whiten):
  """Advantages and returns in float64, from the last token to the first."""
  rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
  advantages = np.zeros(mask.shape)
  for b in range(len(mask)):
    next_advantage = next_value = 0.0
    for t in reversed(np.flatnonzero(mask[b])):
      delta = rewards[b, t] + GAE.discount * next_value - values[b, t]
      advantages[b, t] = next_advantage = delta + GAE.discount * GAE.trace_decay * next_advantage
      next_value = values[b, t]
  returns = np.where(mask, advantages + values, 0.0)
  if whiten:
    advantages = np.where(mask, (advantages - advantages[mask].mean()) / advantages[mask].std(), 0.0)
  return advantages, returns


def token_rewards(batch, penalty):
  """The reward at the last trained token of a sequence, less a penalty of each token."""
  rewards = -np.where(batch.mask, penalty, 0.0)
  for b, trained in enumerate(batch.mask):
    if trained.any():
      rewards[b, np.flatnonzero(trained)[-1]] += batch.rewards[b]
  return rewards


def expected_step(state, batch, penalty=0.0, whiten=True):
  """Loss and gradient of policy and head, with advantages and returns from the loop."""
  advantages, returns = loop(token_rewards(batch, penalty), whole_sequences(state)[1], batch.mask, whiten)

  def loss(params, critic):
    logprobs, values = whole_sequences(state._replace(params=params, critic=critic))
    ratio = jnp.exp(jnp.where(batch.mask, logprobs - batch.logprobs, 0.0))
    policy = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 0.8, 1.2))
    per_token = policy + GAE.value_coefficient * (values - returns) ** 2 / 2
    return jnp.sum(jnp.where(batch.mask, per_token, 0.0)) / batch.mask.sum()

  value, gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(state.params, state.critic)
  return value, jax.device_get(gradient), returns


@pytest.mark.parametrize("penalized", [False, True], ids=["ppo_clip", "with a KL penalty, on a mesh"])
def test_gradient_is_that_of_the_written_out_loss(penalized):
  learner = make(PENALIZED, ON_A_MESH, make_mesh(data=2, fsdp=2, tensor=2)) if penalized else plain()
  batch, penalty = learning.pack(make_groups(), learner.shape), 0.0
  if penalized:
    learner.set_reference(params_of(POLICY, 1))
    reference = learner.score_reference(params_of(POLICY), batch)
    penalty = 0.3 * (batch.logprobs - np.asarray(reference))
  assert int(batch.used) > 1
  before, state, metrics = one_step(learner)
  loss, expected, returns = expected_step(before, batch, penalty, whiten=not penalized)
  found = jax.tree.map(np.subtract, (before.params, before.critic), jax.device_get((state.params, state.critic)))
  expected = expected[0], optax.tree.scale(learner.objective.gae.value_rate, expected[1])
  for got, want in zip(found, expected, strict=True):  # apart, since that of the head is larger
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(want))
    assert scale > 1e-3
    got, want = (jax.tree.map(functools.partial(np.multiply, 1 / scale), tree) for tree in (got, want))
    assert_same(got, want)
  assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
  values, mask = np.asarray(whole_sequences(before)[1]), batch.mask
  assert metrics["value/mean"] == pytest.approx(values[mask].mean(), rel=1e-5)
  assert metrics["value/loss"] == pytest.approx(np.square(values - returns)[mask].mean() / 2, rel=1e-5)
  explained = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
  assert metrics["value/explained"] == pytest.approx(explained, rel=1e-4)


def test_sequences_of_one_row_do_not_see_each_other():
  """Two sequences beside each other in a row have the advantages of the loop over each alone."""
  group = make_groups(samples=2, groups=1, completion=(4, 8))
  shape = learning.BatchShape(sequences=2, row_tokens=40, rows=1, completion_tokens=12)
  learner = make(dataclasses.replace(PPO, advantages=dataclasses.replace(GAE, whiten=False)), shape)
  batch = learning.pack(group, shape)
  assert set(np.unique(batch.segments)) == {0, 1, 2}
  state = with_head(start(learner))
  quantities = jax.jit(lambda state, batch: learner._quantities(state, batch, None))(state, batch)
  advantages, returns = loop(token_rewards(batch, 0.0), quantities.values, batch.mask, whiten=False)
  assert np.abs(advantages[0] - advantages[1]).max() > 0.1
  np.testing.assert_allclose(learner.objective.make_advantages(quantities), advantages, atol=1e-6)
  np.testing.assert_allclose(learner.objective.make_targets(quantities)[1], returns, atol=1e-6)


def test_with_adapters_these_and_the_head_are_trained_and_the_head_is_not_sent():
  optimizer = stabilizers.lead_by_momentum(optax.adam(1e-2), lag=2)
  base = params_of(POLICY)
  learner = make(policy=dataclasses.replace(POLICY, lora=LORA), optimizer=optimizer)
  state = learner.init(jax.random.key(0), base)
  before, state, _ = one_step(learner, state)
  jax.tree.map(np.testing.assert_array_equal, {part: state.params[part] for part in base}, base)
  for old, new in (
    (before.critic["value_head"]["kernel"], state.critic["value_head"]["kernel"]),
    (before.params["adapters"]["q"]["b"], state.params["adapters"]["q"]["b"]),
  ):
    assert np.abs(old - new).max() > 1e-3
  sent = learner.sampler_params(state)
  assert jax.tree.structure(sent) == jax.tree.structure(state.params)
  assert np.abs(sent["adapters"]["q"]["b"] - state.params["adapters"]["q"]["b"]).max() > 1e-3
  learner.set_reference(state.params)
  assert list(learner._reference) == ["adapters"]


def test_a_new_head_values_everything_at_zero():
  _, state, metrics = one_step(plain(), start(plain()))
  batch = learning.pack(make_groups(), PACKED)
  _, returns = loop(token_rewards(batch, 0.0), np.zeros(batch.mask.shape), batch.mask, whiten=False)
  assert metrics["value/mean"] == 0.0
  assert metrics["value/loss"] == pytest.approx(np.square(returns[batch.mask]).mean() / 2, rel=1e-5)
  assert np.abs(state.critic["value_head"]["kernel"]).max() > 1e-3


def test_a_batch_without_a_trained_token_changes_nothing():
  groups = [g._replace(failed=(0, 1, 2, 3)) for g in make_groups()]
  before, state, metrics = one_step(plain(), groups=groups)
  jax.tree.map(np.testing.assert_array_equal, (before.params, before.critic), (state.params, state.critic))
  assert metrics["loss"] == metrics["value/explained"] == 0.0


def test_values_need_a_head_and_bad_options_are_refused():
  zeros = jnp.zeros((2, 1))
  stats = models.TokenStats(zeros, zeros, zeros)
  batch = learning.BatchQuantities(jnp.ones(2), jnp.zeros(2, int), zeros == 0, zeros, zeros.astype(int), stats)
  with pytest.raises(ValueError, match="scored without a value head"):
    PPO.make_advantages(batch)
  for bad in (dict(discount=1.1), dict(trace_decay=-0.1), dict(value_coefficient=0.0), dict(value_rate=-1.0)):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
      learning.GAE(**bad)
