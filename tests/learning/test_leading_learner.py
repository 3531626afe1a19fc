"""The weights that samplers get, with a lead and without."""

import dataclasses

import jax
import numpy as np
import optax
from learning_helpers import ADAPTED
from learning_helpers import BIGRAM
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import params_of
from learning_helpers import shape_of

from async_rl import learning
from async_rl import stabilizers


def after_a_step(optimizer, policy=BIGRAM):
  learner = make_learner(shape_of(), optimizer=optimizer, policy=policy)
  state = learner.init(jax.random.key(1), params_of(dataclasses.replace(policy, lora=None)))
  state, _ = learner.step(state, learner.put(learning.pack(make_groups(), learner.shape)))
  return state, learner.sampler_params(state)


def test_samplers_lead_by_what_the_step_goes_on_for():
  adam = optax.adam(1e-2, b1=0.5)
  state, sent = after_a_step(stabilizers.lead_by_momentum(adam, 2))
  expected, inner_state = state.params, state.opt_state.inner_state
  for _ in range(2):
    updates, inner_state = adam.update(optax.tree.zeros_like(expected), inner_state, expected)
    expected = optax.apply_updates(expected, updates)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(sent), jax.device_get(expected)
  )
  assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(jax.tree.leaves(sent), jax.tree.leaves(state.params)))


def test_adapters_lead_and_their_base_does_not():
  state, sent = after_a_step(stabilizers.lead_by_momentum(optax.sgd(1.0, momentum=0.5), 1), policy=ADAPTED)
  for name in ADAPTED.lora.targets:
    assert np.abs(sent["adapters"][name]["b"] - state.params["adapters"][name]["b"]).max() > 1e-4
  assert sent["layers"] is state.params["layers"]


def test_without_a_lead_samplers_get_the_parameters():
  state, sent = after_a_step(optax.sgd(1.0))
  assert sent is state.params
