"""Adam's options in the configs: the learning rate over the steps, the momentum, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import runtime
from async_rl.learning._learning_rate import scheduled_rates
from experiments.configs import countdown
from experiments.configs import gsm8k
from experiments.configs import keywords
from experiments.configs import quickstart
from experiments.configs import summaries
from experiments.configs._adam import Adam


def _updates(optimizer, gradients):
  params, updates = jnp.ones(1), []
  state = optimizer.init(params)
  step = jax.jit(optimizer.update)
  for gradient in gradients:
    update, state = step(jnp.array([gradient]), state, params)
    updates.append(float(update[0]))
  return np.array(updates)


def _reference(gradients, rates, b1, b2=0.999, eps=1e-8):
  m = v = 0.0
  for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
    m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
    yield -rate * m / (1 - b1**t) / ((v / (1 - b2**t)) ** 0.5 + eps)


@pytest.mark.parametrize("b1", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("decay_steps", [None, 10, 12])
def test_the_rate_rises_and_falls_in_equal_parts(b1, decay_steps):
  gradients = np.random.default_rng(0).normal(size=10)
  adam = Adam(learning_rate=0.3, b1=b1, decay_steps=decay_steps)
  rise = [0.3 * step / 4 for step in range(4)]
  rest = [0.3 * (1.0 if decay_steps is None else 1 - (step - 4) / (decay_steps - 4)) for step in range(4, 10)]
  got = _updates(adam.adamw(4, 10, weight_decay=0.0), gradients)
  np.testing.assert_allclose(got, list(_reference(gradients, rise + rest, b1)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("config", [countdown, gsm8k, keywords, quickstart, summaries])
def test_every_config_has_the_options(config):
  options = runtime.override(config.Options(), learning_rate=0.25, b1=0.5, decay_steps=4000)
  assert options.adam == Adam(learning_rate=0.25, b1=0.5, decay_steps=4000)


def test_the_rates_of_a_config_are_logged_and_fall():
  options = runtime.override(quickstart.Options(), learning_rate=0.5, decay_steps=40, steps=40, warm_accuracy=0.0)
  optimizer = quickstart.build(options).optimizer
  params = jnp.ones(1)

  @jax.jit
  def step(state):
    return optimizer.update(params, state, params, log_weights=jnp.zeros(4))[1]

  state, rates = optimizer.init(params), []
  for _ in range(40):
    rates += scheduled_rates(optimizer, state)
    state = step(state)
  assert len(rates) == 40
  np.testing.assert_allclose([rates[i] for i in (0, 10, 20, 30, 39)], [0, 0.25, 0.5, 0.25, 0.025], rtol=1e-5)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    (dict(learning_rate=0.0), "must be a number above 0, got learning_rate=0.0"),
    (dict(learning_rate=1.0, b1=1.0), "got b1=1.0"),
    (dict(learning_rate=1.0, b1=-0.1), "got b1=-0.1"),
    (dict(learning_rate=1.0, decay_steps=0), "got decay_steps=0; leave it out for a rate that stays"),
    (dict(learning_rate=1.0, decay_steps=2.5), "got decay_steps=2.5"),
  ],
)
def test_values_are_checked(options, said):
  with pytest.raises(ValueError, match=said):
    Adam(**options)


@pytest.mark.parametrize(("decay_steps", "steps"), [(39, 40), (20, 10)])
def test_a_rate_that_falls_to_0_before_the_end_is_refused(decay_steps, steps):
  options = runtime.override(quickstart.Options(), decay_steps=decay_steps, steps=steps)
  with pytest.raises(ValueError, match=f"at least steps={steps} and above the 20 .* got decay_steps={decay_steps}"):
    quickstart.build(options)
