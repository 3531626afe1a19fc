"""The examples in the docstrings of the tasks, and of the suggestions of names."""

import doctest
import importlib
import pkgutil

import pytest

from async_rl import tasks

MODULES = [f"async_rl.tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__)]


@pytest.mark.parametrize("name", [*MODULES, "async_rl._suggestions"])
def test_examples(name):
  assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
  attempted = [doctest.testmod(importlib.import_module(name)).attempted for name in MODULES]
  assert sum(attempted) > 10
