"""What must not change a loss or its gradient: padding, the split into micro-batches, the order of sequences.

Packing is undone before the losses see the arrays, and device count and mesh shape are tested with the learner.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import losses
from async_rl.types import NO_GROUP

B, T = 6, 5
AGGREGATIONS = {
  "token_mean": functools.partial(losses.aggregate, method="token_mean"),
  "sequence_mean": functools.partial(losses.aggregate, method="sequence_mean"),
  "constant": functools.partial(losses.aggregate, method="constant", max_length=8),
}
TOKEN_ARRAYS = ("lp", "mu", "mask", "lag", "proximal", "entropy")
#: Options under which sequences of the random batch are kept.
WIDE = {"geometric_mask": dict(low=0.7, high=1.4), "trm": dict(max_bound=0.5, mean_bound=0.2)}


def make_batch():
  rng = np.random.default_rng(0)
  lp = -rng.uniform(0.1, 3.0, (B, T)).astype(np.float32)
  mu = lp - rng.normal(0.0, 0.5, (B, T)).astype(np.float32)
  lengths = np.array([5, 1, 3, 5, 2, 4])
  batch = dict(
    lp=lp,
    mu=mu,
    mask=(np.arange(T) < lengths[:, None]) & (rng.random((B, T)) < 0.9) | (np.arange(T) == 0),
    lag=rng.integers(0, 4, (B, T)),
    proximal=(lp + mu) / 2,
    rewards=rng.integers(0, 3, B).astype(np.float32),
    groups=np.array([0, 1, 0, 1, 1, 0]),
    entropy=rng.uniform(0.0, 0.3, (B, T)).astype(np.float32),
  )
  ratios = losses.log_ratios(batch["lp"], batch["mu"], batch["mask"])
  # Whole-batch quantities are made before any split.
  batch["advantages"] = np.asarray(losses.rloo_advantages(batch["rewards"], batch["groups"], 2))
  return batch, losses.second_moment_threshold(ratios, batch["mask"], budget=0.1)


@jax.jit
def aggregate_all(loss, mask, keep):
  """Numerators and denominators [6] of every aggregation, rejected tokens counted or not."""
  pairs = [aggregate(loss, counted) for aggregate in AGGREGATIONS.values() for counted in (mask, keep)]
  return jnp.stack([n for n, _ in pairs]), jnp.stack([d for _, d in pairs])


_jacobian = jax.jit(jax.jacrev(lambda *arrays: aggregate_all(*arrays)[0]))


def run(loss, batch, threshold):
  """(numerators [6], denominators [6], gradients [6, B, T]) of one (micro-)batch, one per aggregation, not divided."""
  extras = {**batch, "threshold": threshold}
  extras["log_ratio_scale"] = jnp.sqrt(threshold)
  needed = {name: jnp.asarray(extras[name]) for name in losses.needs(loss)}
  mask = jnp.asarray(batch["mask"])

  def objective(lp):
    out = loss(lp, jnp.asarray(batch["mu"]), jnp.asarray(batch["advantages"]), mask, **needed)
    return out.loss, out.keep

  value, pull, keep = jax.vjp(objective, jnp.asarray(batch["lp"]), has_aux=True)
  (grads,) = jax.vmap(pull)(_jacobian(value, mask, keep))
  return *(np.asarray(x, np.float64) for x in aggregate_all(value, mask, keep)), np.asarray(grads)


def pad(batch, rows, columns):
  """Rows and columns that no mask covers, filled with what must never be read."""
  out = dict(batch)
  for name in TOKEN_ARRAYS:
    fill = False if name == "mask" else -1 if name == "lag" else np.nan
    out[name] = np.pad(batch[name], ((0, rows), (0, columns)), constant_values=fill)
  out["advantages"] = np.pad(batch["advantages"], (0, rows), constant_values=7.0)
  return out


def select(batch, rows):
  return {name: batch[name][rows] for name in (*TOKEN_ARRAYS, "advantages")}


def close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", losses.CORRECTIONS)
def test_invariances(name):
  batch, threshold = make_batch()
  loss = functools.partial(losses.CORRECTIONS[name], **WIDE.get(name, {}))
  go = functools.partial(run, loss, threshold=threshold)
  values, denominators, grads = go(batch)
  assert np.isfinite(values).all()
  assert (denominators > 0).all()

  padded_values, padded_denominators, padded_grads = go(pad(batch, 2, 3))
  close((padded_values, padded_denominators), (values, denominators))
  close(padded_grads[:, :B, :T], grads)
  assert not padded_grads[:, B:].any()
  assert not padded_grads[:, :, T:].any()

  order = np.random.default_rng(1).permutation(B)
  other_values, other_denominators, other_grads = go(select(batch, order))
  close((other_values, other_denominators), (values, denominators))
  close(other_grads, grads[:, order])

  # By rows, and as the learner does it: the whole plane with the mask of the others' rows taken away.
  parts = [go(select(batch, rows)) for rows in (slice(0, 2), slice(2, 4), slice(4, 6))]
  close(np.concatenate([g for *_, g in parts], axis=1), grads)
  micro = np.array([0, 1, 1, 1, 0, 2])
  planes = [go({**batch, "mask": batch["mask"] & (micro == m)[:, None]}) for m in range(3)]
  close(sum(g for *_, g in planes), grads)
  for split in (parts, planes):
    close((sum(v for v, *_ in split), sum(d for _, d, _ in split)), (values, denominators))


def test_advantages_follow_their_rows_in_any_order_and_ignore_padding():
  batch, _ = make_batch()
  rng = np.random.default_rng(2)
  extras = dict(
    lengths=batch["mask"].sum(1),
    log_weights=rng.normal(size=B).astype(np.float32),
    squared_norms=rng.uniform(1, 9, B).astype(np.float32),
    squared_logit_norms=rng.uniform(0, 1, B).astype(np.float32),
  )
  order = rng.permutation(B)
  for name, advantages in losses.ADVANTAGES.items():
    needed = {k: extras[k] for k in losses.needs(advantages)}
    whole = advantages(batch["rewards"], batch["groups"], 2, **needed)
    moved = advantages(batch["rewards"][order], batch["groups"][order], 2, **{k: v[order] for k, v in needed.items()})
    np.testing.assert_allclose(moved, np.asarray(whole)[order], rtol=1e-5, atol=1e-6, err_msg=name)
    relabeled = advantages(batch["rewards"], 4 - batch["groups"], 5, **needed)  # empty groups change nothing
    np.testing.assert_allclose(relabeled, whole, rtol=1e-6, err_msg=name)
    row = np.concatenate([batch["rewards"], [99.0]]), np.concatenate([batch["groups"], [NO_GROUP]])
    padded = advantages(*row, 2, **{k: np.append(v, 50.0) for k, v in needed.items()})
    np.testing.assert_allclose(padded[:B], whole, rtol=1e-6, err_msg=name)
    assert padded[B] == 0, name
    with pytest.raises(ValueError, match=r"\*groups\* .* from 0 to 1 and num_groups=1; raise num_groups"):
      advantages(batch["rewards"], batch["groups"], 1, **needed)


def test_no_group_is_that_of_batches():
  assert losses.NO_GROUP == NO_GROUP


# Log-ratios of ±1e4 on a one-token sequence with log π = −1: the stated loss for (ratio, advantage) =
# (huge, +1), (huge, −1), (tiny, +1), (tiny, −1). BIG = e^20 and TINY = e^−20 are the clamp.
BIG, TINY = np.exp(20.0), np.exp(-20.0)
EXTREMES = {
  "reinforce": (1, -1, 1, -1),
  "untruncated_is": (BIG, -BIG, TINY, -TINY),
  "token_tis": (2, -2, TINY, -TINY),
  "sequence_tis": (8, -8, TINY, -TINY),
  "icepop": (0, 0, 0, 0),
  "sequence_mask": (0, 0, 0, 0),
  "geometric_mask": (0, 0, 0, 0),
  "cispo": (5, -5, TINY, -TINY),
  "topr": (1, -1, 1, -TINY),
  "m2po": (0, 0, 0, 0),
  "m2po_signed": (0, -BIG, TINY, 0),
  "dppo": (0, -20, TINY, 0),
  "dppo_kl": (0, -20, TINY, 0),
  "estr": (0, 0, 0, 0),
  "trm": (0, 0, 0, 0),
  "log_squared": (1e5, 1e5 - 20, 1e5, 1e5),
  "sapo": (-4, 4 / 1.05, -4 / (1 + np.e), 4 / 1.05 / (1 + np.exp(1.05))),
  "vespo": (TINY, -TINY, TINY, -TINY),
  "sat": (-1, BIG, -TINY, 1),  # a clip that is contracted to nothing
  "ppo_clip": (-1.2, BIG, -TINY, 0.8),
  "dapo": (-1.28, BIG, -TINY, 0.8),
  "opsm": (-1.2, BIG, -TINY, 0),
  "gspo": (-1.0004, BIG, -TINY, 0.9997),
  "gspo_token": (-1.0004, BIG, -TINY, 0.9997),
  "proximal_rloo": (-1.2, BIG, -TINY, 0.8),
  "decoupled_behavior": (-1.2, BIG, -TINY, 0.8),
  # π_prox in the middle: weight and r are e^±5000 each, multiplied in log space and clamped once.
  "decoupled_recompute": (-BIG, BIG, -TINY, TINY),
  "a3po": (-BIG, BIG, -TINY, TINY),
  # α = 1/2 in probability: π_prox = max(π, μ)/2, so r is 2 where the ratio is huge, and the weight is huge or 1/2.
  "decoupled_linear": (-BIG, BIG, -TINY, 0.4),
}


@pytest.mark.parametrize("name", losses.CORRECTIONS)
def test_extreme_log_ratios(name):
  loss = losses.CORRECTIONS[name]
  for i, (ratio, advantage) in enumerate([(1e4, 1.0), (1e4, -1.0), (-1e4, 1.0), (-1e4, -1.0)]):
    lp, mu = np.array([[-1.0]], np.float32), np.array([[-1.0 - ratio]], np.float32)
    batch = dict(
      lp=lp,
      mu=mu,
      mask=np.ones((1, 1), bool),
      lag=np.array([[2]]),
      proximal=(lp + mu) / 2,
      entropy=np.ones((1, 1), np.float32),
      advantages=np.array([advantage]),
    )
    values, _, grads = run(loss, pad(batch, 7, 7), 0.04)
    assert np.isfinite(grads).all()
    # Near 1e4 float32 resolves log-probabilities to 0.001.
    np.testing.assert_allclose(values, EXTREMES[name][i], rtol=1e-3, atol=1e-12, err_msg=f"{ratio} {advantage}")
    # A long row of them: still finite.
    long = {k: np.repeat(v, 8, axis=1) if v.ndim == 2 else v for k, v in batch.items()}
    values, _, grads = run(loss, pad(long, 7, 0), 0.04)
    assert np.isfinite(values).all()
    assert np.isfinite(grads).all()


def test_estr_takes_an_entropy_that_is_rounded_below_zero_for_zero():
  same, mask = np.full((1, 2), -0.25, np.float32), np.ones((1, 2), bool)
  out = losses.estr(same, same, np.ones(1), mask, entropy=np.array([[0.0, -0.02]], np.float32))
  np.testing.assert_array_equal(out.keep, mask)


@pytest.mark.parametrize("name", losses.CORRECTIONS)
def test_what_advantages_of_tokens_hold_outside_the_mask_is_never_read(name):
  batch, _ = make_batch()
  advantages = np.broadcast_to(batch["advantages"][:, None], batch["mask"].shape)
  expected = run(losses.CORRECTIONS[name], {**batch, "advantages": advantages}, jnp.inf)
  for other in (np.nan, -np.inf):
    given = {**batch, "advantages": np.where(batch["mask"], advantages, other)}
    for found, wanted in zip(run(losses.CORRECTIONS[name], given, jnp.inf), expected, strict=True):
      np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", losses.CORRECTIONS)
def test_all_masked_rows_give_exactly_zero(name):
  batch, _ = make_batch()
  batch = pad({**batch, "mask": np.zeros((B, T), bool)}, 2, 3)
  values, denominators, grads = run(losses.CORRECTIONS[name], batch, jnp.inf)
  assert not values.any()
  assert not denominators.any()
  assert not grads.any()
