"""The cache of a slot engine, no larger than its live slots need."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from async_rl.sampling._programs import Programs


class SlotCache:
  """Keys and values of slots, in as few rows and positions as there are programs for.

  Every live slot has a row on the device that the slot belongs to; so have some of the free ones. What a decode step
  costs follows from the number of rows, so that slots that nothing lives in cost little.

  Attributes:
    layers: the keys and values of L layers, each [M, N, S, d].
    shape: M and S, the numbers of rows and positions.

  Args:
    programs: the programs, which say the shapes that there are.
    slots: B, the number of slots.
  """

  def __init__(self, programs: Programs, slots: int):
    self._programs = programs
    self.shape = programs.shapes[0]
    self._first = np.arange(programs.shards)[:, None] * (slots // programs.shards)  # each device's first slot
    self._each = slots // programs.shards
    self._local = self._choose(np.zeros(slots, np.bool_), self.shape[0])
    self.layers = programs.init_cache(*self.shape)

  @property
  def slots(self) -> np.ndarray:
    """Returns the slot whose row each is, int64 [M], ascending."""
    return (self._first + self._local).ravel()

  def fill_order(self, live: np.ndarray) -> list[int]:
    """Returns the free slots in the order in which to fill them: evenly over the devices, and first those with rows.

    Args:
      live: bool [B], the slots that are taken.
    """
    if not live.any():  # so that the devices and shapes of a batch do not depend on the one before
      self._local = self._choose(live, self.shape[0])
    held = np.isin(np.arange(live.size), self.slots)
    ranks = np.empty(live.size, np.int64)
    for first in self._first.ravel():
      own = slice(first, first + self._each)
      order = np.lexsort((~held[own], ~live[own]))  # live slots, then free ones with rows, then the others
      ranks[own][order] = np.arange(self._each)
    return sorted(np.flatnonzero(~live).tolist(), key=lambda i: (ranks[i], i))

  def rows_of(self, slots: Sequence[int]) -> np.ndarray:
    """Returns the rows of these slots, which must have some."""
    return np.searchsorted(self.slots, slots)

  def resize(self, live: np.ndarray, length: int) -> None:
    """Takes the shape that costs least and holds all live slots; their rows move if they must.

    Goes layer by layer, so that two whole caches never exist. A move costs as much as a few decode steps.

    Args:
      live: bool [B], the slots that need rows.
      length: the least number of positions.
    """
    shards = self._programs.shards
    count = shards * live.reshape(shards, -1).sum(1).max()
    shape = next(s for s in self._programs.shapes if s[0] >= count and s[1] >= length)
    if shape == self.shape and np.isin(np.flatnonzero(live), self.slots).all():
      return
    new = self._choose(live, shape[0])
    old = np.full((shards, self._each), self.shape[0])  # beyond the last row: nothing to take along
    np.put_along_axis(old, self._local, np.arange(self._local.shape[1])[None], 1)
    rows = np.take_along_axis(old, new, 1).ravel().astype(np.int32)
    rows = jax.device_put(rows, self._programs.rows)
    program = self._programs.resize(self.shape, shape)
    layers, self.layers = list(self.layers), ()
    for i in range(len(layers)):
      layers[i] = program(layers[i], rows)
    self.layers, self.shape, self._local = tuple(layers), shape, new

  def _choose(self, live: np.ndarray, count: int) -> np.ndarray:
    """Returns the slots, numbered on their devices, that get `count` rows: int64 [devices, rows of each]."""
    live = live.reshape(self._programs.shards, -1)
    order = np.argsort(~live, axis=1, kind="stable")
    return np.sort(order[:, : count // len(live)], axis=1)
