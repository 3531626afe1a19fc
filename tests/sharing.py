"""Learners and sampling programs that several runs of one process share, so that each is traced and compiled once.

A test makes several runs of one experiment; tracing their programs again would take most of its time. What is shared is
all that does not change: jitted functions and compiled programs, never weights, caches or a reference policy.
"""

import copy
import dataclasses
import functools
import types
from collections.abc import Mapping

import jax
import pytest

from async_rl import learning
from async_rl import recording
from async_rl.runtime import _run
from async_rl.sampling import _engine
from async_rl.sampling import _programs


class SharedPrograms:
  """What was made so far, by its arguments; those that cannot be hashed are the same only if identical."""

  def __init__(self):
    self._learners = {}
    self.programs = functools.cache(_programs.Programs)

  def learner(self, make, *args, **options):
    """Returns a new learner, as `make` does, with the jitted functions of the first one of the same arguments."""
    key = (*map(comparable, args), *((name, comparable(value)) for name, value in options.items()))
    if key not in self._learners:  # with the objects whose identity is in the key, which must stay alive
      self._learners[key] = (make(*args, **options), args, options)
    learner = copy.copy(self._learners[key][0])
    assert learner._reference is None
    return learner

  def forget(self):
    """Makes the next run compile everything again."""
    self._learners.clear()
    self.programs.cache_clear()
    jax.clear_caches()


def comparable(value):
  """What is equal for values that compute the same, so far as that can be told: else its identity.

  Functions are the same if they have the same code and what they enclose and default to is the same, such as those of
  two optimizers that were made alike.
  """
  if isinstance(value, types.FunctionType):
    enclosed = [cell.cell_contents for cell in value.__closure__ or ()]
    if any(part is value for part in enclosed):
      return id(value)  # it calls itself
    given = (value.__defaults__, value.__kwdefaults__)
    return value.__code__, value.__module__, *map(comparable, (*enclosed, *given))
  if isinstance(value, functools.partial):
    return comparable(value.func), comparable(value.args), comparable(tuple(value.keywords.items()))
  if isinstance(value, (tuple, list)):
    return (type(value), *map(comparable, value))
  if isinstance(value, Mapping):
    return (Mapping, *((key, comparable(item)) for key, item in value.items()))
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return (type(value), *(comparable(getattr(value, field.name)) for field in dataclasses.fields(value)))
  try:
    hash(value)
  except TypeError:
    return id(value)
  return type(value), value


def share_programs(patch):
  """Lets the runs of this process share what equal experiments compile."""
  shared = SharedPrograms()
  patch.setattr(learning, "Learner", functools.partial(shared.learner, learning.Learner))
  patch.setattr(_engine, "Programs", shared.programs)
  return shared


def leave_pictures_out(patch):
  """Lets runs end without a picture, which takes longer to draw than the steps of a test."""
  patch.setattr(_run, "write_report", lambda folder: folder.report)


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
  """What equal experiments of a module compile once; `forget` makes the next run compile everything again."""
  with pytest.MonkeyPatch.context() as patch:
    yield share_programs(patch)


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
  """Runs of a module, those of its fixtures too, end without a picture."""
  with pytest.MonkeyPatch.context() as patch:
    leave_pictures_out(patch)
    yield


@pytest.fixture
def draws_pictures(monkeypatch):
  """Runs of a test that asks for this end with a picture, as those of users do."""
  monkeypatch.setattr(_run, "write_report", recording.write_report)
