"""Numbers are checked whatever library they come from; traced ones are not."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from async_rl import _validation

FORMS = [float, np.float64, np.float32, np.array, jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
  ("value", "bounds", "wanted"),
  [
    (-1.0, {"at_least": 0}, "a number at least 0"),
    (0.0, {"above": 0}, "a number above 0"),
    (2.0, {"at_most": 1.5}, "a number at most 1.5"),
    (1.0, {"at_least": 0, "below": 1}, "a number at least 0 and below 1"),
    (-0.5, {"at_least": np.float64(0), "below": 1}, "a number at least 0.0 and below 1"),
    (math.nan, {}, "a number"),
    (math.inf, {"at_least": 0}, "a number at least 0"),
    (0.5, {"whole": True}, "an integer"),
  ],
)
def test_concrete_numbers_out_of_bounds_are_refused(form, value, bounds, wanted):
  shown = form(value) if bounds.get("whole") else value
  with pytest.raises(ValueError, match=re.escape(f"*rate* must be {wanted}, got rate={shown!r}.")):
    _validation.check_number("rate", form(value), **bounds)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_bounds_that_are_kept_pass(form):
  _validation.check_number("rate", form(0.0), at_least=0, at_most=0, above=-1, below=1)
  _validation.check_number("rate", form(math.inf), at_least=0, finite=False)


@pytest.mark.parametrize("value", [3, np.int32(3), jnp.int32(3)])
def test_whole_numbers_pass(value):
  _validation.check_number("lag", value, at_least=0, whole=True)


@pytest.mark.parametrize("value", ["1", None, [0.5, 0.5], np.zeros(2), 1j, True, lambda count: 1.0])
def test_what_is_no_number_is_refused(value):
  with pytest.raises(ValueError, match=r"must be a number at least 0, got rate=.*; pass one number\."):
    _validation.check_number("rate", value, at_least=0, remedy="pass one number")


def test_traced_values_and_bounds_pass():
  def check(value, bound):
    _validation.check_number("rate", value, above=bound)
    _validation.check_number("rate", value, above=10, whole=True)
    _validation.check_number("rate", 0.0, at_least=bound)
    with pytest.raises(ValueError, match="rate=0.0"):
      _validation.check_number("rate", 0.0, at_least=bound, above=0)
    return value

  jax.jit(check)(-1.0, 5.0)
  jax.vmap(check)(jnp.zeros(2), jnp.ones(2))


def test_concrete_values_are_checked_inside_jit_too():
  outside = jnp.float32(-1.0)

  @jax.jit
  def check(x):
    _validation.check_number("rate", outside, at_least=0)
    return x

  with pytest.raises(ValueError, match="rate=-1.0"):
    check(1.0)


def test_a_choice_is_one_of_its_values():
  _validation.check_choice("kind", "a", ("a", "b"))
  with pytest.raises(ValueError, match=r"\*kind\* must be one of 'a', 'b', got kind='c'\."):
    _validation.check_choice("kind", "c", ("a", "b"))
  with pytest.raises(ValueError, match=r"must be one of 'train', 'test', got split='tset'; did you mean 'test'\?$"):
    _validation.check_choice("split", "tset", {"train": 0, "test": 1})
  with pytest.raises(ValueError, match=r"must be one of 'a', 'b', got kind=None\.$"):
    _validation.check_choice("kind", None, ("a", "b"))


def test_a_number_that_does_not_divide_is_refused_with_the_next_that_does():
  _validation.check_multiple("rows", 8, 4, "the parts of a mesh")
  with pytest.raises(ValueError, match=re.escape("*rows* must be a multiple of 4, the parts of a mesh, got rows=9; ")):
    _validation.check_multiple("rows", 9, 4, "the parts of a mesh")
  with pytest.raises(ValueError, match="the next is rows=12"):
    _validation.check_multiple("rows", 9, 4, "the parts of a mesh")
