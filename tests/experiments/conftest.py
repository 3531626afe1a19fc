"""What the tests of commands share."""

import jax
import pytest


@pytest.fixture(scope="module")
def two_devices():
  """Runs of these tests find two of the eight devices: their programs, of one device each, compile in half the time."""
  with pytest.MonkeyPatch.context() as patch:
    first, local = jax.devices, jax.local_devices
    patch.setattr(jax, "devices", lambda *args, **options: first(*args, **options)[:2])
    patch.setattr(jax, "local_devices", lambda *args, **options: local(*args, **options)[:2])
    yield
