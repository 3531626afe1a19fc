"""Objectives: every name of the registries trains, and gets what it needs of the whole batch."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import BIGRAM
from learning_helpers import assert_same
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import run
from learning_helpers import shape_of
from learning_helpers import start

from async_rl import learning
from async_rl import losses
from async_rl import models

#: Options under which something is kept of random data, whose log-ratios are far from 0.
WIDE = {
  "geometric_mask": dict(low=0.01, high=100.0),
  "sequence_mask": dict(low=1e-3, high=1e3),
  "m2po": dict(budget=2.0),
  "trm": dict(max_bound=math.inf, mean_bound=10.0),
}
RLHF = [(method, kl) for method in ("rloo", "proximal_rloo", "ppo") for kl in ("reward", "reward_current", "loss")]
RLHF += [(method, "reward") for method in ("online_dpo", "ipo", "best_of_n")]


#: Every objective that the registries make, by a name to be read.
EVERY = {
  **{name: learning.objective(name, **WIDE.get(name, {})) for name in learning.OBJECTIVES},
  **{f"sequence_tis, {name}": learning.objective("sequence_tis", advantages=name) for name in learning.ADVANTAGES},
  **{f"{method}, KL in the {kl}": learning.rlhf_objective(method, kl=kl) for method, kl in RLHF},
}
#: One of each kind that a learner treats alike: those that need the same of the batch.
KINDS = {(objective.needs, objective.gae is None): name for name, objective in reversed(EVERY.items())}


def trained(objective):
  """The change of the parameters by two steps on stale data, and the metrics of the second."""
  shape = shape_of(rows=2, row_tokens=40, prompt_tokens=7)
  learner = make_learner(shape, optimizer=optax.sgd(0.01), policy=BIGRAM, objective=objective)
  state = start(learner)
  before = jax.device_get(state.params)
  if objective.needs_reference:
    learner.set_reference(jax.tree.map(lambda x: 1.1 * x, before))
  batch = learner.put(learning.pack(make_groups(), shape))
  for _ in range(2):
    state, metrics = learner.step(state, batch)
  return jax.tree.map(np.subtract, jax.device_get(state.params), before), metrics


@pytest.mark.parametrize("name", KINDS.values())
def test_every_kind_of_objective_trains(name):
  change, metrics = trained(EVERY[name])
  assert max(np.abs(x).max() for x in jax.tree.leaves(change)) > 1e-6
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(change))
  assert np.isfinite(metrics["loss"])


@functools.cache
def quantities():
  """Those of a batch, [16, 12], of which a policy makes log-probabilities in (-3, 0)."""
  batch, rng = learning.pack(make_groups(), shape_of()), np.random.default_rng(1)
  plane = lambda low, high: jnp.asarray(rng.uniform(low, high, batch.mask.shape), jnp.float32)
  return learning.BatchQuantities(
    rewards=batch.rewards,
    groups=batch.groups,
    mask=batch.mask,
    behavior=batch.logprobs,
    lag=jnp.where(batch.mask, 5 - batch.versions, 0),
    stats=models.TokenStats(plane(-3, 0), plane(0, 3), plane(0, 1), plane(-1, 1)),
    reference=plane(-3, 0),
    squared_norms=jnp.asarray(rng.uniform(1, 9, len(batch.rewards)), jnp.float32),
  )


@pytest.mark.parametrize("name", EVERY)
def test_every_objective_pulls_at_what_it_is_to_change(name):
  """As a learner calls it, on stale data and in one micro-batch."""
  objective, given = EVERY[name], quantities()
  advantages, returns = objective.make_targets(given)
  unscored = given._replace(stats=given.stats if objective.needs_scores else None)
  options = objective.loss_options(unscored)
  options |= objective.own_options(options, given.entropy)

  def mean(logprobs, values):
    loss = objective.loss(logprobs, given.behavior, advantages, given.mask, **options).loss
    return objective.mean(
      loss if returns is None else loss + objective.value_loss(values, returns, given.mask), given.mask
    )

  loss, pulls = jax.value_and_grad(mean, argnums=(0, 1))(given.stats.logprobs, given.stats.values)
  assert np.isfinite(loss)
  for pull, wanted in zip(pulls, (True, objective.gae is not None), strict=True):
    assert np.isfinite(pull).all()
    assert (np.abs(pull).max() > 1e-6) == wanted
    assert not np.any(np.asarray(pull)[~given.mask])


@pytest.mark.parametrize(("name", "options"), [("m2po", dict(budget=2.0)), ("estr", {})])
def test_what_a_correction_needs_is_that_of_the_whole_batch_however_it_is_split(name, options):
  objective = learning.objective(name, **options)
  learners = [
    make_learner(shape, optimizer=optax.sgd(0.01), policy=BIGRAM, objective=objective)
    for shape in (shape_of(rows=16, row_tokens=40), shape_of(rows=1, row_tokens=20), shape_of(rows=4, row_tokens=33))
  ]
  assert learners[1].shape.capacity > 8 * learners[0].shape.capacity
  results = [run(learner, make_groups()) for learner in learners]
  assert 0.1 < results[0][1]["reject_fraction"] < 0.9
  for params, metrics in results[1:]:
    assert_same(params, results[0][0])
    assert metrics["reject_fraction"] == results[0][1]["reject_fraction"]


def test_entropies_of_the_pass_itself_are_those_of_a_scoring_pass():
  plain, scored = learning.objective("estr"), learning.objective("estr", advantages="opob_by_logits")
  fixed = lambda rewards, groups, num_groups, **needs: jnp.where(rewards > 0, 1.0, -1.0)
  scored_fixed = lambda rewards, groups, num_groups, *, squared_logit_norms: fixed(rewards, groups, num_groups)
  plain, scored = (dataclasses.replace(x, advantages=y) for x, y in ((plain, fixed), (scored, scored_fixed)))
  assert (plain.needs_scores, scored.needs_scores) == (False, True)
  options = dict(optimizer=optax.sgd(0.01), policy=BIGRAM)
  (own, metrics), (other, expected) = (
    run(make_learner(shape_of(), objective=objective, **options), make_groups()) for objective in (plain, scored)
  )
  assert 0.1 < metrics["reject_fraction"] < 0.9
  assert metrics["reject_fraction"] == expected["reject_fraction"]
  assert_same(own, other)


def test_estr_rejects_by_the_entropy_at_the_temperature_that_drew():
  groups = make_groups()
  learner = make_learner(
    shape_of(), optimizer=optax.sgd(0.0), policy=BIGRAM, objective=learning.objective("estr"), temperature=0.5
  )
  _, metrics = run(learner, groups, steps=1)
  rejected = {0.5: 0, 1.0: 0}  # by the temperature of the entropy; log-probabilities are at .5
  total = 0
  params = start(learner).params
  for request, completion in ((group.request, completion) for group in groups for completion in group.completions):
    tokens = np.concatenate([request.tokens, completion.tokens])[None]
    ones, positions = jnp.ones_like(tokens), jnp.arange(tokens.size)[None]
    logits = BIGRAM.logits(params, BIGRAM.hidden(params, tokens, ones, positions))[0, request.tokens.size - 1 : -1]
    logits = np.asarray(logits, np.float64)
    log_p = {t: logits / t - np.log(np.sum(np.exp(logits / t), axis=-1, keepdims=True)) for t in rejected}
    squares = (log_p[0.5][np.arange(completion.tokens.size), completion.tokens] - completion.logprobs) ** 2
    for t, values in log_p.items():
      entropy = -np.sum(np.exp(values) * values, axis=-1)
      rejected[t] += int(np.sum((squares / (entropy + 0.01) > 1.0)[completion.mask]))
    total += int(np.sum(completion.mask))
  assert rejected[0.5] != rejected[1.0]
  assert metrics["reject_fraction"] == pytest.approx(rejected[0.5] / total, abs=1e-6)


def test_the_threshold_rejects_what_the_function_rejects_on_the_whole_batch():
  groups = make_groups()
  batch = learning.pack(groups, shape_of())
  options = dict(optimizer=optax.sgd(0.0), policy=BIGRAM)
  learner = make_learner(shape_of(), objective=learning.objective("m2po", budget=2.0), **options)
  _, metrics = run(learner, groups, steps=1)
  plain = make_learner(shape_of(), **options)
  state = start(plain)
  plain.set_reference(state.params)
  ratios = losses.log_ratios(plain.score_reference(state.params, batch), batch.logprobs, batch.mask)
  threshold = losses.second_moment_threshold(ratios, batch.mask, budget=2.0)
  expected = np.mean(np.asarray(ratios)[batch.mask] ** 2 >= float(threshold))
  assert metrics["reject_fraction"] == pytest.approx(expected, abs=1e-6)


def test_needs_follow_from_the_signatures():
  needs = lambda *args, **options: learning.objective(*args, **options).needs
  assert needs("reinforce") == frozenset()
  assert needs("a3po", advantages="opo") == {"lag", "lengths"}
  assert needs("m2po", advantages="opob") == {"threshold", "log_weights", "squared_norms"}
  plain, recompute = learning.objective("ppo_clip"), learning.objective("decoupled_recompute")
  assert not plain.needs_scores
  assert recompute.needs_scores
  assert needs("estr") == {"entropy"}
  assert learning.objective("m2po").needs_scores
  assert not learning.objective("estr").needs_scores  # its own pass has the entropies
  assert learning.objective("estr", advantages="opob_by_logits").needs_scores
  assert not recompute.needs_exact_norms
  assert learning.rlhf_objective("ipo").needs_reference
  assert not learning.rlhf_objective("best_of_n").needs_reference


def test_what_is_not_needed_is_not_computed():
  def flops(objective):
    learner = make_learner(shape_of(), optimizer=optax.sgd(1.0), policy=BIGRAM, objective=objective)
    batch = learner.put(learning.pack(make_groups(), learner.shape))
    return learner._step.lower(learner.abstract(), batch, None).compile().cost_analysis()["flops"]

  plain = flops(learning.objective("reinforce"))
  assert flops(learning.objective("reinforce", advantages="opo")) == pytest.approx(plain, rel=0.01)
  assert flops(learning.objective("reinforce", advantages="importance_mean")) > 1.2 * plain
  assert flops(learning.objective("reinforce", advantages="opob")) > 1.4 * plain


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("sequence_tis", "sequence_mean"),
    ("m2po", "token_mean"),
    ("m2po_signed", "token_mean"),
    ("estr", "token_mean"),
    ("topr", "sum"),
    ("dapo", "token_mean"),
  ],
)
def test_corrections_are_aggregated_as_published_unless_told_otherwise(name, expected):
  assert learning.objective(name).aggregate is learning.AGGREGATIONS[expected]
  assert learning.objective(name, aggregate="sequence_mean").aggregate is learning.AGGREGATIONS["sequence_mean"]


def test_options_reach_the_correction_and_the_statistic():
  one, behavior = jnp.ones((1, 1)), jnp.full((1, 1), -3.0)
  loss = learning.objective("sequence_tis", cap=1.5).loss(-1.0 * one, behavior, jnp.ones(1), one > 0).loss
  assert float(loss[0, 0]) == pytest.approx(1.5)
  ratios, mask = jnp.array([[0.1, 0.2, 0.3, 0.5]]), jnp.ones((1, 4), bool)
  statistics = learning.objective("m2po", budget=0.05).statistics
  assert float(statistics["threshold"](ratios, mask)) == pytest.approx((0.09 + 0.25) / 2)
  assert float(learning.objective("m2po").statistics["threshold"](ratios, mask)) == pytest.approx(0.065)
  assert learning.objective("a3po", low=0.1).loss.keywords["low"] == 0.1


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (
      lambda: learning.objective("mp2o"),
      ValueError,
      r"\*objective\* must be one of .reinforce., .*, got objective=.mp2o.; did you mean .m2po",
    ),
    (lambda: learning.objective("m2po", advantages="gea"), ValueError, r"\*advantages\* .* got advantages='gea'"),
    (lambda: learning.objective("m2po", aggregate="mean"), ValueError, r"\*aggregate\* .* got aggregate='mean'"),
    (
      lambda: learning.objective("ppo_clip", cap=2.0),
      ValueError,
      r"\*cap\* is not an option of 'ppo_clip'.* low, high",
    ),
    (
      lambda: learning.objective("topr", gae=learning.GAE(value_rate=3.0)),
      ValueError,
      r"\*value_rate\*=3.0 acts with \*advantages\*='gae' only, got 'dr_grpo'",
    ),
    (
      lambda: learning.rlhf_objective("rloo", gae=learning.GAE(whiten=False)),
      ValueError,
      r"\*whiten\*=False acts with \*method\*='ppo' only, got 'rloo'",
    ),
    (lambda: learning.rlhf_objective("proximal_rloo", clip=1.5), ValueError, r"\*clip\* .* got clip=1.5"),
    (lambda: learning.objective("reinforce", cap=2.0), ValueError, "takes none"),
    (lambda: learning.objective("sequence_tis", budget=0.1), ValueError, r"\*budget\* is not an option"),
    (lambda: learning.objective("m2po", threshold=0.1), ValueError, r"\*threshold\* is not an option"),
  ],
)
def test_unknown_names_and_options_are_refused(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_a_need_that_nobody_can_meet_is_refused_at_construction():
  def loss(logprobs, behavior, advantages, mask, *, curvature): ...

  with pytest.raises(ValueError, match=r"\*loss\* must only need behavior, .*; got curvature"):
    learning.Objective(loss, losses.rloo_advantages)


def test_values_are_refused_where_no_head_would_be_trained():
  def advantages(rewards, groups, num_groups, *, values): ...

  def token_rewards(rewards, *, mask): ...

  with pytest.raises(ValueError, match=r"values go with advantages=GAE\(...\) only"):
    learning.Objective(losses.reinforce, advantages)
  with pytest.raises(ValueError, match=r"\*token_rewards\* and values go with"):
    learning.Objective(losses.reinforce, losses.rloo_advantages, token_rewards=token_rewards)


def test_a_statistic_of_ones_own_is_made_of_the_whole_batch():
  def loss(logprobs, behavior, advantages, mask, *, largest):
    return losses.restrict(losses.reinforce(logprobs, behavior, advantages, mask), jnp.full(mask.shape, largest < 0))

  def largest(ratios, mask):
    return jnp.max(jnp.where(mask, ratios, -jnp.inf))

  objective = learning.Objective(loss, losses.rloo_advantages, statistics={"largest": largest})
  assert objective.needs_scores
  _, metrics = run(make_learner(shape_of(), policy=BIGRAM, objective=objective), make_groups(), 1)
  assert metrics["reject_fraction"] == 1.0  # random log-probabilities: some ratio is above 1


def test_a_quantity_that_is_missing_is_named():
  zeros = jnp.zeros((2, 1))
  batch = learning.BatchQuantities(jnp.ones(2), jnp.zeros(2, int), zeros == 0, zeros, zeros.astype(int))
  with pytest.raises(ValueError, match="stats=None"):
    learning.objective("m2po").loss_options(batch)
  with pytest.raises(ValueError, match="needs reference, got reference=None"):
    learning.rlhf_objective("rloo").make_advantages(batch)
  scored = batch._replace(stats=models.TokenStats(zeros, zeros, zeros))
  assert learning.objective("m2po").loss_options(scored)["threshold"] == jnp.inf


def test_maximum_likelihood_weighs_every_token_alike():
  groups = [g._replace(rewards=np.zeros(4, np.float32)) for g in make_groups()]  # rewards do not matter
  objective = learning.likelihood_objective()
  learner = make_learner(shape_of(), optimizer=optax.sgd(0.0), policy=BIGRAM, objective=objective)
  state = start(learner)
  learner.set_reference(state.params)
  batch = learning.pack(groups, learner.shape)
  logprobs = np.asarray(learner.score_reference(state.params, batch))
  _, metrics = learner.step(state, learner.put(batch))
  assert float(metrics["loss"]) == pytest.approx(-logprobs[batch.mask].mean(), rel=1e-5)
