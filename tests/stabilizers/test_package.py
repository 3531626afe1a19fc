"""Every public function has an example, and the examples run."""

import doctest
import importlib
import pkgutil

import pytest

from async_rl import stabilizers

MODULES = [module.name for module in pkgutil.iter_modules(stabilizers.__path__, "async_rl.stabilizers.")]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
  assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_every_public_function_has_an_example():
  public = [value for name, value in vars(stabilizers).items() if callable(value) and not isinstance(value, type)]
  assert len(public) >= 5
  assert [function.__name__ for function in public if ">>>" not in function.__doc__] == []
