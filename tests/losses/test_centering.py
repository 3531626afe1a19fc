"""Score centering against its float64 reference, and its promise: no mean gradient under a constant advantage."""

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from async_rl import losses

B, T, V = 3, 4, 6
#: The weight f of a ratio, and the policy loss that has it.
WEIGHTS = {
  "reinforce": (np.ones_like, {}),
  "token_tis": (lambda ratio: jnp.minimum(ratio, 1.3), {"cap": 1.3}),
  "icepop": (lambda ratio: jnp.where((ratio >= 0.7) & (ratio <= 1.5), ratio, 0.0), {"low": 0.7, "high": 1.5}),
}


def batch(head=V):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, B, T, V))
  log_p, log_q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32))) for x in logits)
  top = np.argsort(-log_q, axis=-1)[..., :head]
  log_p, log_q = (np.take_along_axis(x, top, axis=-1) for x in (log_p, log_q))
  return log_p, log_q, rng.normal(size=B).astype(np.float32), rng.random((B, T)) < 0.8


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("head", [2, 4])
def test_the_coefficients_are_the_references(name, head):
  log_p, log_q, advantages, mask = batch(head)
  weight = WEIGHTS[name][0]
  got = jax.grad(lambda x: losses.score_centering(x, log_q, advantages, mask, weight=weight).sum())(log_p)
  p, q = np.exp(log_p.astype(np.float64)), np.exp(log_q.astype(np.float64))
  wanted = reference.score_centering(p, q, advantages, mask, lambda ratio: float(weight(np.float64(ratio))))
  np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
  assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_mean_gradient_under_the_sampler_is_zero(name):
  weight, options = WEIGHTS[name]
  logits, log_q = jnp.array([0.9, 0.1, -0.4, 0.3, 0.0, -1.0]), jax.nn.log_softmax(jnp.array([0.0, 1, 0.5, 0, 0.2, 0]))
  mask, advantages = jnp.ones((V, 1), bool), jnp.full(V, 1.7)

  def mean_loss(logits, centered):
    log_p = jax.nn.log_softmax(logits)
    out = losses.CORRECTIONS[name](log_p[:, None], log_q[:, None], advantages, mask, **options).loss[:, 0]
    rows = (jnp.broadcast_to(x, (V, 1, V)) for x in (log_p, log_q))
    if centered:
      out += losses.score_centering(*rows, advantages, mask, weight=weight)[:, 0]
    return jnp.sum(jnp.exp(log_q) * out)  # one row for every token that may be drawn

  np.testing.assert_allclose(jax.grad(mean_loss)(logits, True), np.zeros(V), atol=2e-6)
  assert np.abs(jax.grad(mean_loss)(logits, False)).max() > 0.05


def test_a_head_comes_near_to_the_whole_vocabulary_and_nothing_flows_elsewhere():
  rng = np.random.default_rng(1)
  logits = np.sort(rng.normal(0, 3, 50))[::-1]
  log_q = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
  moved = jnp.asarray(logits + rng.normal(0, 0.3, 50), jnp.float32)

  def gradient(head):
    def loss(x, log_q, advantage):
      log_p = jax.nn.log_softmax(x)[None, None, :head]
      return losses.score_centering(log_p, log_q[None, None, :head], advantage[None], jnp.ones((1, 1), bool)).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(moved, log_q, jnp.float32(1.0))

  whole, *rest = gradient(50)
  errors = [float(jnp.linalg.norm(gradient(head)[0] - whole) / jnp.linalg.norm(whole)) for head in (2, 8, 25)]
  assert errors[0] > errors[1] > errors[2]
  assert errors[2] < 0.02
  assert not any(np.any(x) for x in rest)


def test_masked_entries_are_never_read():
  log_p, log_q, advantages, mask = batch()
  clean = losses.score_centering(log_p, log_q, advantages, mask)
  dirty = [np.where(mask[..., None], x, np.nan).astype(np.float32) for x in (log_p, log_q)]
  np.testing.assert_array_equal(losses.score_centering(*dirty, advantages, mask), clean)
  gradient = jax.grad(lambda x: losses.score_centering(x, dirty[1], advantages, mask).sum())(jnp.asarray(dirty[0]))
  assert np.isfinite(gradient).all()
  with pytest.raises(ValueError, match="behavior"):
    losses.score_centering(log_p, log_q[:, :2], advantages, mask)


def test_tokens_that_neither_policy_can_draw_change_nothing():
  """As those that pad a vocabulary, whose logits are -inf."""
  log_p, log_q, advantages, mask = batch()
  wide = [np.pad(x, [(0, 0), (0, 0), (0, 2)], constant_values=-np.inf) for x in (log_p, log_q)]
  both = lambda log_p, log_q: jax.value_and_grad(
    lambda x: losses.score_centering(jax.nn.log_softmax(x), log_q, advantages, mask).sum()
  )(log_p)
  (value, gradient), (wanted, wanted_gradient) = both(*wide), both(log_p, log_q)
  np.testing.assert_allclose(value, wanted, rtol=1e-6)
  np.testing.assert_allclose(gradient[..., :-2], wanted_gradient, atol=1e-6)
  assert not gradient[..., -2:].any()
