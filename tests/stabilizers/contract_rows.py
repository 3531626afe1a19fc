"""The stabilizers whose promises are tested, with gradients for them and ways to run them."""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
