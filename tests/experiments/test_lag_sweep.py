"""The lag sweep: rewards on the device, sampler against learner, knobs, warm starts, and a tiny sweep end to end."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import stabilizers
from async_rl import tasks
from async_rl.types import LENGTH
from async_rl.types import STOP
from experiments.reproductions import _lag_sweep_gac as gac
from experiments.reproductions import _lag_sweep_knobs as sweep_knobs
from experiments.reproductions import _lag_sweep_losses as sweep_losses
from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions import _lag_sweep_plan as plans
from experiments.reproductions import _lag_sweep_report as reports
from experiments.reproductions import _lag_sweep_run as runs
from experiments.reproductions import _lag_sweep_starts as warm
from experiments.reproductions import _lag_sweep_tasks as problems
from experiments.reproductions import lag_sweep
from experiments.reproductions._lag_sweep_sorting import Sorting

SETTINGS = {
  "sums": problems.Setting(tasks.Sums(numbers=3, train=60, test=40), problems.SETTINGS["ch3"].model),
  "countdown": problems.Setting(tasks.CountdownSteps(numbers=3, train=60, test=40), problems.SETTINGS["cd4"].model),
  "sorting": problems.Setting(Sorting(numbers=5, train=60, test=40), problems.SETTINGS["sort16"].model),
}
TINY = dataclasses.replace(SETTINGS["sums"], **problems.TINY)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
  return str(tmp_path_factory.mktemp("tfds"))


@pytest.fixture(scope="module")
def tiny_data(data_dir, tmp_path_factory):
  return problems.problems(TINY, tmp_path_factory.mktemp("sums"), data_dir)


def _mutated(rng: np.random.Generator, tokens: np.ndarray, vocab: int) -> np.ndarray:
  """Correct completions with up to two symbols changed, or two swapped: mostly wrong, sometimes right."""
  tokens = tokens.copy()
  for row in tokens:
    at = rng.integers(0, len(row), 2)
    kind = rng.integers(0, 4)
    if kind == 1:
      row[at[0]] = rng.integers(0, vocab)
    elif kind == 2:
      row[at] = rng.integers(0, vocab, 2)
    elif kind == 3:
      row[at] = row[at[::-1]]
  return tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_the_reward_on_the_device_is_the_tasks_own(name, tmp_path, data_dir):
  setting = SETTINGS[name]
  task = setting.task if name == "sorting" else dataclasses.replace(setting.task, data_dir=data_dir)
  test, texts = problems.problems(setting, tmp_path, data_dir)[1], task.prompts("test")
  rng, end = np.random.default_rng(0), setting.end
  prompts = np.repeat(np.asarray(test.prompts), problems.VARIANTS, axis=0)
  correct = np.asarray(test.solutions).reshape(len(prompts), -1)
  batches = [correct, rng.integers(0, end + 1, correct.shape), *(_mutated(rng, correct, end + 1) for _ in range(12))]
  reward = jax.jit(problems.reward_fn(setting))
  assert np.all(reward(prompts, correct) == 1)
  seen = set()
  for tokens in batches:
    got = np.asarray(reward(jnp.asarray(prompts), jnp.asarray(tokens, jnp.int32)))
    for i, row in enumerate(tokens):
      stopped = end in row
      text = problems.decode(task, row[: list(row).index(end)] if stopped else row)
      wanted = task.reward(texts[i // problems.VARIANTS], text, STOP if stopped else LENGTH)
      assert got[i] == wanted, text
      seen.add((wanted, np.array_equal(row, correct[i])))
  assert {(1.0, True), (0.0, False)} <= seen


@pytest.mark.parametrize(
  ("text", "wanted"),
  [
    ("2 * 3 = 6 ; 6 + 4 = 10", 1),
    ("4 + 6 = 10 ; 2 * 3 = 6", 0),  # uses a number that is not there yet
    ("2 * 3 = 6 ; 6 + 6 = 12", 0),  # uses a number twice
    ("2 + 4 = 6 ; 6 + 3 = 9", 0),  # reaches something else
    ("2 * 3 = 7 ; 7 + 3 = 10", 0),  # wrong arithmetic
    ("4 / 3 = 1 ; 1 * 2 = 2", 0),  # no integer
  ],
)
def test_countdown_steps_by_hand(text, wanted):
  setting = SETTINGS["countdown"]
  prompt = jnp.array([problems.encode(setting.task, "2 3 4 = 10 :")])
  tokens = jnp.array([[*problems.encode(setting.task, text), setting.end]])
  assert problems.reward_fn(setting)(prompt, tokens)[0] == wanted


def test_no_sorting_problem_of_the_test_split_is_trained_on_in_another_order():
  train, test = (
    {"".join(sorted(x.answer)) for x in Sorting(5, 600, 300).prompts(split)} for split in ("train", "test")
  )
  assert (len(train), len(test), len(train & test)) == (600, 300, 0)
  with pytest.raises(ValueError, match="together at most 357 with numbers=4"):
    Sorting(4, 300, 58)


def test_division_and_subtraction_count():
  setting = SETTINGS["countdown"]
  prompt = jnp.array([problems.encode(setting.task, "8 2 3 = 1 :")] * 2)
  texts = ("8 / 2 = 4 ; 4 - 3 = 1", "8 / 0 = 4 ; 4 - 3 = 1")
  tokens = jnp.array([[*problems.encode(setting.task, text), setting.end] for text in texts])
  assert problems.reward_fn(setting)(prompt, tokens).tolist() == [1, 0]


@pytest.fixture(scope="module")
def drawn(tiny_data):
  """A runner, weights far from uniform, prompts, and completions drawn with them."""
  runner = runs.Runner(TINY, "float32", max_lag=4)
  weights = 1.5 * runner.init(jax.random.key(0))
  prompts = tiny_data[0].prompts[:2]
  completions = jax.jit(runner.draw, static_argnums=2)(weights, prompts, TINY.samples, jax.random.key(1))
  return runner, weights, jnp.repeat(prompts, TINY.samples, axis=0), completions


def test_sampler_and_learner_agree_on_log_probabilities(drawn):
  runner, weights, prompts, completions = drawn
  scored = jax.jit(runner.score)(weights, prompts, completions.tokens)
  np.testing.assert_allclose(
    np.where(completions.mask, scored.logprobs, 0), np.where(completions.mask, completions.logprobs, 0), atol=1e-5
  )
  assert len(np.unique(completions.tokens)) > 3
  end = TINY.end
  for row, mask in zip(np.asarray(completions.tokens), np.asarray(completions.mask)):
    length = list(row).index(end) + 1 if end in row else len(row)
    assert mask.sum() == length
    assert mask[:length].all()


#: At this factor of the weights, ESTR rejects other tokens by the entropy of the policy that is trained.
ESTR = ("estr_low", 1.6)


@pytest.fixture(scope="module")
def gradient(drawn):
  """Random rewards, and the gradient of the runner on `drawn` under them at lag 3, by loss and weights."""
  _, _, prompts, completions = drawn
  runner = runs.Runner(TINY, "float32", max_lag=4)
  rewards = jax.random.normal(jax.random.key(2), (prompts.shape[0],))
  runner.reward = lambda prompts, tokens: rewards
  program = jax.jit(runner.gradient)  # one for all losses
  make = lambda loss, weights, centering=0: program(
    sweep_knobs.Knobs(loss=loss, centering=centering), weights, prompts, completions, jnp.int32(3)
  )
  return rewards, make


@pytest.mark.parametrize(
  ("name", "factor"),
  [*((name, 1.02) for name in ("ppo", "a3po", "sequence_tis", "topr", "m2po", "prefix_tis", "sat", "trm_10")), ESTR],
)
def test_the_gradient_through_coefficients_is_the_losses_gradient(drawn, gradient, name, factor):
  runner, weights, prompts, completions = drawn
  moved = weights * factor
  rewards, make_gradient = gradient
  objective = learning.Objective(sweep_losses.LOSSES[name], losses.ADVANTAGES["dr_grpo"])
  mask, behavior, log_q = completions.mask, completions.logprobs, completions.distributions

  def loss(weights, entropy):
    stats = runner.score(weights, prompts, completions.tokens)._replace(entropy=entropy)
    batch = learning.BatchQuantities(rewards, runner.groups, mask, behavior, jnp.full(mask.shape, 3), stats)
    advantages = objective.make_advantages(batch)[:, None] * jnp.ones(mask.shape)
    out = objective.loss(stats.logprobs, behavior, advantages, mask, **objective.loss_options(batch))
    return objective.mean(out.loss, mask)

  wanted = jax.jit(jax.grad(loss))(moved, -jnp.sum(jnp.exp(log_q) * log_q, axis=-1))
  got, log_weights, _ = make_gradient(list(sweep_losses.LOSSES).index(name), moved)
  np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))
  assert np.std(log_weights) > 0.01
  assert np.any(got)
  if name == ESTR[0]:
    other = jax.grad(loss)(moved, runner.score(moved, prompts, completions.tokens).entropy)
    assert float(jnp.linalg.norm(got - other)) > 0.01 * float(jnp.linalg.norm(got))


@pytest.mark.parametrize(
  ("name", "centering", "factor"), [("reinforce", "plain", 1.02), ("token_tis", "token_tis", 1.6)]
)
def test_a_centered_score_has_the_samplers_mean_taken_out(drawn, gradient, name, centering, factor):
  runner, weights, prompts, completions = drawn
  moved = weights * factor
  rewards, make_gradient = gradient
  mask, groups = completions.mask, runner.groups
  advantages = losses.grpo_advantages(rewards, groups, mask.shape[0], normalize_std=False)
  ratio_weight = sweep_losses.CENTERINGS[centering]

  def loss(weights):
    log_p = runner.distributions(weights, prompts, completions.tokens)
    fixed, q = jax.lax.stop_gradient(log_p), jnp.exp(completions.distributions)
    weight = ratio_weight(jnp.exp(fixed - completions.distributions))
    own = lambda x: jnp.take_along_axis(x, completions.tokens[..., None], axis=-1)[..., 0]
    centered = own(weight) * own(log_p) - jnp.sum(q * weight * log_p, axis=-1)
    return jnp.mean(jnp.sum(jnp.where(mask, -advantages[:, None] * centered, 0.0), axis=1) / jnp.sum(mask, axis=1))

  wanted = jax.jit(jax.grad(loss))(moved)
  index = list(sweep_losses.LOSSES).index(name)
  got = make_gradient(index, moved, list(sweep_losses.CENTERINGS).index(centering))[0]
  np.testing.assert_allclose(got, wanted, atol=2e-5 * float(jnp.max(jnp.abs(wanted))))
  plain = make_gradient(index, moved)[0]
  assert float(jnp.linalg.norm(got - plain)) > 1e-3 * float(jnp.linalg.norm(plain))


def test_exact_norms_are_those_of_single_trajectories(drawn):
  runner, weights, prompts, completions = drawn
  got = jax.jit(runner.squared_norms)(weights, prompts, completions)
  logprob = lambda w: jnp.sum(runner.score(w, prompts, completions.tokens).logprobs[3] * completions.mask[3])
  np.testing.assert_allclose(got[3], jnp.sum(jax.jit(jax.grad(logprob))(weights) ** 2), rtol=1e-3)


def batch_with(logprobs, rewards, behavior=None):
  """One group of sequences whose tokens have these log-probabilities."""
  zeros, ones = jnp.zeros(logprobs.shape), jnp.ones(rewards.shape)
  return learning.BatchQuantities(
    rewards=rewards,
    groups=jnp.zeros(rewards.shape, jnp.int32),
    mask=zeros == 0,
    behavior=zeros if behavior is None else behavior,
    lag=jnp.ones(logprobs.shape, jnp.int32),
    stats=models.TokenStats(logprobs, zeros, zeros),
    squared_norms=ones,
  )


def test_the_anchor_pulls_towards_the_behavior_policy():
  ratios = jnp.array([[0.5, 0.5], [-0.5, 0.5]])  # log-weights 1 and 0
  knobs = sweep_knobs.Knobs(anchor=0.1, token_anchor=0.2)
  got = sweep_knobs.advantages(knobs, batch_with(ratios, jnp.array([1.0, 0.0])))
  np.testing.assert_allclose(got, [[0.45 - 0.1, 0.45 - 0.1], [-0.45 + 0.1, -0.45 - 0.1]], rtol=1e-5)


def test_tempered_weights_keep_half_of_the_batch():
  logs = jnp.array([0.0, 0.0, 0.0, 6.0])  # untempered, one sequence is everything
  index = jnp.int32(list(sweep_losses.LOSSES).index("tempered_is"))
  batch = batch_with(logs[:, None], jnp.ones(4))
  weights = -4 * sweep_losses.coefficients(index, logs[:, None], jnp.ones((4, 1)), batch)[:, 0]
  np.testing.assert_allclose(jnp.mean(weights), 1.0, rtol=1e-5)
  assert 0.5 <= float(losses.ess_ratio(jnp.log(weights), jnp.ones(4, bool))) < 0.65
  assert weights[3] > weights[0]


def test_sums_and_means_differ_by_the_length_and_successes_alone_have_no_failures():
  logs, advantages = jnp.array([[0.1, 0.2], [0.3, 0.1], [0.2, 0.0]]), jnp.array([[1.0] * 2, [-1.0] * 2, [-1.0] * 2])
  batch = batch_with(logs, jnp.ones(3))._replace(mask=jnp.array([[True, True], [True, True], [True, False]]))
  every = jax.jit(jax.vmap(sweep_losses.coefficients, in_axes=(0, None, None, None)))
  by_loss = np.asarray(every(jnp.arange(len(sweep_losses.LOSSES)), logs, advantages, batch))
  made = lambda name: by_loss[list(sweep_losses.LOSSES).index(name)]
  np.testing.assert_allclose(made("topr_sum"), made("topr") * [[2], [2], [1]], rtol=1e-6)
  np.testing.assert_allclose(made("sequence_ppo_mean"), made("sequence_ppo") / [[2], [2], [1]], rtol=1e-6)
  np.testing.assert_allclose(made("topr_successes"), made("topr") * [[1], [0], [0]], atol=1e-8)
  assert np.all(made("topr")[1] != 0)


def test_the_servo_settles_where_half_of_the_batch_counts():
  optimizer = sweep_knobs.servo_by_ess(0.5)
  state = optimizer.init(jnp.zeros(1))

  @jax.jit
  def step(state):
    logs = state.servo_scale * jnp.array([0.0, 0.0, 2.0, -2.0])  # staleness in proportion to the step
    return optimizer.update(jnp.ones(1), state, log_weights=logs)

  for _ in range(100):
    updates, state = step(state)
  logs = state.servo_scale * jnp.array([0.0, 0.0, 2.0, -2.0])
  assert math.isclose(float(losses.ess_ratio(logs, jnp.ones(4, bool))), sweep_losses.ESS_TARGET, abs_tol=1e-3)
  np.testing.assert_allclose(updates, state.servo_scale, rtol=1e-5)


def test_default_knobs_are_plain_clipped_adam():
  knobs = sweep_knobs.Knobs(rate=0.5)
  plain = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(lambda count: 0.5 * jnp.minimum(1.0, (count + 1) / sweep_knobs.WARMUP))
  )
  optimizer = sweep_knobs.optimizer(knobs, 400)
  params = jnp.array([1.0, 2.0])
  state, plain_state = optimizer.init(params), plain.init(params)
  for gradient in ([3.0, 4.0], [3.0, 4.1], [0.1, -0.2]):
    got, state = optimizer.update(jnp.array(gradient), state, params, log_weights=jnp.array([0.0, 5.0]), mean_lag=9.0)
    wanted, plain_state = plain.update(jnp.array(gradient), plain_state, params)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize(("fall", "share"), [(0.0, (1.0, 1.0, 1.0)), (1.0, (0.9, 0.5, 0.1)), (0.5, (0.95, 0.75, 0.55))])
def test_a_falling_rate_falls_in_equal_parts(fall, share):
  optimizer = sweep_knobs.optimizer(sweep_knobs.Knobs(rate=0.5, fall=fall), 200)
  params, state, steps = jnp.ones(1), optimizer.init(jnp.ones(1)), []
  step = jax.jit(lambda state: optimizer.update(jnp.ones(1), state, params, log_weights=jnp.zeros(2), mean_lag=0.0))
  for _ in range(181):
    update, state = step(state)
    steps.append(float(update[0]))
  np.testing.assert_allclose(
    [-steps[i] / 0.5 for i in (20, 100, 180)], share, rtol=1e-4
  )  # Adam's steps of equal gradients


def test_a_traced_choice_of_gac_is_that_choice():
  gradients = jax.random.normal(jax.random.key(0), (12, 6)) + 0.9
  chain = lambda: optax.with_extra_args_support(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))

  def train(optimizer):
    def step(carry, gradient):
      params, state = carry
      updates, state = optimizer.update(gradient, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (params, optax.tree.get(state, "alignment_regime"))

    params = jnp.zeros(6)
    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

  traced = jax.jit(jax.vmap(lambda choice: train(gac.control_alignment(chain(), 0.2, 0.6, choice))))
  got, regimes = (np.asarray(x) for x in traced(jnp.arange(len(gac.CHOICES))))
  assert {stabilizers.AlignmentRegime.PROJECTED, stabilizers.AlignmentRegime.SKIPPED} <= set(regimes.ravel().tolist())
  for i, choice in enumerate(gac.CHOICES):
    wanted = train(stabilizers.control_alignment(chain(), 0.2, 0.6, **choice._asdict()))
    np.testing.assert_allclose(got[i], wanted[0], atol=1e-5)
    np.testing.assert_array_equal(regimes[i], wanted[1])
    assert np.all(np.abs(np.delete(got, i, axis=0) - got[i]).max(axis=(1, 2)) > 1e-3), choice


def test_every_method_has_knobs_that_exist():
  for name, knobs in methods.METHODS.items():
    assert set(knobs) <= set(sweep_knobs.Knobs._fields), name
  for name, knobs in methods.OTHERS_FALLING.items():
    assert knobs == methods.METHODS[name.removesuffix(", falling rate")] | {"fall": 1.0}
  assert {row[0] for row in methods.MATCHED.values()} <= set(methods.METHODS)
  assert {name for panel in reports.PANELS.values() for name in panel} <= set(methods.METHODS)


def test_warm_starts_are_made_once_and_extended(tiny_data, tmp_path):
  runner = runs.Runner(TINY, "float32", max_lag=4)
  starts = warm.WarmStarts(tmp_path / "folder" / "warm_sums.npz")
  assert starts.make({3, 1}, runner, *tiny_data) == [1, 3]
  kept = starts.checksums()
  assert kept[1] != kept[3]
  again = warm.WarmStarts(tmp_path / "folder" / "warm_sums.npz")
  assert again.make({1, 3}, runner, *tiny_data) == []
  assert again.make({1, 2, 4}, runner, *tiny_data) == [2, 4]
  assert {seed: again.checksums()[seed] for seed in kept} == kept
  assert warm.WarmStarts(tmp_path / "folder" / "warm_sums.npz").checksums() == again.checksums()


@pytest.mark.slow
def test_a_tiny_sweep(tmp_path, data_dir, capsys, monkeypatch):
  easy = lambda setting: lambda prompts, tokens: jnp.mean(tokens == 3, axis=1, dtype=jnp.float32)
  monkeypatch.setattr(problems, "reward_fn", easy)
  plan = lag_sweep.SMOKE[:3]  # the last has a program of its own, which takes as long again to compile
  options = ["--smoke", "--folder", str(tmp_path / "sweep"), "--data-dir", data_dir]
  results = lag_sweep.main([*options, *plan])
  curves = {
    run.method: dict(zip(runs.CURVES, values.astype(np.float32), strict=True)) for run, values in results.curves.items()
  }
  assert curves.keys() == {*methods.SYNC, "PPO + GAC", "PPO + random skips"}
  assert all(np.isfinite(values).all() for row in curves.values() for values in row.values())
  assert curves["sync"]["ess"].min() == 1.0
  assert curves["PPO + GAC"]["ess"][-1] < 0.999
  assert curves["sync"]["norm"].min() > 0
  assert curves["sync"]["accuracy"][-1] != curves["sync"]["accuracy"][0]
  assert "runs, " in capsys.readouterr().out
  text = reports.report(results, tmp_path / "results")
  assert "| sync |" in text
  assert (tmp_path / "results" / "lag_sweep_tables.md").read_text() == text
  assert {file.suffix for file in (tmp_path / "results").iterdir()} == {".npz", ".png", ".md"}
  assert plans.Results(tmp_path / "sweep").curves.keys() == results.curves.keys()
