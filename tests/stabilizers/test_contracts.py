"""What every stabilizer promises, whatever it computes: one table, one test per promise.

A new stabilizer is one more row of `ROWS`.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from async_rl import stabilizers


class Row(NamedTuple):
  """A stabilizer with settings.

  Attributes:
    factory: makes the transformation.
    arguments: what it is called with; the numbers among them must be injectable.
    required: extra arguments without which its update must fail.
  """

  factory: Callable[..., optax.GradientTransformationExtraArgs]
  arguments: dict[str, Any] = {}  # noqa: RUF012
  required: tuple[str, ...] = ()

  def make(self):
    return self.factory(**self.arguments)


def scale_by_tracked_ess():
  """`scale_by_ess` relative to the measured ratio of on-policy batches."""
  inject = optax.inject_hyperparams(stabilizers.scale_by_ess, hyperparam_dtype=jnp.float32)
  return inject(on_policy_ratio=stabilizers.track_on_policy_ratio(0.9))


ROWS = {
  "scale_by_ess": Row(stabilizers.scale_by_ess, {"power": 0.5, "on_policy_ratio": 1.0}, ("log_weights",)),
  "scale_by_ess-tracking": Row(scale_by_tracked_ess, {}, ("log_weights", "on_policy")),
  "scale_by_lag": Row(stabilizers.scale_by_lag, {"power": 1.0, "reference": 2.0}, ("mean_lag",)),
  "control_alignment": Row(stabilizers.control_alignment, {"inner": optax.adam(1e-2), "low": 0.2, "high": 0.8}),
  "control_alignment-variant": Row(
    stabilizers.control_alignment,
    {
      "inner": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
      "low": 0.2,
      "high": 0.8,
      "kappa": "match",
      "previous": "projected",
      "max_consecutive_skips": 1,
      "refresh_on_skip": False,
      "storage_dtype": "bfloat16",
    },
  ),
  "lead_by_momentum": Row(
    stabilizers.lead_by_momentum, {"inner": optax.apply_if_finite(optax.adam(1e-2), 9), "lag": 3}
  ),
  "track_norm": Row(stabilizers.track_norm, {"decay": 0.9, "threshold": 2.0}),
  "track_cosine": Row(stabilizers.track_cosine),
  "track_cosine-bfloat16": Row(stabilizers.track_cosine, {"storage_dtype": "bfloat16"}),
}
STEPS = 6


@pytest.fixture(params=ROWS)
def name(request):
  return request.param


@pytest.fixture
def row(name):
  return ROWS[name]


def make_params(dtype=jnp.float32):
  return {"w": jnp.linspace(-1.0, 1.0, 64, dtype=dtype).reshape(16, 4), "b": jnp.ones(8, dtype)}


def make_gradients(dtype=jnp.float32):
  """Gradients stacked over steps; their alignment visits every regime of `control_alignment`."""
  rng = np.random.default_rng(0)
  draw = lambda: {"w": rng.normal(size=(16, 4)), "b": rng.normal(size=8)}
  steps = [draw()]
  for share in (0.0, 0.5, 5.0, 0.0, 0.7):
    steps.append(jax.tree.map(lambda new, old, share=share: new + share * old, draw(), steps[-1]))
  return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves), dtype), *steps)


def make_extra():
  """Extra arguments stacked over steps, one of them unknown to every stabilizer."""
  log_weights = jnp.asarray(np.random.default_rng(1).normal(size=(STEPS, 8)), jnp.float32)
  return {
    "log_weights": log_weights,
    "on_policy": jnp.arange(STEPS) % 2 == 0,
    "mean_lag": 1.0 + jnp.arange(STEPS),
    "unknown": jnp.zeros(STEPS),
  }


def at(tree, step):
  return jax.tree.map(lambda x: x[step], tree)


def run(transformation, params, gradients, extra, state=None):
  """The updates of every step, stacked, and the last state; compiled as one scan."""

  @jax.jit
  def scan(state, params, gradients, extra):
    def step(state, inputs):
      gradient, extra = inputs
      updates, state = transformation.update(gradient, state, params, **extra)
      return state, updates

    return jax.lax.scan(step, state, (gradients, extra))[::-1]

  return scan(transformation.init(params) if state is None else state, params, gradients, extra)


def run_in_a_loop(transformation, params, gradients, extra, **jit_options):
  """The same, one call per step; also how many programs that took."""
  update = jax.jit(transformation.update, **jit_options)
  state, all_updates = transformation.init(params), []
  for step in range(STEPS):
    updates, state = update(at(gradients, step), state, params, **at(extra, step))
    all_updates.append(updates)
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_updates), state, update._cache_size()


@functools.cache
def plain(name, dtype=jnp.float32):
  """What the row does without anything around it."""
  return run(ROWS[name].make(), make_params(dtype), make_gradients(dtype), make_extra())


@functools.cache
def plain_matrix_only(name):
  return run(ROWS[name].make(), {"w": make_params()["w"]}, {"w": make_gradients()["w"]}, make_extra())


def signature(tree):
  """Structure, shapes, dtypes and weak types."""
  return jax.tree.structure(tree), [(x.shape, x.dtype, x.aval.weak_type) for x in jax.tree.leaves(tree)]


def assert_close(x, y, rtol=1e-5, atol=1e-6):
  assert jax.tree.structure(x) == jax.tree.structure(y)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=rtol, atol=atol), x, y
  )


def assert_finite(tree):
  assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def test_the_gradients_of_this_file_visit_every_regime():
  optimizer = ROWS["control_alignment"].make()

  def step(state, gradient):
    _, state = optimizer.update(gradient, state)
    return state, state.alignment_regime

  regime = stabilizers.AlignmentRegime
  _, regimes = jax.lax.scan(step, optimizer.init(make_params()), make_gradients())
  assert set(regimes.tolist()) == {regime.KEPT, regime.PROJECTED, regime.SKIPPED}


def test_is_optax_s_own_form(row):
  transformation = row.make()
  assert isinstance(transformation, optax.GradientTransformationExtraArgs)
  state = transformation.init(make_params())
  assert isinstance(state, tuple)
  assert hasattr(state, "_fields")
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_required_extra_arguments_have_no_default(row):
  transformation, extra = row.make(), at(make_extra(), 0)
  state = transformation.init(make_params())
  gradient = at(make_gradients(), 0)
  for missing in row.required:
    given = {name: value for name, value in extra.items() if name != missing}
    with pytest.raises(TypeError, match=missing):
      transformation.update(gradient, state, **given)
  given = {name: value for name, value in extra.items() if name in row.required}
  jax.jit(transformation.update)(gradient, state, **given)  # and needs no other, nor params


def test_loop_equals_scan_without_recompilation(row, name):
  transformation = row.make()
  updates, state, programs = run_in_a_loop(transformation, make_params(), make_gradients(), make_extra())
  assert programs == 1
  assert signature(state) == signature(transformation.init(make_params()))
  assert_close(updates, plain(name)[0])
  assert_close(state, plain(name)[1])


def test_state_can_be_donated(row, name):
  updates, state, _ = run_in_a_loop(row.make(), make_params(), make_gradients(), make_extra(), donate_argnums=1)
  assert_close(updates, plain(name)[0])
  assert_close(state, plain(name)[1])


def test_can_be_one_branch_of_cond(row):
  transformation, params, gradient, extra = row.make(), make_params(), at(make_gradients(), 0), at(make_extra(), 0)
  state = transformation.init(params)

  @jax.jit
  def maybe(use):
    update = lambda: transformation.update(gradient, state, params, **extra)
    return jax.lax.cond(use, update, lambda: (gradient, state)), update()

  chosen, updated = maybe(True)
  assert_close(chosen, updated)
  assert_close(maybe(False)[0], (gradient, state))


def test_vmap_equals_one_by_one(row):
  transformation, params, gradients, extra = row.make(), make_params(), make_gradients(), make_extra()

  @jax.jit
  def scaled_run(factor):
    return run(transformation, params, jax.tree.map(lambda g: g * factor, gradients), extra)

  factors = jnp.array([1.0, -0.5, 3.0])
  expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[scaled_run(factor) for factor in factors])
  assert_close(jax.vmap(scaled_run)(factors), expected, atol=1e-5)


def test_bfloat16_parameters(row, name):
  updates, state = plain(name, jnp.bfloat16)
  assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
  assert signature(state) == signature(row.make().init(make_params(jnp.bfloat16)))
  own_scalars = [x for x in state if isinstance(x, jax.Array)]
  assert {x.dtype for x in own_scalars} <= {jnp.dtype(t) for t in (jnp.float32, jnp.int32, bool)}
  # The statistics are those of the rounded gradients, not rounded themselves.
  exact_gradients = jax.tree.map(lambda g: g.astype(jnp.float32), make_gradients(jnp.bfloat16))
  _, exact = run(row.make(), make_params(), exact_gradients, make_extra())
  if row.arguments.get("previous") != "projected":  # the projected gradient itself is rounded to bfloat16
    assert_close(own_scalars, [x for x in exact if isinstance(x, jax.Array)])


def test_float64_parameters(row, name):
  with jax.enable_x64(True):
    updates, state = run(row.make(), make_params(jnp.float64), make_gradients(jnp.float64), make_extra())
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float64)}
    own_scalars = [x for x in state if isinstance(x, jax.Array)]
    assert {x.dtype for x in own_scalars} <= {jnp.dtype(t) for t in (jnp.float32, jnp.int32, bool)}
  assert_close(updates, plain(name)[0])


def test_masked_leaves_the_rest_alone(row, name):
  updates, _ = run(optax.masked(row.make(), {"w": True, "b": False}), make_params(), make_gradients(), make_extra())
  assert_close(updates["w"], plain_matrix_only(name)[0]["w"])
  assert_close(updates["b"], make_gradients()["b"])


def test_partition_with_an_empty_group(row, name):
  groups = {"matrix": row.make(), "vector": optax.sgd(1.0), "nothing": row.make()}
  optimizer = optax.partition(groups, {"w": "matrix", "b": "vector"})
  updates, state = run(optimizer, make_params(), make_gradients(), make_extra())
  assert_close(updates["w"], plain_matrix_only(name)[0]["w"])
  assert_close(updates["b"], -make_gradients()["b"])
  assert signature(state) == signature(optimizer.init(make_params()))
  assert_finite(state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_numbers_can_be_injected(row, name, dtype):
  injected = optax.inject_hyperparams(row.factory, hyperparam_dtype=jnp.float32)(**row.arguments)
  updates, state = run(injected, make_params(dtype), make_gradients(dtype), make_extra())
  numbers = {name for name, value in row.arguments.items() if isinstance(value, float)}
  assert numbers <= set(state.hyperparams)
  assert_close(updates, plain(name, dtype)[0], rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5)


def test_injected_numbers_are_used(row):
  for name, value in row.arguments.items():
    if isinstance(value, float):
      injected = optax.inject_hyperparams(row.factory)(**row.arguments)
      state = injected.init(make_params())
      changed = state._replace(hyperparams=state.hyperparams | {name: jnp.float32(value * 0.9)})
      expected = row.factory(**row.arguments | {name: value * 0.9})
      extra = make_extra()
      updates, state = run(injected, make_params(), make_gradients(), extra, changed)
      expected_updates, expected_state = run(expected, make_params(), make_gradients(), extra)
      assert_close(updates, expected_updates)
      assert_close(state.inner_state, expected_state)


def test_abstract_parameters(row):
  transformation, params = row.make(), make_params()
  abstract = jax.eval_shape(transformation.init, params)
  concrete = transformation.init(params)
  assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
  assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
    (x.shape, x.dtype) for x in jax.tree.leaves(concrete)
  ]
  # Parameter-like parts of the state can be found, which is how shardings are assigned to it.
  marked = optax.tree.map_params(transformation, lambda _: "param", concrete, transform_non_params=lambda _: "other")
  expected = jax.tree.map(lambda x: "param" if x.ndim else "other", concrete)
  assert marked == expected


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_sharded_parameters(row, name, axis_type):
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)
  place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
  params, gradients, extra = make_params(), make_gradients(), make_extra()
  sharded = {"w": place(params["w"], "fsdp", "tensor"), "b": place(params["b"], ("fsdp", "tensor"))}
  transformation = row.make()
  expected_updates, expected_state = plain(name)
  update = jax.jit(transformation.update)
  state = transformation.init(sharded)
  for step in range(STEPS):
    gradient = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), at(gradients, step), sharded)
    extra_args = at(extra, step) | {"log_weights": place(extra["log_weights"][step], "fsdp")}
    updates, state = update(gradient, state, sharded, **extra_args)
    assert_close(updates, at(expected_updates, step))
    # Whatever has the shape of a parameter lies where that parameter lies.
    for path, leaf in jax.tree.leaves_with_path((updates, state)):
      wanted = sharded[path[-1].key].sharding if leaf.ndim else jax.NamedSharding(mesh, jax.P())
      assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), jax.tree_util.keystr(path)
  assert_close(state, expected_state)


def test_finite_after_a_nan_gradient(row):
  transformation, gradients, extra = row.make(), make_gradients(), make_extra()
  gradients["w"] = gradients["w"].at[2, 0, 0].set(jnp.nan)
  extra["log_weights"] = extra["log_weights"].at[2, 0].set(jnp.nan)

  @jax.jit
  def every_step(gradients, extra):
    def step(state, inputs):
      gradient, extra = inputs
      updates, state = transformation.update(gradient, state, **extra)
      return state, (updates, state)

    return jax.lax.scan(step, transformation.init(make_params()), (gradients, extra))[1]

  updates, states = every_step(gradients, extra)
  assert_finite(states)
  assert_finite(jax.tree.map(lambda x: x[3:], updates))


def own_states(state):
  """The states of stabilizers in the state of an optimizer."""
  is_own = lambda x: type(x).__module__.startswith("async_rl.")
  found = [x for x in jax.tree.leaves(state, is_leaf=is_own) if is_own(x)]
  assert found
  return found


@pytest.mark.parametrize("first", [True, False], ids=["before-adam", "after-adam"])
def test_chains_and_is_read_by_name(row, first):
  adam = optax.adam(1e-2)
  optimizer = optax.chain(row.make(), adam) if first else optax.chain(adam, row.make())
  params = make_params()
  update = lambda state: optimizer.update(at(make_gradients(), 0), state, params, **at(make_extra(), 0))[1]
  state = jax.eval_shape(update, optimizer.init(params))
  for own in own_states(state):
    for name in own._fields:
      if isinstance(getattr(own, name), jax.ShapeDtypeStruct):
        assert optax.tree.get(state, name) is getattr(own, name)


def test_field_names_of_all_stabilizers_are_distinct():
  """So that each can be read from a chain of all of them, also with injected numbers."""
  optimizer = optax.chain(
    optax.inject_hyperparams(stabilizers.track_norm)(),
    stabilizers.track_cosine(),
    stabilizers.control_alignment(stabilizers.lead_by_momentum(optax.adam(1e-2), 2)),
    scale_by_tracked_ess(),
    stabilizers.scale_by_lag(),
  )
  state = optimizer.init(make_params())
  states = (
    stabilizers.TrackNormState,
    stabilizers.TrackCosineState,
    stabilizers.ControlAlignmentState,
    stabilizers.LeadByMomentumState,
    stabilizers.ScaleByEssState,
    stabilizers.TrackOnPolicyRatioState,
    stabilizers.ScaleByLagState,
  )
  for fields in states:
    for name in fields._fields:
      if name != "inner_state":  # optax's own name for what a wrapper wraps
        assert optax.tree.get(state, name) is not None


def test_none_leaves_pass_through(row, name):
  """Equinox marks what is not trained by None."""
  nothing = {"static": None}
  updates, _ = run(row.make(), make_params() | nothing, make_gradients() | nothing, make_extra())
  assert_close(updates, plain(name)[0] | nothing)
