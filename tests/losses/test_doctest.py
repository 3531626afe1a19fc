"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

from async_rl import losses

MODULES = [m.name for m in pkgutil.iter_modules(losses.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
  module = importlib.import_module(f"async_rl.losses.{name}")
  result = doctest.testmod(module, extraglobs={"jax": jax, "jnp": jnp})
  assert result.failed == 0
