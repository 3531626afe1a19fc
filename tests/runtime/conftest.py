"""Runs of equal models and sizes share their programs, and only runs whose picture a test looks at draw it."""

import pytest
import sharing


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
  """What equal experiments of a module compile once; `forget` makes the next run compile everything again."""
  with pytest.MonkeyPatch.context() as patch:
    yield sharing.share_programs(patch)


@pytest.fixture(autouse=True)
def _no_pictures(request, monkeypatch):
  if "draws_pictures" not in request.fixturenames:
    sharing.leave_pictures_out(monkeypatch)


@pytest.fixture
def draws_pictures():
  """Runs of a test that asks for this end with a picture, as those of users do."""
