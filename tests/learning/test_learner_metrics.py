"""The metrics of a learner step against exact values, by enumeration of everything that the sampler could have drawn.

The behavior policy's probabilities are multiples of 1/8, so a batch that holds each completion as often as 64 drawings
would is its exact distribution: means over the batch are expectations, not estimates.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import Bigram
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import params_of
from learning_helpers import shape_of
from learning_helpers import start

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import stabilizers
from async_rl.learning._learner_metrics import batch_metrics
from async_rl.learning._learner_metrics import optimizer_metrics
from async_rl.learning._learning_rate import scheduled_rates
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request

CONFIG = models.ModelConfig(
  vocab_size=4, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16, tie_embeddings=False
)
POLICY = Bigram(CONFIG, dtype="float32", attention="xla")
FIRST, SECOND = np.array([4, 2, 1, 1]) / 8, np.array([1, 1, 2, 4]) / 8
PROMPT = np.array([1, 2], np.int32)
VERSION = 100
#: Version that drew each token, by the first token of its completion.
DRAWN_BY = np.array([[100, 100], [99, 100], [90, 97], [10, 60]])
#: How sharp the trained policy is; at 30 the sampler's tokens are all but impossible under it.
SHARPNESS = [1.0, 6.0, 30.0]


def probabilities(params):
  """pi of the first token, [4], and of the second given the first, [4, 4], in float64."""
  ids = jnp.asarray([[*PROMPT, token] for token in range(4)])
  positions = jnp.broadcast_to(jnp.arange(3), ids.shape)
  logits = POLICY.logits(params, POLICY.hidden(params, ids, jnp.ones_like(ids), positions))
  logits = np.asarray(logits, np.float64)
  exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
  normalized = exps / exps.sum(axis=-1, keepdims=True)
  return normalized[0, 1], normalized[:, 2]


def completions():
  """Every completion of two tokens, as often as 64 drawings of mu would have it."""
  made = []
  for a, b in itertools.product(range(4), repeat=2):
    for _ in range(round(64 * FIRST[a] * SECOND[b])):
      tokens, logprobs = np.array([a, b], np.int32), np.log([FIRST[a], SECOND[b]]).astype(np.float32)
      made.append(Completion(0, len(made), tokens, logprobs, DRAWN_BY[a].astype(np.int32), np.ones(2, bool), STOP))
  return tuple(made)


def exact_batch():
  own = completions()
  assert len(own) == 64
  rewards = np.array([float(c.tokens[0] == c.tokens[1]) for c in own], np.float32)
  group = Group(Request(0, PROMPT, Prompt(0, "", None)), own, rewards)
  return learning.pack([group], learning.BatchShape(sequences=64, row_tokens=16, rows=8, completion_tokens=2))


def policy_params(sharpness, seed=0):
  params = jax.tree.map(jnp.asarray, params_of(POLICY, seed))
  params["ends"]["head"] = params["ends"]["head"] * sharpness
  return params


def measure(sharpness, objective=None, reference=None):
  """Metrics of a step on the exact batch, and pi's probabilities."""
  batch = exact_batch()
  shape = learning.BatchShape(sequences=64, row_tokens=16, rows=8, completion_tokens=2)
  learner = make_learner(shape, optimizer=optax.sgd(0.0), policy=POLICY, objective=objective, max_lag=None)
  params = policy_params(sharpness)
  pi = probabilities(params)
  state = learner.init(jax.random.key(0), params)
  state = jax.device_put(state._replace(version=jnp.int32(VERSION)), learner.state_shardings)
  if reference is not None:
    learner.set_reference(reference)
  _, metrics = learner.step(state, learner.put(batch))
  return {name: float(value) for name, value in metrics.items()}, *pi


@pytest.fixture(scope="module", params=SHARPNESS)
def measured(request):
  return measure(request.param, reference=policy_params(2.0, seed=1))


def kl(p, q):
  return np.sum(p * (np.log(p) - np.log(q)))


def entropy(p):
  return -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0))


def test_kl_to_the_behavior_policy(measured):
  metrics, first, second = measured
  expected = 0.5 * (kl(FIRST, first) + sum(FIRST[a] * kl(SECOND, second[a]) for a in range(4)))
  assert metrics["kl/behavior"] == pytest.approx(expected, rel=1e-3)


def test_kl_to_the_reference_policy(measured):
  metrics, _, _ = measured
  first, second = probabilities(policy_params(2.0, seed=1))
  expected = kl(FIRST, first) + sum(FIRST[a] * kl(SECOND, second[a]) for a in range(4))
  assert metrics["kl/reference"] == pytest.approx(expected, rel=1e-3)


def test_entropy(measured):
  metrics, first, second = measured
  expected = 0.5 * (entropy(first) + sum(FIRST[a] * entropy(second[a]) for a in range(4)))
  assert metrics["entropy"] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_ratios(measured):
  metrics, first, second = measured
  ratios = np.concatenate([[first[c.tokens[0]] / FIRST[c.tokens[0]] for c in completions()],
                           [second[tuple(c.tokens)] / SECOND[c.tokens[1]] for c in completions()]])  # fmt: skip
  assert ratios.mean() == pytest.approx(1.0)  # its expectation under mu
  assert metrics["ratio/mean"] == pytest.approx(1.0, rel=1e-3)
  assert metrics["ratio/max"] == pytest.approx(ratios.max(), rel=1e-3)
  weights = [np.log(first[a] / FIRST[a] * second[a, b] / SECOND[b]) for a, b in np.ndindex(4, 4)]
  assert metrics["log_weight/abs_max"] == pytest.approx(np.abs(weights).max(), rel=1e-3)


def test_effective_sample_sizes(measured):
  """1 / (1 + chi-squared): the second moment of the weights is the sum of pi² / mu."""
  metrics, first, second = measured
  of_sequences = sum(first[a] ** 2 / FIRST[a] * np.sum(second[a] ** 2 / SECOND) for a in range(4))
  of_tokens = 0.5 * (np.sum(first**2 / FIRST) + sum(FIRST[a] * np.sum(second[a] ** 2 / SECOND) for a in range(4)))
  assert metrics["ess/sequence"] == pytest.approx(1 / of_sequences, rel=2e-3)
  assert metrics["ess/token"] == pytest.approx(1 / of_tokens, rel=2e-3)


def test_lag(measured):
  metrics, _, _ = measured
  lags = np.repeat(VERSION - DRAWN_BY, np.round(8 * FIRST).astype(int), axis=0)
  assert metrics["staleness/mean"] == pytest.approx(lags.mean())
  assert (metrics["staleness/min"], metrics["staleness/max"]) == (0, 90)


def test_by_lag(measured):
  metrics, first, second = measured
  rows = [(VERSION - DRAWN_BY[c.tokens[0]], c.tokens) for c in completions()]
  ratios = [np.array([first[a] / FIRST[a], second[a, b] / SECOND[b]]) for _, (a, b) in rows]
  ess = lambda w: np.sum(w) ** 2 / (len(w) * np.sum(np.square(w))) if len(w) else 0.0
  shares = []
  for name, low, high in (("0", 0, 0), ("1-3", 1, 3), ("4-15", 4, 15), ("16-63", 16, 63), ("64+", 64, 10**9)):
    inside = np.array([r for (lag, _), own in zip(rows, ratios) for k, r in zip(lag, own) if low <= k <= high])
    whole = np.array([np.prod(own) for (lag, _), own in zip(rows, ratios) if low <= max(lag) <= high])
    assert metrics[f"ratio/mean/lag_{name}"] == pytest.approx(inside.mean(), rel=1e-3, abs=1e-8)
    assert metrics[f"ratio/max/lag_{name}"] == pytest.approx(inside.max(), rel=1e-3, abs=1e-8)  # clamped at e^-20
    assert metrics[f"ess/token/lag_{name}"] == pytest.approx(ess(inside), rel=2e-3)
    assert metrics[f"ess/sequence/lag_{name}"] == pytest.approx(ess(whole), rel=2e-3)
    assert metrics[f"staleness/share/lag_{name}"] == pytest.approx(len(inside) / 128)
    shares.append(len(inside))
  assert sum(shares) == 128


def test_rewards_and_lengths(measured):
  metrics, _, _ = measured
  share = np.sum(FIRST * SECOND)
  assert metrics["reward/mean"] == pytest.approx(share)
  assert metrics["reward/std"] == pytest.approx(np.sqrt(share * (1 - share)))
  assert (metrics["response/length_mean"], metrics["response/length_max"]) == (2, 2)
  assert metrics["tokens/fill"] == 1.0  # four sequences of four tokens fill a row of 16


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_clip_and_reject_fractions(sharpness):
  clipped, first, second = measure(sharpness, learning.objective("ppo_clip"))
  rejected, _, _ = measure(sharpness, learning.objective("icepop"))
  share, cut, out = np.sum(FIRST * SECOND), 0.0, 0.0
  for a, b in np.ndindex(4, 4):
    for ratio in (first[a] / FIRST[a], second[a, b] / SECOND[b]):
      weight = FIRST[a] * SECOND[b] / 2
      cut += weight * (ratio > 1.2 if (a == b) - share > 0 else ratio < 0.8)
      out += weight * (not 0.5 <= ratio <= 5.0)
  assert 0 < cut < 1
  assert clipped["clip_fraction"] == pytest.approx(cut, abs=1e-6)
  assert clipped["reject_fraction"] == 0.0
  assert rejected["reject_fraction"] == pytest.approx(out, abs=1e-6)
  assert rejected["tokens/trained"] == pytest.approx(128 * (1 - out), abs=1e-3)


def test_every_metric_has_a_definition(measured):
  defined = {name.removesuffix("*") for name in learning.METRICS}
  for name in measured[0]:
    assert name in learning.METRICS or any(name.startswith(prefix) for prefix in defined if prefix[-1] in "_/"), name


def test_nothing_is_reported_by_lags_that_a_run_cannot_have():
  learner = make_learner(shape_of(), optimizer=optax.sgd(0.0), policy=Bigram(make_config()), max_lag=4)
  batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, learning.pack(make_groups(), learner.shape)))
  names = jax.eval_shape(learner._train, learner.abstract(), batch)[1]
  buckets = {name.rpartition("lag_")[2] for name in names if "/lag_" in name and "lag_zero" not in name}
  assert buckets == {"0", "1-3", "4+"}


def make_config():
  return models.ModelConfig(vocab_size=32, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16)


def test_a_batch_without_a_trainable_token_has_zeros():
  batch = exact_batch()
  batch = batch._replace(mask=np.zeros_like(batch.mask), groups=np.full_like(batch.groups, 2**31 - 1))
  zeros = jnp.zeros(batch.mask.shape)
  collected = learning._learner_metrics.Collected(zeros, zeros, zeros > 0, zeros > 0)
  metrics = batch_metrics(batch, collected, jnp.zeros(batch.mask.shape, int), jnp.zeros(64), zeros)
  empty = {name: float(value) for name, value in metrics.items() if name not in ("tokens/fill", "reject_fraction")}
  assert set(empty.values()) == {0.0}


# The optimizer's state.


def after_one_update(optimizer):
  params = {"w": jnp.ones(3), "bias": jnp.ones([])}  # a parameter that is a scalar is no metric
  extra = dict(log_weights=jnp.array([0.0, 0.0, -100.0, -100.0]))
  optimizer = optax.with_extra_args_support(optimizer)
  _, state = optimizer.update(params, optimizer.init(params), params, **extra)
  return {name: float(value) for name, value in optimizer_metrics(state).items()}


def test_every_scalar_of_a_stabilizers_state_is_a_metric():
  found = after_one_update(
    optax.chain(stabilizers.track_norm(), stabilizers.control_alignment(optax.adam(1e-3)), stabilizers.scale_by_ess())
  )
  assert found["stabilizers/grad_norm"] == pytest.approx(2.0)
  assert found["stabilizers/ess_ratio"] == pytest.approx(0.5)
  assert found["stabilizers/ess_scale"] == pytest.approx(np.sqrt(0.5))
  assert {"grad/cosine_to_previous", "grad/spikes", "stabilizers/skips", "stabilizers/alignment_regime"} <= set(found)
  assert not any(name.rpartition("/")[2] == "count" or "bias" in name for name in found)  # Adam's own are optax's


def test_a_stabilizer_of_ones_own_needs_no_table():
  observer = stabilizers.TrackCosineState  # a state class outside of optax
  transformation = optax.GradientTransformationExtraArgs(
    lambda params: observer(jnp.float32(0.25), params), lambda updates, state, params=None, **extra: (updates, state)
  )
  found = after_one_update(optax.masked(transformation, {"w": True, "bias": False}))
  assert found == {"grad/cosine_to_previous": 0.25}


def test_a_name_that_occurs_twice_is_numbered_in_the_order_of_the_chain():
  found = after_one_update(optax.chain(stabilizers.track_norm(), optax.sgd(0.5), stabilizers.track_norm()))
  assert found["stabilizers/grad_norm"] == pytest.approx(2.0)
  assert found["stabilizers/grad_norm/2"] == pytest.approx(1.0)


SCHEDULE = optax.linear_schedule(0.1, 0.2, 10)
PARAMS = {"bias": jnp.ones([]), "w": jnp.ones(3)}


def rates_of(optimizer, updates=3):
  """The learning rates that are reported for the step after some updates, and that update's state."""
  optimizer = optax.with_extra_args_support(optimizer)
  extra = dict(log_weights=jnp.zeros(4))
  state = optimizer.init(PARAMS)
  grads = PARAMS
  for _ in range(updates + 1):
    rates, before = scheduled_rates(optimizer, state), state
    _, state = optimizer.update(grads, state, PARAMS, **extra)
    grads = jax.tree.map(jnp.negative, grads)  # so that no alignment is controlled
  metrics = {name: float(value) for name, value in optimizer_metrics(state, rates).items()}
  return {name: value for name, value in metrics.items() if name.startswith("optimizer/")}, before


class KeepsItsMethod:
  """An optimizer that has a bound method of its own among its attributes, and a container that holds itself."""

  def __init__(self, inner):
    self.inner, self.step, self.registry = inner, self.update, {"large": list(range(100_000))}
    self.registry["own"] = self.registry

  def init(self, params):
    return self.inner.init(params)

  def update(self, updates, state, params=None, **extra):
    return self.inner.update(updates, state, params)


def test_schedules_are_found_in_optimizers_that_hold_themselves():
  own = KeepsItsMethod(optax.sgd(SCHEDULE))
  found, _ = rates_of(optax.GradientTransformation(own.init, own.update))
  assert found == {"optimizer/learning_rate": pytest.approx(0.13)}

  inner = optax.sgd(SCHEDULE)

  def update(updates, state, params=None):
    return later if params is None else inner.update(updates, state, params)

  found, _ = rates_of(optax.GradientTransformation(inner.init, update))  # `later` is bound to nothing yet
  assert found == {"optimizer/learning_rate": pytest.approx(0.13)}
  later = None


def test_an_injected_learning_rate_is_reported():
  injected = optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE)
  found, _ = rates_of(optax.chain(optax.clip_by_global_norm(1.0), injected))
  assert found == {"optimizer/learning_rate": pytest.approx(0.13)}
  found, _ = rates_of(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
  assert found == {"optimizer/learning_rate": 0.5}


@pytest.mark.parametrize(
  "optimizer",
  [
    optax.adamw(SCHEDULE),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.1), stabilizers.scale_by_ess()),
    stabilizers.control_alignment(optax.chain(optax.sgd(SCHEDULE), stabilizers.track_norm())),
    stabilizers.lead_by_momentum(optax.adamw(SCHEDULE), 2),
    optax.masked(optax.sgd(SCHEDULE, momentum=0.9), {"bias": False, "w": True}),
    optax.apply_if_finite(optax.lion(SCHEDULE), 3),
    optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)),
    optax.partition({"a": optax.sgd(SCHEDULE), "b": optax.set_to_zero()}, {"bias": "b", "w": "a"}),
  ],
  ids=["adamw", "chain", "alignment", "lead", "masked", "if_finite", "by_hand", "partition"],
)
def test_the_learning_rate_of_a_schedule_is_that_of_the_step(optimizer):
  assert rates_of(optimizer)[0] == {"optimizer/learning_rate": pytest.approx(0.13)}


def test_the_learning_rate_is_the_one_by_which_the_step_went():
  found, state = rates_of(optax.sgd(SCHEDULE))
  updates, _ = optax.sgd(SCHEDULE).update(PARAMS, state)
  np.testing.assert_allclose(updates["w"], -found["optimizer/learning_rate"] * np.ones(3), rtol=1e-6)


def test_several_schedules_are_reported_in_the_order_of_the_state():
  rates = {"x": 0.25, "b": 0.5, "a": 0.75}
  optimizers = {name: optax.sgd(optax.constant_schedule(rate)) for name, rate in rates.items()}
  found, _ = rates_of(optax.chain(optax.partition(optimizers, {"bias": "b", "w": "a"}), optax.sgd(SCHEDULE)))
  assert list(found.values()) == [0.75, 0.5, 0.25, pytest.approx(0.13)]


def test_steps_between_two_updates_of_several_micro_batches_have_one_learning_rate():
  found = [rates_of(optax.MultiSteps(optax.sgd(SCHEDULE), 2).gradient_transformation(), i)[0] for i in (2, 3, 4)]
  assert [rates["optimizer/learning_rate"] for rates in found] == pytest.approx([0.11, 0.11, 0.12])


def test_a_constant_learning_rate_or_one_that_cannot_be_told_is_not_reported():
  assert rates_of(optax.adamw(1e-3))[0] == {}
  twice = optax.scale_by_schedule(SCHEDULE)  # one function and two states
  assert rates_of(optax.chain(twice, twice))[0] == {}


def test_a_run_reports_the_learning_rate():
  learner = make_learner(shape_of(), optimizer=optax.adamw(SCHEDULE), policy=Bigram(make_config()))
  state = start(learner)
  batch = learner.put(learning.pack(make_groups(), learner.shape))
  reported = []
  for _ in range(2):
    state, metrics = learner.step(state, batch)
    reported.append(float(metrics["optimizer/learning_rate"]))
  assert reported == pytest.approx([0.1, 0.11])


def test_losses_and_stabilizers_have_one_effective_sample_size():
  assert losses.ess_ratio is stabilizers.ess_ratio
  for values in ([0.0, np.inf], [0.0, np.nan], [-np.inf, -np.inf]):
    assert float(losses.ess_ratio(jnp.array(values), jnp.ones(2, bool))) == 0.0
