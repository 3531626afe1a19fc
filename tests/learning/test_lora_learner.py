"""A learner of adapters: their gradient and nothing else, the base untouched, no buffer of its size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning_helpers import ADAPTED
from learning_helpers import LORA
from learning_helpers import POLICY
from learning_helpers import assert_same
from learning_helpers import base
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import make_mesh
from learning_helpers import run
from learning_helpers import shape_of
from learning_helpers import stabilized

from async_rl import learning
from async_rl import models


def step(learner, params):
  state = learner.init(jax.random.key(1), params)
  before = jax.device_get(state.params)
  state, metrics = learner.step(state, learner.put(learning.pack(make_groups(), learner.shape)))
  return before, jax.device_get(state), {name: float(value) for name, value in metrics.items()}


def test_gradient_is_that_of_the_weights_by_the_chain_rule():
  """y = x (W + s A B), B = 0: the gradient of B is s A^T dW, that of A is 0."""
  before, state, metrics = step(make_learner(shape_of(), optimizer=optax.sgd(1.0), policy=ADAPTED), base())
  whole, after, _ = step(make_learner(shape_of(), optimizer=optax.sgd(1.0)), base())
  squares = 0.0
  for name in LORA.targets:
    kernel = whole["layers"][name]["kernel"] - after.params["layers"][name]["kernel"]
    old, new = (params["adapters"][name] for params in (before, state.params))
    expected = LORA.scale * np.einsum("lir,lio->lro", old["a"], kernel)
    np.testing.assert_allclose(old["b"] - new["b"], expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))
    np.testing.assert_array_equal(old["a"], new["a"])
    squares += np.sum(np.square(expected))
  assert metrics["grad/norm"] == pytest.approx(np.sqrt(squares), rel=1e-4)
  assert metrics["update/norm"] == pytest.approx(metrics["grad/norm"])


def test_the_base_stays_bit_for_bit_and_no_state_is_kept_of_it():
  learner = make_learner(shape_of(), optimizer=stabilized(optax.adamw(1e-2, weight_decay=0.1)), policy=ADAPTED)
  before, state, _ = step(learner, base())
  jax.tree.map(np.testing.assert_array_equal, {"adapters": state.params["adapters"], **base()}, state.params)
  for name in LORA.targets:
    assert np.abs(state.params["adapters"][name]["b"]).max() > 1e-3
  adapters = jax.tree.structure({"adapters": before["adapters"]})
  for field in ("mu", "nu", "alignment_previous"):
    assert jax.tree.structure(optax.tree.get(state.opt_state, field)) == adapters
  size = sum(x.size for x in jax.tree.leaves(before["adapters"]))
  assert sum(x.size for x in jax.tree.leaves(state.opt_state)) < 3 * size + 20


def test_no_buffer_of_the_size_of_the_base_is_needed():
  config = dataclasses.replace(POLICY.config, d_ff=2048, vocab_size=8000)
  wide = dataclasses.replace(POLICY, config=config, remat="full")
  base_bytes = 4 * config.num_params()

  def memory(policy):
    learner = make_learner(shape_of(rows=1), optimizer=optax.adam(1e-3), policy=policy, head_chunk=4)
    batch = learner.put(learning.pack(make_groups(), learner.shape))
    return learner._step.lower(learner.abstract(), batch).compile().memory_analysis()

  full, adapters = memory(wide), memory(dataclasses.replace(wide, lora=models.LoRA(rank=1)))
  assert full.argument_size_in_bytes > 3 * base_bytes  # weights and moments
  assert adapters.argument_size_in_bytes < 1.3 * base_bytes
  assert full.temp_size_in_bytes - adapters.temp_size_in_bytes > 0.9 * base_bytes  # the gradient
  assert adapters.alias_size_in_bytes > base_bytes  # the base is passed on, not copied


@functools.cache
def plain():
  """The learner that several tests share, on one device."""
  return make_learner(shape_of(), policy=ADAPTED)


@functools.cache
def expected():
  return run(plain(), make_groups())


@pytest.mark.parametrize("axes", [dict(data=2, fsdp=2, tensor=2), dict(data=8)])
def test_sharded_equals_one_device(axes):
  params, metrics = run(make_learner(shape_of(8, 32), make_mesh(**axes), policy=ADAPTED), make_groups())
  expected_params, expected_metrics = expected()
  assert_same(params, expected_params)
  for name in expected_metrics.keys() - {"tokens/fill"}:
    assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-5), name


def test_given_adapters_are_kept_and_missing_ones_are_fresh():
  learner = plain()
  fresh, other = (jax.device_get(learner.init(jax.random.key(seed), base()).params) for seed in (1, 2))
  assert np.abs(fresh["adapters"]["q"]["a"] - other["adapters"]["q"]["a"]).max() > 0.1
  moved = fresh | {"adapters": jax.tree.map(lambda x: x + 1, fresh["adapters"])}
  again = jax.device_get(learner.init(jax.random.key(2), moved).params)
  jax.tree.map(np.testing.assert_array_equal, again, moved)
  with pytest.raises(ValueError, match="adapters"):
    make_learner(shape_of()).init(jax.random.key(1), moved)


def test_a_base_in_the_compute_dtype_changes_no_result():
  policy = dataclasses.replace(ADAPTED, dtype="bfloat16")
  params = jax.device_get(make_learner(shape_of(), policy=policy).init(jax.random.key(0), base()).params)
  assert params["layers"]["q"]["kernel"].dtype == params["ends"]["embed"].dtype == jnp.bfloat16
  assert params["layers"]["attention_norm"]["scale"].dtype == params["adapters"]["q"]["a"].dtype == np.float32
  moved = {"adapters": jax.tree.map(lambda x: x + 0.1, params["adapters"])}
  rows = [x[0] for x in learning.pack(make_groups(), shape_of())[:3]]
  score = jax.jit(lambda params: models.score(policy, params, *rows))
  jax.tree.map(np.testing.assert_array_equal, score(params | moved), score(base() | moved))
