"""The examples in the docstrings of sampling run and print what they say."""

import doctest

from async_rl import models
from async_rl.sampling import _engine
from async_rl.types import Prompt


def test_examples():
  failed, attempted = doctest.testmod(_engine, extraglobs={"models": models, "Prompt": Prompt})
  assert attempted
  assert not failed
