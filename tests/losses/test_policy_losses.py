"""Policy losses: value, masks and gradient against float64 references; options; worked examples."""

import functools
import inspect
import math
import pydoc

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from async_rl import losses

B, T = 4, 6


def batch(seed=0, per_token_advantages=False, spread=0.7):
  """Random float64 batch with gaps in the mask, a one-token row, and advantages of both signs."""
  rng = np.random.default_rng(seed)
  lp = -rng.uniform(0.1, 3.0, (B, T))
  mu = lp - rng.normal(0.0, spread, (B, T)) / np.arange(1, B + 1)[:, None]
  mask = rng.random((B, T)) < 0.8
  mask[0], mask[1] = True, np.arange(T) == 2
  advantages = rng.normal(size=(B, T) if per_token_advantages else B)
  advantages[:2] = [[0.8], [-1.1]] if per_token_advantages else [0.8, -1.1]
  lag = rng.integers(0, 5, (B, T))
  # Round to float32 so that both sides see the same numbers.
  lp, mu, advantages = (x.astype(np.float32).astype(np.float64) for x in (lp, mu, advantages))
  proximal = (mu + (lp - mu) * rng.uniform(0, 1, (B, T))).astype(np.float32).astype(np.float64)
  entropy = rng.uniform(0, 0.3, (B, T)).astype(np.float32).astype(np.float64)
  return dict(lp=lp, mu=mu, advantages=advantages, mask=mask), dict(
    lag=lag, proximal=proximal, threshold=0.3, log_ratio_scale=0.25, entropy=entropy
  )


def call(loss, data, extras, **options):
  """The loss on float32 arrays, with what it needs."""
  needed = {name: jnp.asarray(extras[name]) for name in losses.needs(loss)}
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  return loss(f32(data["lp"]), f32(data["mu"]), f32(data["advantages"]), jnp.asarray(data["mask"]), **needed, **options)


def weighted_gradient(loss, data, extras, cotangent, **options):
  total = lambda lp: jnp.sum(call(loss, {**data, "lp": lp}, extras, **options).loss * cotangent)
  return jax.grad(total)(jnp.asarray(data["lp"], jnp.float32))


# Every loss, its reference, and option settings that cover every branch.
REFERENCES = [
  (losses.reinforce, reference.reinforce, {}),
  (losses.cispo, reference.cispo, {}),
  (losses.cispo, reference.cispo, dict(low=0.8, high=1.3)),
  (losses.token_tis, reference.token_tis, {}),
  (losses.token_tis, reference.token_tis, dict(cap=1.1)),
  (losses.sequence_tis, reference.sequence_tis, {}),
  (losses.sequence_tis, reference.sequence_tis, dict(cap=0.9)),
  (losses.sequence_tis, reference.sequence_tis, dict(cap=math.inf)),
  (losses.topr, reference.topr, {}),
  (losses.topr, reference.topr, dict(cap=0.3)),
  (losses.icepop, reference.icepop, {}),
  (losses.icepop, reference.icepop, dict(low=0.8, high=1.2)),
  (losses.sequence_mask, reference.sequence_mask, {}),
  (losses.sequence_mask, reference.sequence_mask, dict(low=0.7, high=1.5)),
  (losses.geometric_mask, reference.geometric_mask, {}),
  (losses.geometric_mask, reference.geometric_mask, dict(low=0.7, high=1.4)),
  (losses.m2po, reference.m2po, {}),
  (losses.m2po, reference.m2po, dict(signed=True)),
  (losses.dppo, reference.dppo, {}),
  (losses.dppo, reference.dppo, dict(bound=0.05)),
  (losses.dppo, reference.dppo, dict(kl=True, bound=0.05)),
  (losses.estr, reference.estr, {}),
  (losses.estr, reference.estr, dict(tau=0.2, eps=0.1)),
  (losses.trm, reference.trm, {}),
  (losses.trm, reference.trm, dict(max_bound=0.1, mean_bound=math.inf)),
  (losses.trm, reference.trm, dict(max_bound=math.inf, mean_bound=0.03)),
  (losses.log_squared, reference.log_squared, {}),
  (losses.log_squared, reference.log_squared, dict(tau=0.3)),
  (losses.sapo, reference.sapo, {}),
  (losses.sapo, reference.sapo, dict(positive=2.0, negative=0.5)),
  (losses.vespo, reference.vespo, {}),
  (losses.vespo, reference.vespo, dict(shape_positive=1.0, rate_positive=0.5, shape_negative=0.5, rate_negative=1.0)),
  (losses.sat, reference.sat, {}),
  (losses.sat, reference.sat, dict(low=0.5, high=0.4, exponent=1.0)),
  (losses.ppo_clip, reference.ppo_clip, {}),
  (losses.ppo_clip, reference.ppo_clip, dict(low=0.1, high=0.28)),
  (losses.ppo_clip, reference.ppo_clip, dict(dual_clip=1.3)),
  (losses.opsm, reference.opsm, {}),
  (losses.opsm, reference.opsm, dict(delta=0.0)),
  (losses.gspo, reference.gspo, {}),
  (losses.gspo, reference.gspo, dict(low=0.3, high=0.4)),
  (losses.gspo, reference.gspo, dict(low=0.3, high=0.4, token=True)),
  (losses.proximal_rloo, reference.proximal_rloo, {}),
  (losses.proximal_rloo, reference.proximal_rloo, dict(low=0.5, high=0.9)),
  (losses.decoupled_ppo, reference.decoupled_ppo, {}),
  (losses.decoupled_ppo, reference.decoupled_ppo, dict(low=0.05, high=0.1, dual_clip=1.1)),
  (losses.decoupled_ppo, reference.decoupled_ppo, dict(weight_cap=1.1, weight_reject=1.4)),
  (losses.decoupled_ppo, reference.decoupled_ppo, dict(weighted=False, weight_reject=1.2)),
  (losses.a3po, reference.a3po, {}),
  (losses.a3po, reference.a3po, dict(linear=True, low=0.1)),
  (losses.a3po, reference.a3po, dict(behavior_at_zero=True, weight_cap=1.2)),
]


def reference_extras(loss, extras):
  return {name: extras[name] for name in losses.needs(loss)}


@pytest.mark.parametrize("per_token_advantages", [False, True])
@pytest.mark.parametrize(("loss", "slow", "options"), REFERENCES)
def test_value_masks_and_gradient(loss, slow, options, per_token_advantages):
  data, extras = batch(per_token_advantages=per_token_advantages)
  out = call(loss, data, extras, **options)
  extra = reference_extras(loss, extras)
  expected, keep, clipped = slow(
    data["lp"], data["lp"], data["mu"], data["advantages"], data["mask"], **extra, **options
  )
  np.testing.assert_allclose(out.loss, expected, rtol=2e-5, atol=1e-6)
  np.testing.assert_array_equal(out.keep, keep)
  np.testing.assert_array_equal(out.clipped, clipped)
  cotangent = np.random.default_rng(1).uniform(0.5, 1.5, (B, T)).astype(np.float32)
  grad = weighted_gradient(loss, data, extras, cotangent, **options)
  slow_grad = reference.gradient(
    slow, data["lp"], data["mu"], data["advantages"], data["mask"], cotangent, **extra, **options
  )
  np.testing.assert_allclose(grad, slow_grad, rtol=2e-4, atol=2e-5)


def test_references_cover_the_registry():
  covered = {slow for _, slow, _ in REFERENCES}
  assert covered == {
    value for name, value in vars(reference).items() if getattr(value, "__name__", "") == "reference"
  } | {reference.a3po}
  bare = {getattr(loss, "func", loss) for loss in losses.CORRECTIONS.values()}
  assert bare == {loss for loss, _, _ in REFERENCES}


# Every option of every loss: a setting that must change loss, keep, clipped or gradient.
OPTIONS = [
  (losses.cispo, {}, dict(low=0.9)),
  (losses.cispo, {}, dict(high=1.1)),
  (losses.token_tis, {}, dict(cap=1.1)),
  (losses.sequence_tis, {}, dict(cap=1.1)),
  (losses.topr, {}, dict(cap=0.2)),
  (losses.icepop, {}, dict(low=0.9)),
  (losses.icepop, {}, dict(high=1.1)),
  (losses.icepop, {}, dict(inner=losses.reinforce)),
  (losses.sequence_mask, {}, dict(low=0.9)),
  (losses.sequence_mask, {}, dict(high=1.1)),
  (losses.sequence_mask, {}, dict(inner=losses.reinforce)),
  (losses.geometric_mask, {}, dict(low=0.98)),
  (losses.geometric_mask, {}, dict(high=1.02)),
  (losses.geometric_mask, {}, dict(inner=losses.sequence_tis)),
  (losses.m2po, {}, dict(inner=losses.reinforce)),
  (losses.m2po, {}, dict(signed=True)),
  (losses.dppo, {}, dict(bound=0.05)),
  (losses.dppo, {}, dict(kl=True)),
  (losses.dppo, {}, dict(inner=losses.reinforce)),
  (losses.estr, {}, dict(tau=0.1)),
  (losses.estr, {}, dict(eps=1.0)),
  (losses.estr, {}, dict(inner=losses.reinforce)),
  (losses.trm, dict(mean_bound=1.0), dict(mean_bound=1.0, max_bound=2.0)),
  (losses.trm, dict(max_bound=2.0), dict(max_bound=2.0, mean_bound=1.0)),
  (losses.trm, dict(max_bound=2.0, mean_bound=1.0), dict(max_bound=2.0, mean_bound=1.0, inner=losses.reinforce)),
  (losses.log_squared, {}, dict(tau=0.1)),
  (losses.log_squared, {}, dict(inner=losses.reinforce)),
  (losses.sapo, {}, dict(positive=1.5)),
  (losses.sapo, {}, dict(negative=1.5)),
  (losses.vespo, {}, dict(shape_positive=1.0)),
  (losses.vespo, {}, dict(rate_positive=1.0)),
  (losses.vespo, {}, dict(shape_negative=1.0)),
  (losses.vespo, {}, dict(rate_negative=1.0)),
  (losses.sat, {}, dict(low=0.4)),
  (losses.sat, {}, dict(high=0.4)),
  (losses.sat, {}, dict(exponent=6.0)),
  (losses.ppo_clip, {}, dict(low=0.05)),
  (losses.ppo_clip, {}, dict(high=0.28)),
  (losses.ppo_clip, {}, dict(dual_clip=1.05)),
  (losses.opsm, {}, dict(delta=2.0)),
  (losses.opsm, {}, dict(inner=losses.reinforce)),
  (losses.gspo, {}, dict(low=0.3)),
  (losses.gspo, {}, dict(high=0.4)),
  (losses.gspo, dict(low=0.9, high=9.0), dict(low=0.9, high=9.0, token=True)),
  (losses.proximal_rloo, {}, dict(low=0.9)),
  (losses.proximal_rloo, {}, dict(high=5.0)),
  (losses.decoupled_ppo, {}, dict(low=0.01)),
  (losses.decoupled_ppo, {}, dict(high=0.01)),
  (losses.decoupled_ppo, {}, dict(dual_clip=1.01)),
  (losses.decoupled_ppo, {}, dict(weighted=False)),
  (losses.decoupled_ppo, {}, dict(weight_cap=0.9)),
  (losses.decoupled_ppo, {}, dict(weight_reject=1.1)),
  (losses.a3po, {}, dict(linear=True)),
  (losses.a3po, {}, dict(behavior_at_zero=True, low=0.01, high=0.01)),
  (losses.a3po, {}, dict(weighted=False)),
]


@pytest.mark.parametrize(("loss", "base", "changed"), OPTIONS)
def test_every_option_changes_the_result(loss, base, changed):
  batches = [batch(seed, per_token_advantages=True, spread=1.2) for seed in range(4)]
  data, extras = jax.tree.map(lambda *x: np.concatenate(x) if np.ndim(x[0]) else x[0], *batches)
  cotangent = jnp.linspace(0.5, 1.5, data["lp"].size).reshape(data["lp"].shape)

  def everything(options):
    out = call(loss, data, extras, **options)
    return np.stack(
      [*(np.asarray(x, np.float32) for x in out), weighted_gradient(loss, data, extras, cotangent, **options)]
    )

  assert np.abs(everything(base) - everything(changed)).max() > 1e-3


def test_m2po_threshold_changes_the_result_and_is_required():
  data, extras = batch()
  few = call(losses.m2po, data, {**extras, "threshold": 0.01}).keep.sum()
  assert few < call(losses.m2po, data, {**extras, "threshold": 0.3}).keep.sum()
  with pytest.raises(TypeError, match="threshold"):
    losses.m2po(*(jnp.asarray(data[k]) for k in ("lp", "mu", "advantages", "mask")))


def test_sat_contracts_nothing_where_nothing_is_stale():
  data, extras = batch()
  same = {**data, "mu": data["lp"]}
  np.testing.assert_array_equal(
    call(losses.sat, same, {**extras, "log_ratio_scale": 0.0}).loss, call(losses.ppo_clip, same, extras).loss
  )


def test_dppo_keeps_tokens_whose_probability_is_rounded_to_one():
  """By KL: from 1 - 3e-3 to 1 is .03 nats in float32, where 1 - p is 1.2e-7 at least; from .98 it is .22."""
  mu, one = jnp.log(jnp.array([[0.997, 0.98]])), jnp.ones((1, 2), bool)
  out = losses.CORRECTIONS["dppo_kl"](jnp.zeros((1, 2)), mu, jnp.ones(1), one)
  np.testing.assert_array_equal(out.keep, [[True, False]])


# Worked examples. One sequence of two tokens, π = (0.6, 0.5), μ = (0.2, 0.25): ρ = (3, 2), w = 6, w^(1/2) = 2.449.
# The loss of a score-function method is −weight · A · log π with log π = (−0.5108, −0.6931).
LOG_PI, LOG_MU = [-0.510826, -0.693147], [-1.609438, -1.386294]
GOLDEN = [
  ("reinforce", 1.0, [0.510826, 0.693147]),  # weight 1
  ("untruncated_is", 1.0, [3.064954, 4.158883]),  # weight 6
  ("token_tis", 1.0, [1.021651, 1.386294]),  # weights min(3, 2), min(2, 2)
  ("sequence_tis", 1.0, [3.064954, 4.158883]),  # min(6, 8) = 6
  ("icepop", 1.0, [1.532477, 1.386294]),  # 3 and 2 lie within [0.5, 5]
  ("sequence_mask", -1.0, [-3.064954, -4.158883]),  # 6 within [1/8, 8]
  ("geometric_mask", 1.0, [0.0, 0.0]),  # 2.449 outside [0.9, 1.1]
  ("cispo", 1.0, [1.532477, 1.386294]),  # 3 and 2 below 5
  ("topr", 1.0, [0.510826, 0.693147]),  # positive: weight 1
  ("topr", -1.0, [-0.510826, -0.693147]),  # negative: min(6, 1)
  ("ppo_clip", 1.0, [-1.2, -1.2]),  # both ratios held at 1.2
  ("ppo_clip", -1.0, [3.0, 2.0]),  # A < 0: the clip at 1.2 does not bind, −min(−3, −1.2) = 3
  ("dapo", 1.0, [-1.28, -1.28]),
  ("opsm", -1.0, [3.0, 2.0]),  # mean(log μ − log π) = −0.896 < 0.1: kept
  ("gspo", 1.0, [-1.0004, -1.0004]),  # s = 2.449 held at 1 + 4e-4
  ("gspo_token", -1.0, [2.449490, 2.449490]),
  ("proximal_rloo", 1.0, [-1.2, -1.2]),
  ("proximal_rloo", -1.0, [6.0, 6.0]),
  ("decoupled_behavior", 1.0, [-1.2, -1.2]),
  # π_prox = (0.4, 0.25): weights (2, 1), r = (1.5, 2) held at 1.2.
  ("decoupled_recompute", 1.0, [-2.4, -1.2]),
  # Lag 2, α = 1/2: π_prox = √(π μ) = (0.3464, 0.3536), weights (√3, √2), r = (√3, √2) held at 1.2.
  ("a3po", 1.0, [-2.078461, -1.697056]),
  # π_prox = (0.4, 0.375): weights (2, 1.5), r = (1.5, 1.333) held at 1.2.
  ("decoupled_linear", 1.0, [-2.4, -1.8]),
  # (log ρ)² = (1.207, 0.480) against the threshold 1.
  ("m2po", 1.0, [0.0, 1.386294]),
  ("m2po_signed", 1.0, [0.0, 1.386294]),
  ("m2po_signed", -1.0, [-1.532477, -1.386294]),  # both move back: weights 3 and 2
  # π − μ = (.4, .25) beyond .2, upwards; KL(μ ‖ π) = (.335, .131) beyond .05.
  ("dppo", 1.0, [0.0, 0.0]),
  ("dppo", -1.0, [-1.532477, -1.386294]),
  ("dppo_kl", 1.0, [0.0, 0.0]),
  ("dppo_kl", -1.0, [-1.532477, -1.386294]),
  # (log ρ)² / (H + .01) = (.921, 1.550): the larger ratio is kept, held at 1.2 upwards.
  ("estr", 1.0, [-1.2, 0.0]),
  ("estr", -1.0, [3.0, 0.0]),
  ("trm", 1.0, [0.0, 0.0]),  # ρ − 1 − log ρ = (.901, .307) beyond .05
  ("log_squared", 1.0, [1.206949e-3, 4.804530e-4]),  # rejected by dppo: .001 (log ρ)² is left
  ("sapo", 1.0, [-3.523188, -2.924234]),  # 4 sigmoid(2), 4 sigmoid(1)
  ("sapo", -1.0, [3.393916, 2.821999]),  # 4 / 1.05 sigmoid(2.1), sigmoid(1.05)
  ("vespo", 1.0, [5.625462e-6, 7.633270e-6]),  # 36 e^-15 = 1.101248e-5
  ("vespo", -1.0, [-5.009356e-3, -6.797267e-3]),  # 216 e^-10 = 9.806385e-3
  # The scale .7 lies between log 2 and log 3: c = .49 / (.49 + 1.206949) = .288754 on the first token, then 1.
  ("sat", 1.0, [-1.057751, -1.2]),
  ("sat", -1.0, [3.0, 2.0]),
]


@pytest.mark.parametrize(("name", "advantage", "expected"), GOLDEN)
def test_worked_example(name, advantage, expected):
  extras = dict(proximal=np.log([[0.4, 0.25]]), lag=np.array([[2, 2]]), threshold=1.0, log_ratio_scale=0.7)
  extras["entropy"] = np.array([[1.3, 0.3]])
  data = dict(
    lp=np.array([LOG_PI]), mu=np.array([LOG_MU]), advantages=np.array([advantage]), mask=np.ones((1, 2), bool)
  )
  np.testing.assert_allclose(call(losses.CORRECTIONS[name], data, extras).loss[0], expected, rtol=1e-5)


def test_worked_examples_cover_the_registry():
  assert {name for name, _, _ in GOLDEN} == set(losses.CORRECTIONS)


def test_untruncated_weights_give_the_on_policy_gradient():
  """E_μ[ρ A ∇log π] = ∇ E_π[A], by enumeration of all outcomes of one token."""
  theta, mu = jnp.array([0.3, -0.2, 1.0, 0.1]), jax.nn.log_softmax(jnp.array([1.0, 0.4, -0.7, 0.0]))
  rewards, mask = jnp.array([1.0, 0.0, 2.0, -1.0]), jnp.ones((4, 1), bool)
  wanted = jax.grad(lambda x: -jnp.sum(jax.nn.softmax(x) * rewards))(theta)

  def expected_loss(x, loss):
    out = loss(jax.nn.log_softmax(x)[:, None], mu[:, None], rewards, mask)
    return jnp.sum(jnp.exp(mu)[:, None] * out.loss)

  for name in ("untruncated_is", "token_tis", "reinforce"):
    got = jax.grad(expected_loss)(theta, losses.CORRECTIONS[name])
    unbiased = bool(jnp.allclose(got, wanted, atol=1e-5))
    assert unbiased == (name == "untruncated_is"), name


def test_decoupled_product_is_the_full_ratio_where_not_clipped():
  data, extras = batch()
  wide = dict(low=1.0, high=1e6)
  for loss in (losses.decoupled_ppo, losses.a3po, functools.partial(losses.a3po, linear=True)):
    a, b = call(loss, data, extras, **wide), call(losses.ppo_clip, data, extras, **wide)
    np.testing.assert_allclose(a.loss, b.loss, rtol=1e-5)


def test_interpolated_proximal_at_lag_one_is_the_behavior_policy():
  data, _ = batch()
  one = np.ones((B, T), int)
  for linear in (False, True):
    got = losses.interpolated_proximal(data["lp"], data["mu"], one, linear=linear)
    np.testing.assert_allclose(got, data["mu"], rtol=1e-5)
    at_zero = losses.interpolated_proximal(data["lp"], data["mu"], 0 * one, linear=linear)
    np.testing.assert_allclose(at_zero, data["lp"], rtol=1e-5)
    flagged = losses.interpolated_proximal(data["lp"], data["mu"], 0 * one, linear=linear, behavior_at_zero=True)
    np.testing.assert_allclose(flagged, data["mu"], rtol=1e-5)


def test_no_gradient_flows_through_anything_but_the_logprobs():
  data, extras = batch()
  arrays = [jnp.asarray(data[k], jnp.float32) for k in ("mu", "advantages")]
  for name, loss in losses.CORRECTIONS.items():
    needed = {k: jnp.asarray(extras[k], jnp.float32) for k in losses.needs(loss)}

    def total(mu, advantages, needed, loss=loss):
      return loss(jnp.asarray(data["lp"], jnp.float32), mu, advantages, jnp.asarray(data["mask"]), **needed).loss.sum()

    grads = jax.grad(total, argnums=(0, 1, 2))(*arrays, needed)
    assert all(not np.any(g) for g in jax.tree.leaves(grads)), name


def test_options_may_be_traced_and_swept():
  data, extras = batch()
  swept = jax.vmap(lambda high: call(losses.ppo_clip, data, extras, high=high, dual_clip=1.0 + high).loss)(
    jnp.array([0.1, 0.5])
  )
  np.testing.assert_allclose(swept[1], call(losses.ppo_clip, data, extras, high=0.5, dual_clip=1.5).loss, rtol=1e-6)
  caps = jax.jit(jax.vmap(lambda cap: call(losses.sequence_tis, data, extras, cap=cap).loss))(jnp.array([0.5, 8.0]))
  np.testing.assert_allclose(caps[1], call(losses.sequence_tis, data, extras).loss, rtol=1e-6)


def test_bfloat16_inputs_give_float32_results():
  data, extras = batch()
  low = {k: jnp.asarray(v, jnp.bfloat16) if k != "mask" else v for k, v in data.items()}
  for name, loss in losses.CORRECTIONS.items():
    needed = {k: jnp.asarray(extras[k]) for k in losses.needs(loss)}
    out = loss(low["lp"], low["mu"], low["advantages"], jnp.asarray(low["mask"]), **needed)
    assert out.loss.dtype == jnp.float32, name


def test_errors_name_the_value():
  ones, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
  with pytest.raises(TypeError, match=r"must be bool.*float32.*astype"):
    losses.reinforce(ones, ones, jnp.ones(2), ones)
  with pytest.raises(ValueError, match=r"behavior.*\(2, 3\).*\(2, 1\)"):
    losses.ppo_clip(ones, ones[:, :1], jnp.ones(2), mask)
  with pytest.raises(ValueError, match=r"advantages.*\(3,\)"):
    losses.reinforce(ones, ones, jnp.ones(3), mask)
  with pytest.raises(ValueError, match=r"low=1\.5"):
    losses.ppo_clip(ones, ones, jnp.ones(2), mask, low=1.5)
  with pytest.raises(ValueError, match=r"high=-0\.1"):
    losses.ppo_clip(ones, ones, jnp.ones(2), mask, high=-0.1)
  with pytest.raises(ValueError, match=r"dual_clip=0\.5"):
    losses.ppo_clip(ones, ones, jnp.ones(2), mask, dual_clip=0.5)
  with pytest.raises(ValueError, match=r"weighted=False.*weight_cap=2\.0"):
    losses.decoupled_ppo(ones, ones, jnp.ones(2), mask, proximal=ones, weighted=False, weight_cap=2.0)
  with pytest.raises(ValueError, match="lag"):
    losses.a3po(ones, ones, jnp.ones(2), mask, lag=jnp.ones(2))


@pytest.mark.parametrize("name", losses.CORRECTIONS)
def test_help_shows_the_shapes_and_no_union(name):
  loss = losses.CORRECTIONS[name]
  text = pydoc.render_doc(getattr(loss, "func", loss), renderer=pydoc.plaintext)
  assert "logprobs: 'ArrayLike'" in text
  assert "Union" not in text
  for argument in inspect.signature(loss).parameters:
    assert f"    {argument}: " in text or f"**{argument}: " in text, argument
  assert "mask: bool [B, T]" in text
