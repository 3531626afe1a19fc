"""The constants of all losses: bad ones are refused by name and value, traced ones pass."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import losses

SHAPE = (2, 3)
#: Arrays by the names of the arguments that take them.
ARRAYS = {
  **dict.fromkeys(("logprobs", "behavior", "reference", "proximal", "old_values"), -jnp.ones(SHAPE)),
  **dict.fromkeys(("values", "returns", "loss", "entropy"), jnp.ones(SHAPE)),
  **dict.fromkeys(("log_ratios", "mask"), jnp.zeros(SHAPE)),
  **dict.fromkeys(("advantages", "squared_norms", "squared_logit_norms", "scale"), jnp.ones(2)),
  **dict.fromkeys(("best", "worst", "reference_best", "reference_worst", "log_weights"), jnp.zeros(2)),
  "mask": jnp.ones(SHAPE, bool),
  "lag": jnp.ones(SHAPE, int),
  "lengths": jnp.array([2, 3]),
  "truncated": jnp.array([True, False]),
  "groups": jnp.zeros(2, int),
  "num_groups": 1,
  "method": "constant",
  "trajectories": jnp.ones(2),
  "score": jax.value_and_grad(lambda x: 0.0 * x),
}
#: Constants without a default, or whose default is None, with a good value.
GOOD = {
  **dict(threshold=0.3, log_ratio_scale=0.2, max_length=8, buffer=4, dual_clip=2.0),
  **dict(weight_cap=2.0, weight_reject=2.0, cap=2.0, code_cap=2.0, clip=0.2),
}
#: Constants that may be negative.
SIGNED = {("missing_end_rewards", "reward")}
#: Constants that may be infinite, which is no bound.
UNBOUNDED = {
  *(("icepop", "high"), ("sequence_mask", "high"), ("geometric_mask", "high"), ("cispo", "high")),
  *(("ppo_clip", "high"), ("gspo", "high"), ("proximal_rloo", "high"), ("decoupled_ppo", "high"), ("sat", "high")),
  *(("a3po", key) for key in ("high", "dual_clip", "weight_cap", "weight_reject")),
  *(("token_tis", "cap"), ("sequence_tis", "cap"), ("topr", "cap"), ("kl_loss", "cap"), ("opob_gradient", "cap")),
  *(("m2po", "threshold"), ("second_moment_threshold", "budget"), ("dppo", "bound"), ("opsm", "delta")),
  *(("estr", "tau"), ("trm", "max_bound"), ("trm", "mean_bound"), ("sat", "log_ratio_scale")),
  *(("ppo_clip", "dual_clip"), ("decoupled_ppo", "dual_clip"), ("value_loss", "clip")),
  *(("decoupled_ppo", "weight_cap"), ("decoupled_ppo", "weight_reject")),
  *(("opob_advantages", "code_cap"), ("opob_gradient", "code_cap")),
}
FUNCTIONS = {
  name: value
  for name, value in vars(losses).items()
  if inspect.isfunction(value) and value.__module__.startswith("async_rl.losses.")
}


def constants():
  """Yields the name of every function, of each of its constants, and a good value of that."""
  for name, function in FUNCTIONS.items():
    for key, parameter in inspect.signature(function).parameters.items():
      default = parameter.default
      number = isinstance(default, (int, float)) and not isinstance(default, bool)
      if parameter.kind is parameter.KEYWORD_ONLY and (number or key in GOOD):
        yield name, key, default if number else GOOD[key]


CONSTANTS = list(constants())


def call(name, **options):
  """Calls a function with arrays for all arguments that need one."""
  function, arrays = FUNCTIONS[name], ARRAYS | {"rewards": jnp.ones(2)}
  if name == "gae":
    arrays["rewards"] = jnp.ones(SHAPE)
  if name == "overlong_penalty":
    options = {"max_length": 8, "buffer": 4} | options
  if name == "aggregate":
    options = {"max_length": 8} | options
  needed = [key for key, p in inspect.signature(function).parameters.items() if p.default is p.empty]
  needed = {key: (arrays | GOOD)[key] for key in needed if key not in options}
  return function(**needed, **options)


def test_every_number_among_the_arguments_is_tested():
  """So that a new loss cannot leave its constants out: all that is annotated as a number is one of `CONSTANTS`."""
  tested = {(name, key) for name, key, _ in CONSTANTS}
  for name, function in FUNCTIONS.items():
    for key, parameter in inspect.signature(function).parameters.items():
      annotation = parameter.annotation
      if parameter.kind is parameter.KEYWORD_ONLY and re.match(r"(float|int)\b", str(annotation)):
        assert (name, key) in tested, f"{name} {key}"
  assert tested >= SIGNED | UNBOUNDED


def assert_refused(name, key, bad):
  shown = bad.item() if hasattr(bad, "item") else bad
  with pytest.raises(ValueError, match=rf"\*{key}\* must be a.*got {key}={re.escape(repr(shown))}[;.]"):
    call(name, **{key: bad})


@pytest.mark.parametrize("bad", [math.nan, jnp.float32(math.nan), -math.inf, "0.5", True, [1.0]])
@pytest.mark.parametrize(("name", "key", "good"), CONSTANTS)
def test_what_is_no_number_is_refused_by_name_and_value(name, key, good, bad):
  if not (isinstance(bad, list) and key in ("low", "high")):  # which may differ by token
    assert_refused(name, key, bad)


@pytest.mark.parametrize("bad", [-1.0, -1, np.float32(-1.0), jnp.float32(-1.0)])
@pytest.mark.parametrize(("name", "key", "good"), CONSTANTS)
def test_a_negative_constant_is_refused(name, key, good, bad):
  if (name, key) in SIGNED:
    call(name, **{key: bad})
  else:
    assert_refused(name, key, bad)


@pytest.mark.parametrize(("name", "key", "good"), CONSTANTS)
def test_infinity_is_refused_where_it_is_not_the_absence_of_a_bound(name, key, good):
  if (name, key) in UNBOUNDED:
    assert all(not np.isnan(x).any() for x in jax.tree.leaves(call(name, **{key: math.inf})))
  else:
    assert_refused(name, key, math.inf)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CONSTANTS}))
def test_traced_constants_pass_and_have_the_same_result(name):
  good = {key: value for function, key, value in CONSTANTS if function == name}
  traced = jax.jit(lambda values: call(name, **values))(good)
  swept = jax.vmap(lambda values: call(name, **values))(jax.tree.map(lambda x: jnp.array([x, x]), good))
  expected = call(name, **good)
  for got, row, wanted in zip(*(jax.tree.leaves(x) for x in (traced, swept, expected)), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(row[1], wanted, rtol=1e-6)


def test_a_traced_constant_that_is_bad_passes():
  """Nothing can be said of it: it rejects all, as the formula has it."""
  assert not jax.jit(lambda bound: call("trm", max_bound=bound).keep)(-1.0).any()
  assert not jax.vmap(lambda low, high: call("icepop", low=low, high=high).keep)(jnp.ones(2), jnp.zeros(2)).any()


@pytest.mark.parametrize("name", ["icepop", "sequence_mask", "geometric_mask", "cispo"])
def test_bounds_in_the_wrong_order_are_refused(name):
  with pytest.raises(
    ValueError, match=r"\*high\* must be a number at least 2.0 and above 0, got high=1.5; .*inf for no"
  ):
    call(name, low=2.0, high=1.5)
  call(name, low=1.5, high=1.5)


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("trm", {"max_bound": -0.05}, "*max_bound* must be a number at least 0, got max_bound=-0.05; inf for no bound."),
    ("trm", {"mean_bound": -1}, "*mean_bound* must be a number at least 0, got mean_bound=-1; inf for no bound."),
    ("second_moment_threshold", {"budget": -0.04}, "*budget* must be a number at least 0, got budget=-0.04; inf keeps"),
    ("estr", {"eps": 0.0}, "*eps* must be a number above 0, got eps=0.0; the entropy may be 0."),
    ("token_tis", {"cap": 0}, "*cap* must be a number above 0, got cap=0; inf does not truncate."),
    ("icepop", {"high": 0.0, "low": 0.0}, "*high* must be a number at least 0.0 and above 0, got high=0.0; "),
    ("ppo_clip", {"low": 1.5}, "*low* must be a number at least 0 and at most 1, got low=1.5; the ratio is held above"),
    ("ppo_clip", {"dual_clip": 1.0}, "*dual_clip* must be a number above 1, got dual_clip=1.0; None for no bound."),
    ("a3po", {"weight_cap": 0.0}, "*weight_cap* must be a number above 0, got weight_cap=0.0; None for no bound."),
    ("gae", {"trace": 1.5}, "*trace* must be a number at least 0 and at most 1, got trace=1.5."),
    ("log_ratio_quantile", {"share": 90}, "*share* must be a number above 0 and at most 1, got share=90."),
    ("overlong_penalty", {"buffer": 9}, "*buffer* must be a number above 0 and at most 8, got buffer=9; the penalty"),
  ],
)
def test_messages_name_the_remedy(name, options, message):
  with pytest.raises(ValueError, match="^" + re.escape(message)):
    call(name, **options)


def test_topr_without_negatives_and_clips_that_differ_by_token_are_allowed():
  np.testing.assert_allclose(call("topr", cap=0.0).loss, call("topr").loss)  # all advantages are positive
  one = np.ones((1, 1), np.float32)
  assert losses.topr(-one, -one, -one[0], one > 0, cap=0.0).loss == 0
  assert call("ppo_clip", low=jnp.full(SHAPE, 0.1), high=jnp.full((2, 1), 0.3)).loss.shape == SHAPE


@pytest.mark.parametrize("edges", [(4, 1), (0, 4), (2, 2), (-1,), (math.nan,)])
def test_edges_of_lags_increase_from_one_on(edges):
  with pytest.raises(ValueError, match=r"\*edges\* must be increasing lags from 1 on, got edges=\("):
    losses.lag_buckets(jnp.zeros(3, int), edges)
