"""Options of corrections as text: every constant can be given, and what is wrong is named before anything runs."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import learning
from async_rl import losses
from async_rl.learning._loss_options import split_options


def other(default):
  """Another value than the default, which every bound allows."""
  if default is None:
    return 1.5
  if isinstance(default, bool):
    return not default
  return 0.96 * default if 0 < default < math.inf else 0.125


def constants():
  """Yields every objective with each of its options that is no function, and another value than the default."""
  for name, correction in losses.CORRECTIONS.items():
    for function in (correction, *(losses.STATISTICS[x] for x in losses.needs(correction) if x in losses.STATISTICS)):
      for key, p in inspect.signature(function).parameters.items():
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and not callable(p.default):
          yield name, key, other(p.default)


CONSTANTS = list(constants())


def bound(function):
  return function.keywords if isinstance(function, functools.partial) else {}


@pytest.mark.parametrize(("name", "key", "value"), CONSTANTS)
def test_every_constant_can_be_given_as_text_and_reaches_its_function(name, key, value):
  made = learning.objective(f"{name}:{key}={value}")
  places = [bound(made.loss)] + [bound(made.statistics[x]) for x in losses.needs(made.loss) if x in made.statistics]
  assert [place[key] for place in places if place.get(key) == value] == [value]
  assert made.needs == learning.objective(name).needs
  assert made.aggregate is learning.objective(name).aggregate


def test_the_constants_of_the_family_are_there():
  keys = {}
  for name, key, _ in CONSTANTS:
    keys.setdefault(name, set()).add(key)
  assert keys["trm"] == {"max_bound", "mean_bound"}
  assert keys["m2po"] == {"signed", "budget"}
  assert keys["sat"] == {"low", "high", "exponent", "share"}
  assert keys["a3po"] > {"linear", "low", "high", "weight_cap"}
  assert set(losses.CORRECTIONS) - set(keys) == {"reinforce"}


def test_an_objective_from_text_is_the_one_from_python():
  logprobs, behavior = jnp.log(jnp.array([[0.4, 0.7], [0.2, 0.3]])), jnp.log(jnp.array([[0.5, 0.5], [0.2, 0.4]]))
  arrays = logprobs, behavior, jnp.array([1.0, -1.0]), jnp.ones((2, 2), bool)
  text = learning.objective("trm:max_bound=.05,mean_bound=inf", advantages="rloo", aggregate="sum")
  python = learning.objective("trm", max_bound=0.05, mean_bound=math.inf, advantages="rloo", aggregate="sum")
  for got, expected in zip(text.loss(*arrays), python.loss(*arrays), strict=True):
    np.testing.assert_array_equal(got, expected)
  np.testing.assert_array_equal(text.loss(*arrays).keep, [[False, False], [True, True]])  # .06 and .04 nats
  assert (text.advantages, text.aggregate) == (python.advantages, python.aggregate)


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("trm", ("trm", {})),
    ("trm:max_bound=.5", ("trm", {"max_bound": 0.5})),
    (" trm: max_bound = 5e-1 , mean_bound=inf ", ("trm", {"max_bound": 0.5, "mean_bound": math.inf})),
    ("dppo:kl=true,bound=0.05", ("dppo", {"kl": True, "bound": 0.05})),
    ("ppo_clip:dual_clip=None,low=0", ("ppo_clip", {"dual_clip": None, "low": 0.0})),
  ],
)
def test_texts_are_split(text, expected):
  assert split_options(text) == expected


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("trm:", r"\*objective\* must be a name, or one with options such as trm:max_bound=0.5.*, got objective='trm:'"),
    ("trm:max_bound", "got objective='trm:max_bound'"),
    ("trm:max_bound=", "got objective='trm:max_bound='"),
    ("trm:=1", "got objective='trm:=1'"),
    ("trm:max_bound=1,", "got objective='trm:max_bound=1,'"),
    ("trm:max_bound=1,max_bound=2", "each of them once, got objective='trm:max_bound=1,max_bound=2'"),
    ("trm:max_bound=wide", r"\*max_bound\* must be a number, true, false or none, got max_bound='wide'"),
    ("tmr:max_bound=1", r"\*objective\* must be one of .*, got objective='tmr'; did you mean 'trm'\?"),
    (
      "trm:bound=1",
      r"\*bound\* is not an option of 'trm', which takes max_bound, mean_bound; did you mean 'm.*_bound'",
    ),
    ("trm:tau=1", r"\*tau\* is not an option of 'trm', which takes max_bound, mean_bound\."),
    ("m2po:bugdet=1", r"which takes signed, budget; did you mean 'budget'\?"),
    ("a3po:wieght_cap=1", r"'a3po', which takes linear, .*, weight_reject; did you mean 'weight_cap'\?"),
    ("reinforce:cap=1", r"\*cap\* is not an option of 'reinforce', which takes none\."),
    ("trm:max_bound=-0.5", r"\*max_bound\* must be a number at least 0, got max_bound=-0.5; inf for no bound\."),
    ("trm:max_bound=nan", "got max_bound=nan"),
    ("trm:max_bound=true", "got max_bound=True"),
    ("trm:max_bound=none", "got max_bound=None"),
    ("trm:inner=1", r"\*inner\* must be a function, got inner=1.0"),
    ("icepop:low=6", r"\*high\* must be a number at least 6.0 and above 0, got high=5.0"),
    ("m2po:budget=-1", r"\*budget\* must be a number at least 0, got budget=-1.0"),
    ("sat:share=90", r"\*share\* must be .* at most 1, got share=90"),
    ("a3po:weight_cap=-1", r"\*weight_cap\* must be a number above 0, got weight_cap=-1"),
    ("decoupled_recompute:weighted=false,weight_cap=2", "weighted=False drops"),
    ("dppo:kl=1", r"\*kl\* must be True or False, got kl=1.0"),
  ],
)
def test_what_is_wrong_is_refused_before_a_run_begins(text, message):
  with pytest.raises(ValueError, match=message):
    learning.objective(text)


def test_an_option_given_twice_is_refused():
  with pytest.raises(TypeError, match="multiple values for keyword argument 'cap'"):
    learning.objective("topr:cap=1", cap=2.0)


def test_options_may_be_traced():
  one = jnp.ones((1, 1))
  loss = lambda cap: learning.objective("token_tis", cap=cap).loss(-one, -3.0 * one, jnp.ones(1), one > 0).loss[0, 0]
  np.testing.assert_allclose(jax.vmap(loss)(jnp.array([1.5, 2.0])), [1.5, 2.0])
  np.testing.assert_allclose(jax.jit(loss)(3.0), 3.0)
