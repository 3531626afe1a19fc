"""Runs of equal models and sizes share their programs, only runs whose picture a test looks at draw it, and tasks that
make their problems make few, since a run reads all of them before its first step."""

import pytest
from sharing import draws_pictures  # noqa: F401
from sharing import no_pictures  # noqa: F401
from sharing import shared_programs  # noqa: F401

from async_rl import tasks

#: The numbers of problems of a task, as users and as these tests have it by default.
FEWER = {8192: 256, 512: 64}


@pytest.fixture(scope="module", autouse=True)
def few_problems():
  """Tasks of a module make few problems unless it asks for more."""
  with pytest.MonkeyPatch.context() as patch:
    for task in (tasks.Sums, tasks.KeyWords, tasks.Countdown):
      make = task.__init__
      patch.setattr(make, "__defaults__", tuple(FEWER.get(value, value) for value in make.__defaults__))
    yield
