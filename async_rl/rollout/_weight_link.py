"""The way of weights between processes, where some of them only learn and the others only sample."""

from __future__ import annotations

import socket
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer

#: The connections over which the blocks of one process travel side by side.
_STREAMS = 4
#: The most pushes of one channel, and the most processes that sample.
_PUSHES, _SAMPLERS = 2**32, 2**12


class WeightLink:
  """Connects every process that samples with one that learns, and carries arrays from these to those.

  A process that learns offers its blocks, those that sample pull them when they are there. No program is launched for
  it on any device, so that any thread may do so, in no order among the processes: generation goes on until the blocks
  have arrived. What is offered stays in memory until it was pulled.

  Args:
    index: the number of this process.
    learners: the processes that learn.
    samplers: the processes that sample.
    gather: exchanges bytes with all processes and returns those of each, see `Hosts.gather`.
  """

  def __init__(
    self, index: int, learners: Sequence[int], samplers: Sequence[int], gather: Callable[[bytes], list[bytes]]
  ):
    host = _own_address()
    anywhere = "[::]:0" if ":" in host else "0.0.0.0:0"  # not every host has IPv6, or takes IPv4 by its sockets
    server = transfer.start_transfer_server(jax.local_devices()[0].client, anywhere, [f"{host}:0"] * _STREAMS)
    addresses = gather(f"{host}:{server.address().rpartition(':')[2]}".encode())
    partners = {sampler: learners[rank % len(learners)] for rank, sampler in enumerate(samplers)}
    self._server = server
    self._served = [rank for rank, sampler in enumerate(samplers) if partners[sampler] == index]
    self._rank = samplers.index(index) if index in samplers else None
    if self._rank is not None:
      self._connection = server.connect(addresses[partners[index]].decode())
    self._channels = 0

  def open(self) -> WeightChannel:
    """Opens a channel; every process must open the same ones in the same order."""
    self._channels += 1
    return WeightChannel(self, self._channels)

  def carry(self, number: int, offered: Callable[[], Any], wanted: Any) -> Any:
    """Offers arrays where this process learns, and starts to pull them where it samples.

    Args:
      number: the number of this transfer, the same in all processes.
      offered: returns the arrays, a tree of one device's each.
      wanted: a tree of their shapes, dtypes and shardings on devices of the process that samples.

    Returns:
      The arrays that are pulled, or `None` where this process does not sample.
    """
    if self._served:
      arrays = jax.tree.leaves(offered())
      for rank in self._served:
        self._server.await_pull(number * _SAMPLERS + rank, arrays)
    return None if self._rank is None else self._connection.pull(number * _SAMPLERS + self._rank, wanted)


class WeightChannel:
  """The transfers of one pusher of weights, in their order.

  Args:
    link: the link.
    number: the number of the channel.
  """

  def __init__(self, link: WeightLink, number: int):
    self._link = link
    self._next = number * _PUSHES

  def carry(self, offered: Callable[[], Any], wanted: Any) -> Any:
    """Carries arrays, see `WeightLink.carry`."""
    self._next += 1
    return self._link.carry(self._next, offered, wanted)


def _own_address() -> str:
  """Returns the address of this host in the network of the coordinator."""
  from jax._src import distributed  # JAX has no public name for the address

  coordinator = str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")
  kind, *_, address = socket.getaddrinfo(coordinator, 1, type=socket.SOCK_DGRAM)[0]
  with socket.socket(kind, socket.SOCK_DGRAM) as probe:  # sends nothing
    probe.connect(address)
    host = probe.getsockname()[0]
  return f"[{host}]" if ":" in host else host
