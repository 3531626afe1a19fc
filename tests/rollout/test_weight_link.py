"""The way of weights between processes, here from a device of this one to another."""

import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from async_rl.rollout import _weight_link
from async_rl.rollout._weight_link import WeightLink


def has_ipv6():
  try:
    with socket.socket(socket.AF_INET6) as probe:
      probe.bind(("::1", 0))
  except OSError:
    return False
  return True


@pytest.mark.parametrize(
  "host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="has no IPv6"))]
)
def test_arrays_arrive_on_the_device_that_wants_them_in_every_channel(host, monkeypatch):
  monkeypatch.setattr(_weight_link, "_own_address", lambda: host)
  addresses = []
  link = WeightLink(0, [0], [0], lambda data: addresses.append(data.decode()) or [data])
  assert addresses[0].startswith(f"{host}:")
  source, target = jax.devices()[:2]
  wanted = [jax.ShapeDtypeStruct((3,), jnp.float32, sharding=SingleDeviceSharding(target))]
  channels = [link.open(), link.open()]
  for step in range(2):
    for i, channel in enumerate(channels):
      value = np.arange(3, dtype=np.float32) + 10 * step + 100 * i
      (found,) = channel.carry(lambda value=value: [jax.device_put(value, source)], wanted)
      assert found.devices() == {target}
      np.testing.assert_array_equal(found, value)


def test_a_process_that_only_learns_offers_to_those_that_it_serves(monkeypatch):
  monkeypatch.setattr(_weight_link, "_own_address", lambda: "127.0.0.1")
  offers = []
  idle = WeightLink(1, [0, 1], [2], lambda data: [data] * 3)
  assert idle.open().carry(lambda: offers.append(1) or [], []) is None
  assert not offers  # process 0 serves the only one that samples
