"""KL terms, preference losses, actor-critic pieces and ESS statistics."""

import functools

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from async_rl import losses
from async_rl.types import NO_GROUP


def close(got, expected, **tolerance):
  np.testing.assert_allclose(got, expected, **{"rtol": 2e-5, "atol": 2e-6, **tolerance})


# KL

K_OF = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


@pytest.mark.parametrize("estimator", K_OF)
def test_kl_estimate(estimator):
  rng = np.random.default_rng(0)
  lp, ref = rng.normal(-2, 1, (2, 5, 7)).astype(np.float32)
  mask = rng.random((5, 7)) < 0.6
  got = losses.kl_estimate(lp, ref, mask, estimator=estimator)
  close(got, np.where(mask, K_OF[estimator](lp.astype(np.float64) - ref), 0), atol=1e-5)


def test_k3_of_nearly_equal_policies_is_neither_negative_nor_rounded_away():
  lp = np.random.default_rng(0).normal(0, 1e-3, (50, 40)).astype(np.float32)
  got = jax.jit(losses.kl_estimate)(lp, np.zeros_like(lp), np.ones(lp.shape, bool))
  assert np.min(got) >= 0
  exact = lp.astype(np.float64)
  np.testing.assert_allclose(got, np.expm1(-exact) + exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("estimator", K_OF)
@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_loss_has_the_gradient_of_the_expectation(estimator, on_policy):
  """E_μ[∇ kl_loss] = ∇ E_π[k], by enumeration of the outcomes of one token."""
  theta, reference_logits = jnp.array([0.3, -0.2, 1.0, 0.1]), jnp.array([0.9, 0.4, -0.7, 0.0])
  ref = jax.nn.log_softmax(reference_logits)
  mu = jax.nn.log_softmax(theta if on_policy else jnp.array([-0.5, 0.4, 0.2, 0.6]))
  mask = jnp.ones((4, 1), bool)

  def sampled(x):
    lp = jax.nn.log_softmax(x)[:, None]
    return jnp.sum(jnp.exp(mu)[:, None] * losses.kl_loss(lp, ref[:, None], mu[:, None], mask, estimator=estimator))

  def exact(x, step):
    p = np.exp(np.asarray(x, np.float64) + step)
    p /= p.sum()
    return (p * K_OF[estimator](np.log(p) - np.asarray(ref, np.float64))).sum()

  wanted = [(exact(theta, e) - exact(theta, -e)) / 2e-6 for e in 1e-6 * np.eye(4)]
  close(jax.grad(sampled)(theta), wanted, atol=1e-5)
  close(sampled(theta), exact(theta, 0.0), atol=1e-6)  # the value too is unbiased


def test_kl_loss_cap_and_extremes():
  mask = jnp.ones((1, 1), bool)
  lp, ref, mu = jnp.array([[-1.0]]), jnp.array([[-2.0]]), jnp.array([[-4.0]])
  free = losses.kl_loss(lp, ref, mu, mask, estimator="k1")
  close(free, [[np.exp(3.0)]])  # ρ = e³, k1 = 1
  close(losses.kl_loss(lp, ref, mu, mask, estimator="k1", cap=2.0), [[2.0]])
  for estimator in K_OF:
    for distance in (1e4, -1e4):
      total = lambda x, e=estimator, d=distance: losses.kl_loss(
        x, x * 0 - 1.0 - d, x * 0 - 1.0, mask, estimator=e
      ).sum()
      value, grad = jax.value_and_grad(total)(lp)
      assert np.isfinite(value)
      assert np.isfinite(grad).all()
  # Where k3 is clamped its path-wise gradient is 0, not of the wrong sign.
  assert jax.grad(lambda x: losses.kl_estimate(x, x * 0, mask).sum())(jnp.array([[-30.0]])) == 0
  with pytest.raises(ValueError, match="estimator='k4'"):
    losses.kl_estimate(lp, ref, mask, estimator="k4")


# Preferences


def test_preference_pairs():
  rewards = jnp.array([1.0, 0.0, 2.0, 2.0, -1.0, 0.5, 9.0])
  groups = jnp.array([0, 0, 0, 0, 1, 1, NO_GROUP])
  pairs = losses.preference_pairs(rewards, groups, 4)  # group 2 and 3 are empty, the last row is padding
  np.testing.assert_array_equal(pairs.best[:2], [2, 5])
  np.testing.assert_array_equal(pairs.worst[:2], [1, 4])
  np.testing.assert_array_equal(pairs.valid, [True, True, False, False])
  np.testing.assert_array_equal(losses.best_rows(rewards, groups, 4), [False, False, True, False, False, True, False])
  single = losses.preference_pairs(rewards[:1], groups[:1], 1)
  assert not single.valid.any()


def test_dpo_and_ipo():
  best, worst, ref_best, ref_worst = (jnp.array(x) for x in ([-3.0, -1.0], [-5.0, -1.0], [-4.0, -2.0], [-4.0, -5.0]))
  margin = np.array([2.0, -3.0])  # (−3+5) − (−4+4), (−1+1) − (−2+5)
  close(losses.dpo_loss(best, worst, ref_best, ref_worst), np.log1p(np.exp(-0.1 * margin)))
  close(losses.dpo_loss(best, worst, ref_best, ref_worst, beta=1.0), np.log1p(np.exp(-margin)))
  close(losses.ipo_loss(best, worst, ref_best, ref_worst), (margin - 5.0) ** 2)
  close(losses.ipo_loss(best, worst, ref_best, ref_worst, beta=0.5), (margin - 1.0) ** 2)
  # d(−log σ(βm))/dm = −β σ(−βm): up for the best, down for the worst; none for the reference.
  grads = jax.grad(lambda *x: losses.dpo_loss(*x).sum(), argnums=(0, 1, 2, 3))(best, worst, ref_best, ref_worst)
  slope = 0.1 / (1 + np.exp(0.1 * margin))
  close(grads[0], -slope)
  close(grads[1], slope)
  assert not np.any(grads[2])
  assert not np.any(grads[3])
  grads = jax.grad(lambda x: losses.ipo_loss(x, worst, ref_best, ref_worst).sum())(best)
  close(grads, 2 * (margin - 5))
  far = losses.dpo_loss(jnp.array([-1e4]), jnp.array([0.0]), jnp.zeros(1), jnp.zeros(1))
  close(far, [1e3])


@pytest.mark.parametrize("loss", [losses.dpo_loss, losses.ipo_loss])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_pairs_of_other_numbers_are_refused(loss, place):
  arguments = [jnp.zeros(2)] * 4
  arguments[place] = jnp.zeros((2, 2))
  with pytest.raises(ValueError, match="must have the shape"):
    loss(*arguments)


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_preference_advantages(loss):
  """Closed forms in float64: −N/pairs · ∂loss/∂s at best and worst, 0 elsewhere."""
  rng = np.random.default_rng(0)
  logprobs, ref = rng.normal(size=(2, 7, 3))
  mask = rng.random((7, 3)) < 0.8
  mask[6] = False  # a sequence without tokens is not counted
  rewards, groups = np.array([0.0, 2.0, 1.0, 5.0, 5.0, 3.0, 4.0]), np.array([0, 0, 0, 1, 1, 2, 2])
  margin = lambda best, worst: ((logprobs - ref) * mask)[[best, worst]].sum(1) @ [1, -1]
  beta, expected = 0.3, np.zeros(7)
  for best, worst in ((1, 0), (6, 5)):  # group 1 has no preference
    slope = {"dpo": -beta / (1 + np.exp(beta * margin(best, worst))), "ipo": 2 * (margin(best, worst) - 0.5 / beta)}
    expected[[best, worst]] = -6 / 2 * slope[loss] * np.array([1, -1])
  found = losses.preference_advantages(
    rewards, groups, 3, logprobs=logprobs, reference=ref, mask=mask, loss=getattr(losses, f"{loss}_loss"), beta=beta
  )
  close(found, expected)


def test_best_of_n():
  rng = np.random.default_rng(0)
  lp, mask = -rng.random((4, 3)).astype(np.float32), rng.random((4, 3)) < 0.8
  best = losses.best_rows(jnp.array([0.0, 1.0, 3.0, 2.0]), jnp.array([0, 0, 1, 1]), 2)
  out = losses.best_of_n(lp, best, mask)
  total = losses.divide_or_zero(*losses.aggregate(out.loss, out.keep, "constant", max_length=1))
  close(total, -(lp[1][mask[1]].sum() + lp[2][mask[2]].sum()) / 2)
  grad = jax.grad(lambda x: losses.best_of_n(x, best, mask).loss.sum())(jnp.asarray(lp))
  np.testing.assert_array_equal(grad, -np.where(np.asarray(best)[:, None] & mask, 1.0, 0.0))
  assert not out.clipped.any()


# Actor and critic


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0)])
def test_gae(discount, trace):
  rng = np.random.default_rng(0)
  rewards, values = rng.normal(size=(2, 5, 6)).astype(np.float32)
  mask = rng.random((5, 6)) < 0.7
  mask[0], mask[1], mask[2] = False, True, np.arange(6) == 3
  got = losses.gae(rewards, values, mask, discount=discount, trace=trace)
  expected = reference.gae(rewards.astype(np.float64), values.astype(np.float64), mask, discount, trace)
  close(got[0], expected[0])
  close(got[1], expected[1])
  nan = np.where(mask, values, np.nan)
  close(losses.gae(np.where(mask, rewards, np.nan), nan, mask, discount=discount, trace=trace)[0], expected[0])


def test_gae_worked_example_and_defaults():
  # γ = 1, λ = 0.95, r = (0, 1), V = (0.4, 0.6): δ = (0.2, 0.4), A = (0.2 + 0.38, 0.4), returns A + V.
  advantages, returns = losses.gae(jnp.array([[0.0, 1.0]]), jnp.array([[0.4, 0.6]]), jnp.ones((1, 2), bool))
  close(advantages, [[0.58, 0.4]])
  close(returns, [[0.98, 1.0]])


def test_whiten():
  rng = np.random.default_rng(0)
  values, mask = rng.normal(3, 2, (5, 6)).astype(np.float32), rng.random((5, 6)) < 0.7
  inside = values[mask].astype(np.float64)
  got = losses.whiten(np.where(mask, values, np.nan), mask)
  close(got, np.where(mask, (values - inside.mean()) / inside.std(), 0.0))
  equal = np.full((2, 3), 0.1, np.float32)  # whose deviation is rounding
  assert not losses.whiten(equal, equal > 0).any()
  assert not losses.whiten(equal, equal < 0).any()
  assert not losses.whiten(0 * equal, equal > 0).any()


def test_value_loss():
  values, old, returns = (jnp.array([x]) for x in ([1.0, 1.0, 0.1, 5.0], [0.0, 0.9, 0.0, 0.0], [1.0, 0.0, 1.0, 1e4]))
  mask = jnp.array([[True, True, True, False]])
  # Held at 0.2: ½ max(0, 0.8²); within 0.2 of the old value: ½·1²; ½ max(0.9², 0.9²); masked.
  close(losses.value_loss(values, old, returns, mask), [[0.32, 0.5, 0.405, 0]])
  close(losses.value_loss(values, old, returns, mask, clip=None), [[0, 0.5, 0.405, 0]])
  close(losses.value_loss(values, old, returns, mask, clip=0.5), [[0.125, 0.5, 0.405, 0]])
  grad = lambda **options: jax.grad(lambda v: losses.value_loss(v, old, returns, mask, **options).sum())(values)
  close(grad(clip=None), [[0, 1, -0.9, 0]])
  close(grad()[0, :2], [0, 1])  # the clipped branch is constant
  nan = losses.value_loss(values.at[0, 3].set(jnp.nan), old, returns.at[0, 3].set(jnp.nan), mask)
  assert np.isfinite(nan).all()


def test_ppo_from_its_pieces():
  """Rewards, GAE and the token clip fit together: one token, A = R − 0.05·d − V."""
  mask = jnp.ones((1, 1), bool)
  behavior, ref, values = jnp.array([[-1.0]]), jnp.array([[-3.0]]), jnp.array([[0.3]])
  rewards = losses.token_rewards(jnp.array([1.0]), behavior, ref, mask)
  advantages, _ = losses.gae(rewards, values, mask)
  close(losses.ppo_clip(behavior, behavior, advantages, mask).loss, [[-(1.0 - 0.1 - 0.3)]])


# Effective sample size


def slow_ess(log_weights):
  w = np.exp(np.asarray(log_weights, np.float64))
  return w.sum() ** 2 / (w**2).sum() / len(w)


def test_ess_ratio():
  rng = np.random.default_rng(0)
  log_weights, mask = rng.normal(0, 2, 20).astype(np.float32), rng.random(20) < 0.7
  close(losses.ess_ratio(log_weights, mask), slow_ess(log_weights[mask]))
  close(losses.ess_ratio(log_weights, mask, cap=1.5), slow_ess(np.minimum(log_weights[mask], np.log(1.5))))
  every = jnp.ones(4, bool)
  close(losses.ess_ratio(jnp.array([1e4, 1e4, -1e4, -1e4]), every), 0.5)
  close(losses.ess_ratio(jnp.array([1e4, 0.0, -1e4, 5.0]), every), 0.25)  # one weight is everything: 1/n
  close(losses.ess_ratio(jnp.full(4, -1e4), every), 1.0)
  assert float(losses.ess_ratio(jnp.zeros(4), ~every)) == 0
  assert float(losses.ess_ratio(jnp.array([7.0]), every[:1])) == 1


def test_ess_statistics():
  rng = np.random.default_rng(0)
  mask = rng.random((8, 5)) < 0.8
  mask[7] = False
  ratios = np.where(mask, rng.normal(0, 1, (8, 5)), 0).astype(np.float32)
  lag = np.where(mask, rng.integers(0, 7, (8, 5)), -1)
  got = losses.ess_statistics(ratios, mask, lag=lag, edges=(1, 2, 5), token_cap=1.5, sequence_cap=3.0)
  sums, oldest = ratios.sum(1)[:7], lag.max(1)[:7]
  close(got["ess/sequence"], slow_ess(sums))
  close(got["ess/token"], slow_ess(ratios[mask]))
  close(got["ess_truncated/sequence"], slow_ess(np.minimum(sums, np.log(3.0))))
  close(got["ess_truncated/token"], slow_ess(np.minimum(ratios[mask], np.log(1.5))))
  for name, low, high in (("0", 0, 1), ("1", 1, 2), ("2-4", 2, 5), ("5+", 5, 99)):
    inside = (lag >= low) & (lag < high) & mask
    close(got[f"ess/token/lag_{name}"], slow_ess(ratios[inside]))
    rows = (oldest >= low) & (oldest < high)
    close(got[f"ess/sequence/lag_{name}"], slow_ess(sums[rows]) if rows.any() else 0.0)
  assert len(got) == 12
  assert len(losses.ess_statistics(ratios, mask)) == 4
  default = losses.ess_statistics(ratios, mask)
  assert default["ess_truncated/token"] != got["ess_truncated/token"]
  assert default["ess_truncated/sequence"] != got["ess_truncated/sequence"]
  jitted = jax.jit(functools.partial(losses.ess_statistics, edges=(1,)))(ratios, mask, lag=lag)
  close(jitted["ess/sequence"], got["ess/sequence"])
