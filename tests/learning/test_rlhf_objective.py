"""The methods of Asynchronous RLHF against their losses written out over whole, unpacked sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learning_helpers
import numpy as np
import optax
import pytest
from learning_helpers import BIGRAM
from learning_helpers import assert_same
from learning_helpers import make_groups
from learning_helpers import make_mesh
from learning_helpers import shape_of

from async_rl import learning
from async_rl import losses
from async_rl import models

GROUPS, SAMPLES = 4, 4


@functools.cache
def params_of(seed):
  return jax.jit(BIGRAM.init)(jax.random.key(seed))


def groups():
  """Random groups; in the last one there is nothing to prefer."""
  made = make_groups()
  return [*made[:-1], made[-1]._replace(rewards=np.ones(SAMPLES, np.float32))]


def make_learner(objective, shape=None, mesh=None, reference=1, optimizer=None, policy=BIGRAM):
  learner = learning_helpers.make_learner(
    shape or shape_of(rows=2, row_tokens=40), mesh, optimizer or optax.sgd(1.0), policy, objective, temperature=0.7
  )
  if reference is not None:
    learner.set_reference(params_of(reference))
  return learner


def one_step(learner, state=None):
  state = state or learner.init(jax.random.key(0), params_of(0))
  state, metrics = learner.step(state, learner.put(learning.pack(groups(), learner.shape)))
  return state, {name: float(value) for name, value in metrics.items()}


def gradient_of(learner):
  state, metrics = one_step(learner)
  return jax.tree.map(lambda a, b: a - b, params_of(0), jax.device_get(state.params)), metrics


def log_probs(params, policy=BIGRAM):
  """Log-probabilities of each completion, one sequence to a row, [16, 12], 0 where not trained."""
  sequences = [np.concatenate([g.request.tokens, c.tokens]) for g in groups() for c in g.completions]
  ids = jnp.asarray(np.stack([np.pad(s, (0, 24 - len(s))) for s in sequences]))  # causal: the padding is not seen
  ones, positions = jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(24), ids.shape)
  logits = policy.logits(params, policy.hidden(params, ids, ones, positions)) / 0.7
  logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=2)[..., 0]
  first = np.array([len(g.request.tokens) - 1 for g in groups() for _ in g.completions])
  picked = jnp.take_along_axis(logp, jnp.asarray(first[:, None] + np.arange(12)[None]), axis=1, mode="clip")
  return jnp.where(batch().mask, picked, 0.0)


@functools.cache
def reference():
  return jax.device_get(jax.jit(log_probs)(params_of(1)))


def batch():
  return learning.pack(groups(), shape_of(rows=2, row_tokens=40))


def direct_pairs(loss, logp):
  """Mean over the pairs of the loss as published."""
  sequences, fixed = logp.sum(1), reference().sum(1)
  rewards = np.array([g.rewards for g in groups()])
  terms = []
  for g in range(GROUPS - 1):
    best, worst = (SAMPLES * g + int(pick(rewards[g])) for pick in (np.argmax, np.argmin))
    terms.append(loss(*(x[i][None] for x in (sequences, fixed) for i in (best, worst)))[0])
  return sum(terms) / len(terms)


def direct_best(logp):
  sequences = logp.sum(1)
  return -sum(sequences[SAMPLES * g + int(np.argmax(group.rewards))] for g, group in enumerate(groups())) / GROUPS


def direct_rloo(logp, proximal, kl):
  b = batch()
  old = b.logprobs if kl == "reward" else jax.lax.stop_gradient(logp)
  rewards = b.rewards - (0.0 if kl == "loss" else 0.3 * jnp.sum(jnp.where(b.mask, old - reference(), 0.0), axis=1))
  rewards = rewards.reshape(GROUPS, SAMPLES)
  advantages = (rewards - (rewards.sum(1, keepdims=True) - rewards) / (SAMPLES - 1)).reshape(-1)
  if proximal:
    ratio = jnp.exp(jnp.sum(jnp.where(b.mask, logp - b.logprobs, 0.0), axis=1))
    loss = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 0.8, 1.2)).mean()
  else:
    loss = -jnp.mean(advantages * logp.sum(1))
  if kl == "loss":
    weights = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logp) - b.logprobs), 2.0)
    d = logp - reference()
    k3 = jnp.exp(-d) - 1 + d
    term = weights * (k3 + jax.lax.stop_gradient(k3) * logp)  # k3 and its score-function part
    loss += 0.3 * jnp.where(b.mask, term, 0.0).sum(1).mean()
  return loss


CASES = {
  "online_dpo": (
    dict(method="online_dpo", beta=0.3),
    functools.partial(direct_pairs, functools.partial(losses.dpo_loss, beta=0.3)),
  ),
  "ipo": (dict(method="ipo", beta=0.3), functools.partial(direct_pairs, functools.partial(losses.ipo_loss, beta=0.3))),
  "best_of_n": (dict(method="best_of_n"), direct_best),
} | {
  f"{method} {kl}": (
    dict(method=method, kl_coefficient=0.3, kl=kl),
    functools.partial(direct_rloo, proximal=method == "proximal_rloo", kl=kl),
  )
  for method in ("rloo", "proximal_rloo")
  for kl in ("reward", "reward_current", "loss")
}


@functools.cache
def expected_gradients():
  """Of all cases, by the chain rule through the log-probabilities that they share."""
  logp, pull_back = jax.vjp(jax.jit(log_probs), params_of(0))
  return {name: jax.device_get(pull_back(jax.grad(loss)(logp))[0]) for name, (_, loss) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_loss_over_whole_sequences(name):
  learner = make_learner(learning.rlhf_objective(**CASES[name][0]))
  assert int(batch().used) > 2
  assert any(len(set(batch().micro[SAMPLES * g : SAMPLES * (g + 1)])) > 1 for g in range(GROUPS))  # torn apart
  found, _ = gradient_of(learner)
  expected = expected_gradients()[name]
  scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
  assert scale > 1e-3
  assert_same(jax.tree.map(lambda x: x / scale, found), jax.tree.map(lambda x: x / scale, expected))


def test_the_distance_to_the_reference_is_that_of_whole_sequences():
  _, metrics = one_step(make_learner(learning.rlhf_objective("online_dpo")))
  b = batch()
  expected = np.where(b.mask, b.logprobs - reference(), 0.0).sum(1)[b.mask.any(1)].mean()
  assert metrics["kl/reference"] == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(
    make_learner(learning.rlhf_objective("ipo")).score_reference(params_of(0), b) * b.mask, reference(), atol=1e-5
  )


def test_the_reference_stays_while_the_policy_moves_on_a_mesh_as_on_one_device():
  objective, mesh = learning.rlhf_objective("online_dpo"), make_mesh(data=2, fsdp=2, tensor=2)
  results = []
  for learner in (make_learner(objective), make_learner(objective, shape_of(rows=4), mesh)):
    before = jax.device_get(
      learner.score_reference(params_of(0), batch() if not results else learning.pack(groups(), learner.shape))
    )
    state, first = one_step(learner)
    state, second = one_step(learner, state)
    after = learner.score_reference(params_of(0), learning.pack(groups(), learner.shape))
    np.testing.assert_array_equal(np.where(batch().mask, before, 0), np.where(batch().mask, after, 0))
    assert first["kl/reference"] == second["kl/reference"]
    assert learner.compilations() == 1
    results.append(jax.device_get(state.params))
  assert_same(*results)


def test_the_reference_is_kept_in_the_compute_dtype():
  learner = make_learner(learning.rlhf_objective("rloo"))
  learner.policy = models.Policy(BIGRAM.config, dtype="bfloat16", mesh=learner.mesh)
  learner.set_reference(params_of(1))
  dtypes = {str(x.dtype) for x in jax.tree.leaves(learner._reference)}
  assert dtypes == {"bfloat16", "float32"}
  assert learner._reference["layers"]["q"]["kernel"].dtype == jnp.bfloat16


def test_with_adapters_the_reference_is_nothing_but_other_adapters():
  """It costs as much memory, and before the first step it is the policy."""
  objective = learning.rlhf_objective("online_dpo")
  plain = models.Policy(BIGRAM.config, dtype="float32", attention="xla")
  policy = dataclasses.replace(plain, lora=models.LoRA(rank=2))
  learner = make_learner(objective, reference=None, policy=policy, optimizer=optax.sgd(100.0))
  state = learner.init(jax.random.key(0), params_of(1))
  learner.set_reference(state.params)
  assert list(learner._reference) == ["adapters"]
  state, _ = one_step(learner, state)
  assert float(jnp.abs(state.params["adapters"]["q"]["b"]).max()) > 1e-3
  expected = jax.jit(functools.partial(log_probs, policy=plain))(params_of(1))
  np.testing.assert_allclose(learner.score_reference(state.params, batch()) * batch().mask, expected, atol=1e-5)


def test_what_is_missing_is_named():
  with pytest.raises(ValueError, match="objective needs a reference policy; .* set_reference"):
    one_step(make_learner(learning.rlhf_objective("ipo"), reference=None))
  with pytest.raises(ValueError, match="set_reference"):
    make_learner(learning.rlhf_objective("ipo"), reference=None).score_reference(params_of(0), batch())
  with pytest.raises(ValueError, match="one of 'online_dpo', 'ipo', .* method='dpo'"):
    learning.rlhf_objective("dpo")
  with pytest.raises(ValueError, match="kl='k3'"):
    learning.rlhf_objective("rloo", kl="k3")
