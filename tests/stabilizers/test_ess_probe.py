"""The ESS ratio through the gradient of a probe: exact however the gradient is put together, in others' loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

from async_rl import stabilizers

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(16, 3)).astype(np.float32)
ACTIONS = RNG.integers(0, 4, 16)
ADVANTAGES = RNG.normal(size=16).astype(np.float32)
BATCH = (FEATURES, ACTIONS, ADVANTAGES, np.full(16, -np.log(4), np.float32))
KERNEL = RNG.normal(size=(3, 4)).astype(np.float32)


def make_params(dtype=jnp.float32):
  return {"kernel": jnp.asarray(KERNEL, dtype), "ess_probe": stabilizers.ess_probe()}


def policy_loss(kernel, features, actions, advantages, behavior):
  """Importance-weighted REINFORCE and the log-weights."""
  logprobs = jnp.take_along_axis(jax.nn.log_softmax(features @ kernel), actions[:, None], 1)[:, 0]
  log_weights = logprobs - behavior
  return -jnp.mean(jnp.exp(log_weights) * advantages), log_weights


def probed_loss(params, *batch):
  loss, log_weights = policy_loss(params["kernel"], *batch)
  return stabilizers.attach_ess_probe(loss, params["ess_probe"], log_weights)


def whole_batch_ratio():
  _, log_weights = policy_loss(jnp.asarray(KERNEL), *BATCH)
  return float(stabilizers.ess_ratio(log_weights))


def ratio_of(gradient):
  optimizer = stabilizers.scale_by_ess_probe(optax.sgd(1.0))
  params = make_params()
  _, state = optimizer.update(gradient, optimizer.init(params), params)
  return float(state.ess_ratio)


def split(parts):
  return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), BATCH)


def test_the_loss_and_the_other_gradients_are_untouched():
  loss, gradient = jax.value_and_grad(probed_loss)(make_params(), *BATCH)
  plain_loss, plain = jax.value_and_grad(lambda kernel: policy_loss(kernel, *BATCH)[0])(jnp.asarray(KERNEL))
  assert float(loss) == float(plain_loss)
  np.testing.assert_array_equal(gradient["kernel"], plain)
  _, log_weights = policy_loss(jnp.asarray(KERNEL), *BATCH)
  weights = np.exp(np.asarray(log_weights, np.float64))
  np.testing.assert_allclose(gradient["ess_probe"], [16, weights.sum(), (weights**2).sum()], rtol=1e-5)


def test_the_ratio_is_that_of_the_whole_batch():
  assert 0.05 < whole_batch_ratio() < 0.9
  assert ratio_of(jax.grad(probed_loss)(make_params(), *BATCH)) == pytest.approx(whole_batch_ratio(), rel=1e-5)


@pytest.mark.parametrize("combine", [jnp.mean, jnp.sum])
def test_micro_batches_add_up(combine):
  gradients = jax.vmap(jax.grad(probed_loss), in_axes=(None, *[0] * 4))(make_params(), *split(4))
  combined = jax.tree.map(functools.partial(combine, axis=0), gradients)
  assert ratio_of(combined) == pytest.approx(whole_batch_ratio(), rel=1e-5)


@pytest.mark.parametrize("factor", [2.0**15, 1e-6, -1.0])
def test_loss_scaling_cancels(factor):
  gradient = jax.grad(lambda params: factor * probed_loss(params, *BATCH))(make_params())
  assert ratio_of(gradient) == pytest.approx(whole_batch_ratio(), rel=1e-5)


def test_large_weights_and_loss_scaling_stay_finite():
  log_weights = jnp.array([15.0, 15.0, -15.0, 1000.0])
  loss = lambda probe: 2.0**15 * stabilizers.attach_ess_probe(jnp.float32(1.0), probe, log_weights)
  ratio = ratio_of({"kernel": jnp.zeros((3, 4)), "ess_probe": jax.grad(loss)(stabilizers.ess_probe())})
  clamped = jnp.array([15.0, 15.0, -15.0, 20.0])
  assert ratio == pytest.approx(float(stabilizers.ess_ratio(clamped)), rel=1e-5)


def test_data_parallel_gradients_add_up():
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

  def mean_gradient(params, *batch):
    params = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
    return jax.lax.pmean(jax.grad(probed_loss)(params, *batch), "data")

  spec = jax.P("data")
  sharded = jax.shard_map(mean_gradient, mesh=mesh, in_specs=(jax.P(), *[spec] * 4), out_specs=jax.P())
  assert ratio_of(jax.jit(sharded)(make_params(), *BATCH)) == pytest.approx(whole_batch_ratio(), rel=1e-5)
  # And with a batch that is sharded for the compiler to split.
  batch = jax.device_put(BATCH, jax.NamedSharding(mesh, spec))
  assert ratio_of(jax.jit(jax.grad(probed_loss))(make_params(), *batch)) == pytest.approx(whole_batch_ratio(), rel=1e-5)


def test_masked_rows_do_not_count():
  log_weights, mask = jnp.array([0.0, 0.0, jnp.nan, -100.0]), jnp.array([True, True, False, True])
  loss = lambda probe: stabilizers.attach_ess_probe(jnp.float32(1.0), probe, log_weights, mask)
  np.testing.assert_allclose(jax.grad(loss)(stabilizers.ess_probe()), [3.0, 2.0, 2.0], rtol=1e-6)


CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))


def expected_kernel(steps):
  """The kernel after *steps* of the plain chain with `scale_by_ess` at its end."""
  optimizer = optax.chain(CHAIN, stabilizers.scale_by_ess())
  kernel = jnp.asarray(KERNEL)
  state = optimizer.init(kernel)
  for _ in range(steps):
    gradient, log_weights = jax.grad(policy_loss, has_aux=True)(kernel, *BATCH)
    updates, state = optimizer.update(gradient, state, kernel, log_weights=log_weights)
    kernel = optax.apply_updates(kernel, updates)
  return kernel


def test_a_loop_like_maxtext_s():
  """Micro-batches are accumulated in a scan, and the train state passes the gradient and nothing else."""
  state = train_state.TrainState.create(apply_fn=None, params=make_params(), tx=stabilizers.scale_by_ess_probe(CHAIN))

  @jax.jit
  def train_step(state):
    def accumulate(total, micro_batch):
      gradient = jax.grad(probed_loss)(state.params, *micro_batch)
      return jax.tree.map(jnp.add, total, gradient), None

    total, _ = jax.lax.scan(accumulate, optax.tree.zeros_like(state.params), split(4))
    return state.apply_gradients(grads=jax.tree.map(lambda g: g / 4, total))

  for _ in range(3):
    state = train_step(state)
  np.testing.assert_allclose(state.params["kernel"], expected_kernel(3), rtol=1e-5)
  np.testing.assert_array_equal(state.params["ess_probe"], jnp.zeros(3))


def test_a_loop_like_tunix_s():
  """An NNX model is updated by `optimizer.update(model, gradients)`."""

  class Policy(nnx.Module):
    def __init__(self):
      self.kernel = nnx.Param(jnp.asarray(KERNEL))
      self.ess_probe = nnx.Param(stabilizers.ess_probe())

  policy = Policy()
  optimizer = nnx.Optimizer(policy, stabilizers.scale_by_ess_probe(CHAIN), wrt=nnx.Param)

  @nnx.jit
  def train_step(policy, optimizer):
    def loss_fn(policy):
      loss, log_weights = policy_loss(policy.kernel[...], *BATCH)
      return stabilizers.attach_ess_probe(loss, policy.ess_probe[...], log_weights)

    optimizer.update(policy, nnx.grad(loss_fn)(policy))

  for _ in range(3):
    train_step(policy, optimizer)
  np.testing.assert_allclose(policy.kernel[...], expected_kernel(3), rtol=1e-5)
  np.testing.assert_array_equal(policy.ess_probe[...], jnp.zeros(3))


def test_multi_steps_may_go_around_it():
  optimizer = optax.MultiSteps(stabilizers.scale_by_ess_probe(CHAIN), 4)
  params = make_params()
  state = optimizer.init(params)
  for micro_batch in zip(*split(4), strict=True):
    gradient = jax.grad(probed_loss)(params, *micro_batch)
    updates, state = optimizer.update(gradient, state, params)
  np.testing.assert_allclose(params["kernel"] + updates["kernel"], expected_kernel(1), rtol=1e-5)


def test_what_is_inside_sees_no_probe():
  optimizer = stabilizers.scale_by_ess_probe(optax.chain(stabilizers.track_norm(), optax.adam(1e-2)))
  params = make_params()
  gradient = jax.grad(probed_loss)(params, *BATCH)
  _, state = optimizer.update(gradient, optimizer.init(params), params)
  np.testing.assert_allclose(optax.tree.get(state, "grad_norm"), jnp.linalg.norm(gradient["kernel"]), rtol=1e-5)
  assert [x.shape for x in jax.tree.leaves(optax.tree.get(state, "mu"))] == [(3, 4)]
  # Parameter-like parts of the state can be found, which is how shardings are assigned to it.
  marked = optax.tree.map_params(optimizer, lambda _: "param", state, transform_non_params=lambda _: "other")
  assert jax.tree.leaves(marked).count("param") == 2  # Adam's two moments


def test_before_the_first_step_the_ratio_and_the_scale_are_one():
  for optimizer in (stabilizers.scale_by_ess_probe(CHAIN), stabilizers.scale_by_ess()):
    state = optimizer.init(make_params())
    assert (float(state.ess_ratio), float(state.ess_scale), int(state.ess_undefined_count)) == (1.0, 1.0, 0)


def test_options_and_types_are_those_of_scale_by_ess():
  gradient = jax.grad(probed_loss)(make_params(jnp.bfloat16), *BATCH)
  optimizer = stabilizers.scale_by_ess_probe(optax.sgd(1.0), power=1.0, on_policy_ratio=0.9)
  updates, state = optimizer.update(gradient, optimizer.init(make_params(jnp.bfloat16)))
  assert updates["kernel"].dtype == jnp.bfloat16
  assert float(state.ess_scale) == pytest.approx(float(state.ess_ratio) / 0.9, rel=1e-6)
  with pytest.raises(ValueError, match="power=-1"):
    stabilizers.scale_by_ess_probe(optax.sgd(1.0), power=-1)


@pytest.mark.parametrize("sums", [[0.0, 0.0, 0.0], [2.0, jnp.nan, 1.0], [2.0, jnp.inf, 1.0], [2.0, 0.0, 0.0]])
def test_unusable_sums_take_no_step_and_are_counted(sums):
  optimizer = stabilizers.scale_by_ess_probe(optax.sgd(1.0))
  gradient = {"kernel": jnp.full((3, 4), jnp.nan), "ess_probe": jnp.array(sums)}
  updates, state = optimizer.update(gradient, optimizer.init(make_params()))
  np.testing.assert_array_equal(updates["kernel"], jnp.zeros((3, 4)))
  assert float(state.ess_ratio) == 0.0
  assert int(state.ess_undefined_count) == 1


@pytest.mark.parametrize("params", [{"w": jnp.zeros(2)}, {"a": make_params(), "b": make_params()}], ids=["none", "two"])
def test_parameters_without_exactly_one_probe_are_refused(params):
  with pytest.raises(ValueError, match="one parameter named ess_probe, got"):
    stabilizers.scale_by_ess_probe(optax.sgd(1.0)).init(params)


def test_shapes_are_checked():
  attach = functools.partial(stabilizers.attach_ess_probe, jnp.float32(0.0))
  with pytest.raises(ValueError, match=r"probe.shape=\(2,\)"):
    attach(jnp.zeros(2), jnp.zeros(4))
  with pytest.raises(ValueError, match=r"log_weights.shape=\(4, 1\)"):
    attach(jnp.zeros(3), jnp.zeros((4, 1)))
  with pytest.raises(ValueError, match="mask's shape"):
    attach(jnp.zeros(3), jnp.zeros(4), jnp.ones(3, bool))
