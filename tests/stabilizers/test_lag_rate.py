"""The step divided by the lag."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers


@pytest.mark.parametrize(
  ("lag", "power", "reference", "wanted"),
  [
    (0.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0),
    (10.0, 1.0, 1.0, 0.1),
    (32.0, 0.5, 2.0, 0.25),
    (1.5, 1.0, 2.0, 1.0),
    (7.0, 0.0, 1.0, 1.0),
  ],
)
def test_the_scale(lag, power, reference, wanted):
  optimizer = optax.chain(optax.adam(0.1), stabilizers.scale_by_lag(power, reference))
  plain = optax.adam(0.1)
  params, gradient = jnp.ones(3), jnp.array([1.0, -2.0, 0.5])
  updates, state = optimizer.update(gradient, optimizer.init(params), params, mean_lag=lag)
  expected, _ = plain.update(gradient, plain.init(params), params)
  np.testing.assert_allclose(updates, wanted * expected, rtol=1e-6)
  np.testing.assert_allclose(optax.tree.get(state, "lag_scale"), wanted, rtol=1e-6)


def test_arguments_are_checked():
  with pytest.raises(ValueError, match="power=-1"):
    stabilizers.scale_by_lag(-1)
  with pytest.raises(ValueError, match="reference=0"):
    stabilizers.scale_by_lag(reference=0)
  optimizer = stabilizers.scale_by_lag()
  with pytest.raises(ValueError, match=r"mean_lag.shape=\(2,\)"):
    optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)), mean_lag=jnp.ones(2))
