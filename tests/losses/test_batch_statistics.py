"""Statistics of the whole batch that some policy losses need, against float64 references."""

import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest

from async_rl import losses

B, T = 4, 6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [0.04, 0.2, 1.0, 1e-6])
def test_second_moment_threshold(seed, budget):
  rng = np.random.default_rng(seed)
  ratios, mask = rng.normal(0, 0.6, (B, T)).astype(np.float32), rng.random((B, T)) < 0.7
  expected = reference.second_moment_threshold(ratios.astype(np.float64), mask, budget)
  got = losses.second_moment_threshold(ratios, mask, budget=budget)
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  kept = ratios[mask & (ratios**2 < float(got))]
  assert kept.size == 0 or np.mean(kept**2) <= budget * (1 + 1e-6)


def test_second_moment_threshold_treats_equal_values_alike():
  # Squares 0, .07, .07: two of them have mean .035, all three .047. Equal tokens are rejected together.
  ratios = jnp.sqrt(jnp.array([[0.0, 0.07, 0.07]]))
  assert float(losses.second_moment_threshold(ratios, jnp.ones((1, 3), bool))) == pytest.approx(0.035)
  nothing = losses.second_moment_threshold(ratios, jnp.zeros((1, 3), bool))
  assert np.isinf(nothing)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.9, 0.5, 1.0])
def test_log_ratio_quantile(seed, share):
  rng = np.random.default_rng(seed)
  ratios, mask = rng.normal(0, 0.6, (B, T)).astype(np.float32), rng.random((B, T)) < 0.7
  got = losses.log_ratio_quantile(ratios, mask, share=share)
  np.testing.assert_allclose(got, reference.log_ratio_quantile(ratios.astype(np.float64), mask, share), rtol=1e-6)
  assert float(losses.log_ratio_quantile(ratios, np.zeros_like(mask))) == 0.0
