"""The judge of corrections: its gradients, its estimators, and the command."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request
from experiments.benchmarks import _corrections_gradients as gradients
from experiments.benchmarks import corrections
from experiments.configs import quickstart

GROUPS, SAMPLES, VERSION, LAG = 3, 4, 9, 5
PROMPT, LONGEST = 3, 6


@pytest.fixture(scope="module")
def policy():
  config = models.ModelConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16)
  return models.Policy(config, dtype="float32")


@pytest.fixture(scope="module")
def params(policy):
  return policy.init(jax.random.key(0))


@pytest.fixture(scope="module")
def judge(policy):
  return gradients.Judge(policy, GROUPS, 1.0)


@functools.partial(jax.jit, static_argnums=0)
def log_probs(policy, params, rows):
  """[N, 6] log-probabilities of completions behind three prompt tokens, one sequence to a row of nine."""
  positions = jnp.broadcast_to(jnp.arange(PROMPT + LONGEST), rows.shape)
  return models.score(policy, params, rows, jnp.ones_like(rows), positions).logprobs[:, PROMPT:]


def unpack(groups):
  """[N, 9] sequences with padding at the end, which the causal mask hides."""
  rows = [np.concatenate([g.request.tokens, c.tokens]) for g in groups for c in g.completions]
  return np.stack([np.pad(row, (0, PROMPT + LONGEST - row.size)) for row in rows])


def make_groups(policy, params, drift):
  """Random sequences of several lengths and rewards, drawn by a policy whose log-probabilities are off by *drift*."""
  rng = np.random.default_rng(1)
  groups = []
  for ticket in range(GROUPS):
    prompt = rng.integers(0, 16, PROMPT).astype(np.int32)
    own = []
    for k in range(SAMPLES):
      tokens = rng.integers(0, 16, rng.integers(2, LONGEST + 1)).astype(np.int32)
      row = np.pad(np.concatenate([prompt, tokens]), (0, LONGEST - len(tokens)))[None]
      current = np.asarray(log_probs(policy, params, row))[0, : len(tokens)]
      behavior = (current + drift * rng.normal(size=len(tokens))).astype(np.float32)
      versions = np.full(len(tokens), VERSION - LAG, np.int32)
      own.append(Completion(ticket, k, tokens, behavior, versions, np.ones(len(tokens), bool), STOP))
    rewards = np.array([0.0, 1.0, *rng.integers(0, 2, SAMPLES - 2)], np.float32)
    groups.append(Group(Request(ticket, prompt, Prompt(ticket, "", None)), tuple(own), rewards))
  return groups


def pack(groups):
  """Rows hold two sequences each and more."""
  size = GROUPS * SAMPLES
  return jax.tree.map(jnp.asarray, learning.pack(groups, learning.BatchShape(size, 20, size, LONGEST)))


def test_gradients_are_those_of_the_losses(policy, params, judge):
  groups = make_groups(policy, params, 0.3)
  batch = pack(groups)
  assert int(batch.segments.max()) > 1
  found, _ = judge.methods(params, batch, VERSION)
  assert set(found) == set(gradients.NAMES)
  rewards, index = batch.rewards, batch.groups
  rows = unpack(groups)
  advantages = losses.grpo_advantages(rewards, index, GROUPS, normalize_std=False)
  unweighted = lambda p, mu, a, mask: losses.reinforce(p, mu, a, mask).loss
  cases = {
    "reinforce": (unweighted, "sequence_mean"),
    "cispo": (lambda p, mu, a, mask: losses.cispo(p, mu, a, mask).loss, "token_mean"),
    "a3po": (lambda p, mu, a, mask: losses.a3po(p, mu, a, mask, lag=jnp.where(mask, LAG, 0)).loss, "sequence_mean"),
    "proximal_rloo": (lambda p, mu, a, mask: losses.proximal_rloo(p, mu, a, mask).loss, "sequence_mean"),
  }
  for name, (loss, aggregation) in cases.items():

    def objective(params, loss=loss, aggregation=aggregation):
      per_token = loss(log_probs(policy, params, rows), batch.logprobs, advantages, batch.mask)
      return losses.divide_or_zero(*losses.aggregate(per_token, batch.mask, aggregation))

    expected = ravel_pytree(jax.jit(jax.grad(objective))(params))[0]
    np.testing.assert_allclose(found[name], expected, atol=2e-6, err_msg=name)


def test_exact_opob_against_a_loop_over_sequences(policy, params, judge):
  groups = make_groups(policy, params, 0.3)
  batch = pack(groups)
  weigh = jax.jit(jax.value_and_grad(lambda p, row, m: jnp.sum(jnp.where(m, log_probs(policy, p, row[None])[0], 0.0))))
  scored = [weigh(params, row, mask) for row, mask in zip(unpack(groups), batch.mask, strict=True)]
  scores = np.array([ravel_pytree(gradient)[0] for _, gradient in scored], np.float64)
  weights = np.exp([float(value) for value, _ in scored] - np.asarray(batch.logprobs, np.float64).sum(axis=1))
  rewards, lengths = np.asarray(batch.rewards, np.float64), np.asarray(batch.mask).sum(axis=1)
  expected = np.zeros(scores.shape[1])
  for k in range(GROUPS):
    rows = range(k * SAMPLES, (k + 1) * SAMPLES)
    importance = {i: weights[i] ** 2 * (scores[i] @ scores[i]) for i in rows}
    baseline = sum(importance[i] * rewards[i] for i in rows) / sum(importance.values())
    for i in rows:
      expected -= min(weights[i], 8.0) * (rewards[i] - baseline) / lengths[i] * scores[i] / (GROUPS * SAMPLES)
  found, _ = judge.methods(params, batch, VERSION)
  np.testing.assert_allclose(found[gradients.EXACT_OPOB], expected, atol=2e-6)
  assert not np.allclose(found["baseline opob by length"], expected, atol=1e-4)


def test_on_policy_every_correction_is_its_target(policy, params, judge):
  batch = pack(make_groups(policy, params, 0.0))
  found, shares = judge.methods(params, batch, VERSION - LAG)
  targets, _ = judge.targets(params, batch, VERSION - LAG)
  for name in gradients.CORRECTIONS:
    np.testing.assert_allclose(found[name], targets[gradients.target_of(name)], atol=3e-6, err_msg=name)
    assert shares[name]["kept"] == 1.0, name
  assert judge.statistics(params, batch)["ess/sequence"] == pytest.approx(1.0)


def test_shares_count_tokens_without_gradient(policy, params, judge):
  batch = pack(make_groups(policy, params, 0.5))
  _, shares = judge.methods(params, batch, VERSION)
  ratios = np.asarray(losses.log_ratios(jax.jit(judge._log_probs)(batch, params)[0], batch.logprobs, batch.mask))
  advantages = np.asarray(losses.grpo_advantages(batch.rewards, batch.groups, GROUPS, normalize_std=False))[:, None]
  wanted = np.asarray(batch.mask) & (advantages != 0)
  cut = ((advantages > 0) & (ratios > np.log(1.2))) | ((advantages < 0) & (ratios < np.log(0.8)))
  assert shares["ppo_clip"]["kept"] == pytest.approx(1.0 - cut[wanted].mean())
  assert shares["ppo_clip"]["clipped"] == pytest.approx(cut[wanted].mean())
  assert shares["icepop"]["kept"] == pytest.approx(((ratios > np.log(0.5)) & (ratios < np.log(5.0)))[wanted].mean())
  assert 0.0 < shares["ppo_clip"]["kept"] < 1.0


def test_comparison_takes_the_noise_out():
  rng = np.random.default_rng(0)
  size = 4000
  truth, other = np.zeros((2, size))
  truth[0], other[:2] = 1.0, 2.0 * np.array([0.6, 0.8])  # cosine 0.6, twice as long
  noisy = lambda mean, count, variance: (mean + rng.normal(size=(count, size)) * np.sqrt(variance / size)).astype("f4")
  target = gradients.Mean(noisy(truth, 400, 4.0))
  assert target.square == pytest.approx(1.0, rel=0.1)
  assert target.relative_variance == pytest.approx(4.0, rel=0.1)
  found = gradients.compare(noisy(other, 200, 12.0), target)  # relative variance 12 / 4
  assert found["direction"] == pytest.approx(0.6, abs=5 * found["direction_error"])
  assert 0.0 < found["direction_error"] < 0.03
  assert found["variance"] == pytest.approx(3.0, rel=0.1)
  assert found["norm"] == pytest.approx(2.0, rel=0.1)
  assert found["cosine"] == pytest.approx(0.6 / np.sqrt(1.0 + 3.0), abs=0.02)


def test_comparison_of_nothing_is_not_a_number():
  found = gradients.compare(np.zeros((3, 5), np.float32), gradients.Mean(np.ones((4, 5), np.float32)))
  assert np.isnan([found[name] for name in ("cosine", "direction", "variance", "norm")]).all()
  with pytest.raises(ValueError, match="2 vectors or more, got 1"):
    gradients.Mean(np.ones((1, 5)))


#: Of the corrections that the command judges in its test: of every target, some with more needs than others.
JUDGED = ("reinforce", "sequence_tis", "m2po", "a3po", "cispo", "topr", "proximal_rloo")


@pytest.mark.usefixtures("two_devices")
def test_command(tmp_path, capsys, monkeypatch):
  """On batches of four sequences: each gradient of each sequence costs as much as a step of the smoke run."""
  few = {name: gradients.CORRECTIONS[name] for name in JUDGED}
  assert {gradients.target_of(name) for name in few} == set(gradients.TARGETS)
  monkeypatch.setattr(gradients, "CORRECTIONS", few)
  monkeypatch.setattr(gradients, "NAMES", (*few, *gradients.BASELINES, gradients.EXACT_OPOB))
  monkeypatch.setattr(quickstart, "SMOKE", quickstart.SMOKE | dict(groups=2, samples=2, slots=4, rows=2))
  result = corrections.main(["--smoke", "--lags", "0", "2", "--out", str(tmp_path)])
  assert list(result["lags"]) == ["0", "2"]
  assert list(result["lags"]["2"]["methods"]) == list(gradients.NAMES)
  saved = json.loads((tmp_path / "corrections.json").read_text())
  assert saved["lags"]["0"]["batches"]["ess/sequence"] == pytest.approx(1.0, abs=1e-3)
  table = (tmp_path / "corrections_table.md").read_text()
  assert all(f"| {name} |" in table for name in gradients.NAMES)
  assert table in capsys.readouterr().out
  assert pathlib.Path(tmp_path / "corrections.png").read_bytes().startswith(b"\x89PNG")
