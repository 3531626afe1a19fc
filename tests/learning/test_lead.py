"""The weights that samplers get, with a lead and without."""

import jax
import numpy as np
import optax
from test_batch import make_groups
from test_learner import make_learner
from test_learner import shape_of
from test_lora import ADAPTED
from test_lora import base

from async_rl import learning
from async_rl import stabilizers


def after_a_step(optimizer, **options):
  learner = make_learner(shape_of(), optimizer=optimizer, **options)
  state = learner.init(jax.random.key(1), base())
  before = jax.device_get(state.params)
  state, _ = learner.step(state, learner.put(learning.pack(make_groups(), learner.shape)))
  return before, state, learner.sampler_params(state)


def test_samplers_lead_by_what_the_step_goes_on_for():
  optimizer = optax.chain(optax.adam(1e-2, b1=0.5), stabilizers.lead_by_momentum(0.5, 2))
  before, state, sent = after_a_step(optimizer)
  expected = jax.tree.map(lambda old, new: new + 0.75 * (new - old), before, jax.device_get(state.params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(sent), expected)
  assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(state.params)))


def test_adapters_lead_and_their_base_does_not():
  _, state, sent = after_a_step(optax.chain(optax.sgd(1.0), stabilizers.lead_by_momentum(0.5, 1)), policy=ADAPTED)
  for name in ADAPTED.lora.targets:
    assert np.abs(sent["adapters"][name]["b"] - state.params["adapters"][name]["b"]).max() > 1e-4
  assert sent["layers"] is state.params["layers"]


def test_without_a_lead_samplers_get_the_parameters():
  _, state, sent = after_a_step(optax.sgd(1.0))
  assert sent is state.params
