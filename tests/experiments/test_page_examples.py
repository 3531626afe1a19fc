"""The examples on the pages of the sweep are what was measured, and their commands say the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import learning
from async_rl import models
from async_rl import stabilizers
from experiments.reproductions import _lag_sweep_knobs as sweep_knobs
from experiments.reproductions import _lag_sweep_losses as sweep_losses
from experiments.reproductions import tables


def _example(page: str, place: int) -> dict:
  """Returns what a block of Python on a page defines."""
  names = {"jnp": jnp, "learning": learning, "optax": optax, "stabilizers": stabilizers}
  text = (tables.PAGES / f"{page}.md").read_text()
  exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[place], names)
  return names


@pytest.mark.parametrize(
  ("page", "place", "loss", "exact"),
  [
    ("which_correction", 0, "topr", False),
    ("which_correction", 1, "sequence_ppo", True),
    ("every_lag", 0, "trm_100", False),
    ("short_lag", 0, "topr", False),
    ("falling_rate", 0, "topr", False),
  ],
)
def test_an_example_on_a_page_is_what_was_measured(page, place, loss, exact):
  objective = _example(page, place)["objective"]
  logprobs, behavior = jnp.log(jnp.array([[0.4, 0.7], [0.2, 0.3]])), jnp.log(jnp.array([[0.5, 0.5], [0.2, 0.4]]))
  advantages, mask = jnp.array([[1.0, 1.0], [-1.0, -1.0]]), jnp.array([[True, True], [True, False]])
  stats = models.TokenStats(logprobs, jnp.ones((2, 2)), jnp.ones((2, 2)))
  lag = jnp.ones((2, 2), jnp.int32)
  batch = learning.BatchQuantities(jnp.ones(2), jnp.arange(2), mask, behavior, lag, stats)

  def mean_loss(logprobs):
    return objective.mean(objective.loss(logprobs, behavior, advantages, mask).loss, mask)

  wanted = sweep_losses.coefficients(list(sweep_losses.LOSSES).index(loss), logprobs, advantages, batch)
  np.testing.assert_allclose(jax.grad(mean_loss)(logprobs), wanted, rtol=1e-6)
  assert objective.needs_exact_norms is exact


@pytest.mark.parametrize(
  ("page", "place", "knobs"),
  [
    ("which_correction", 0, {}),
    ("which_correction", 1, {"b1": 0.97}),
    ("every_lag", 0, {}),
    ("short_lag", 0, {"b1": 0.5}),
    ("short_lag", 1, {"align_low": 0.05, "align_high": 0.8}),
    ("falling_rate", 0, {"b1": 0.5, "rate": 8e-4, "fall": 1.0}),
  ],
)
def test_the_optimizer_of_an_example_is_what_was_measured(page, place, knobs):
  updates = 400
  optimizers = (
    optax.with_extra_args_support(_example(page, place)["optimizer"]),
    sweep_knobs.optimizer(sweep_knobs.Knobs(**({"rate": 2e-4} | knobs)), updates),
  )
  extra = {"log_weights": jnp.zeros(2), "mean_lag": 4.0}
  params, gradients = jnp.zeros(5), jax.random.normal(jax.random.key(0), (updates, 5)) + 0.5

  def steps(optimizer):
    def step(state, gradient):
      update, state = optimizer.update(gradient, state, params, **extra)
      return state, update

    return jax.lax.scan(step, optimizer.init(params), gradients)[1]

  got, wanted = (np.asarray(steps(optimizer)) for optimizer in optimizers)
  start = 0 if "fall" in knobs else 2 * sweep_knobs.WARMUP  # a constant rate has no warm-up in the examples
  assert np.abs(wanted).max() > 1e-4
  np.testing.assert_allclose(got[start:], wanted[start:], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("page", ["which_correction", "every_lag"])
def test_the_command_of_a_page_is_its_example(page):
  """Each `--objective name:...` on a page has the loss and the constants of one of the page's examples in Python."""
  text = (tables.PAGES / f"{page}.md").read_text()
  examples = re.findall(r"learning\.objective\(.*?\)$", text, flags=re.MULTILINE)
  made = [eval(example, {"learning": learning}).loss for example in examples]
  commands = re.findall(r"`--objective (\S+:[^\s`]+)", text)
  assert commands
  for command in commands:
    loss = learning.objective(command).loss
    assert any(x.func is loss.func and x.keywords == loss.keywords for x in made if hasattr(x, "func"))
