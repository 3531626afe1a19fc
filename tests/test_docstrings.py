"""The examples in the docstrings of the package run and print what they say."""

import doctest
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

import async_rl
from async_rl import models
from async_rl.types import Prompt

ROOT = pathlib.Path(async_rl.__file__).parent
MODULES = [
  ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
  for file in sorted(ROOT.rglob("*.py"))
  if ">>> " in file.read_text()
]
NAMES = {"jax": jax, "jnp": jnp, "models": models, "Prompt": Prompt}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
  failed, attempted = doctest.testmod(importlib.import_module(name), extraglobs=NAMES)
  assert attempted
  assert not failed
