"""What every stabilizer promises, whatever it computes: one table, one test per promise.

A new stabilizer is one more row of `contract_rows.ROWS`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from contract_rows import ROWS
from contract_rows import STEPS
from contract_rows import assert_close
from contract_rows import assert_finite
from contract_rows import at
from contract_rows import make_extra
from contract_rows import make_gradients
from contract_rows import make_params
from contract_rows import plain
from contract_rows import plain_matrix_only
from contract_rows import run
from contract_rows import run_in_a_loop
from contract_rows import scale_by_tracked_ess
from contract_rows import signature

from async_rl import stabilizers


@pytest.fixture(params=ROWS)
def name(request):
  return request.param


@pytest.fixture
def row(name):
  return ROWS[name]


def test_the_gradients_visit_every_regime():
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
