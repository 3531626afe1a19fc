"""The cache of a slot engine, no larger than its live slots need."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from async_rl.models import Cache
from async_rl.models import SharedPrompts
from async_rl.sampling._programs import Programs
from async_rl.sampling._samples import Sample


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

  prompt_count = 0  # of prompts that slots share

  def __init__(self, programs: Programs, slots: int):
    self._programs = programs
    self.shape = programs.shapes[0]
    self._first = np.arange(programs.shards)[:, None] * (slots // programs.shards)  # each device's first slot
    self._each = slots // programs.shards
    self._together = 1  # slots that are best filled on the same device
    self._local = self._choose(np.zeros(slots, np.bool_), self.shape[0])
    self.layers = programs.init_cache(*self.shape)

  @property
  def slots(self) -> np.ndarray:
    """Returns the slot whose row each is, int64 [M], ascending."""
    return (self._first + self._local).ravel()

  @property
  def nbytes(self) -> int:
    """Returns the bytes of all keys and values."""
    return sum(x.nbytes for x in jax.tree.leaves(self.layers))

  def fill_order(self, live: np.ndarray) -> list[int]:
    """Returns the free slots in the order in which to fill them: evenly over the devices, and first those with rows.

    Args:
      live: bool [B], the slots that are taken.
    """
    if not live.any():  # so that the devices and shapes of a batch do not depend on the one before
      self._local = self._choose(live, self.shape[0])
    held = np.isin(np.arange(live.size), self.slots)
    taken = live.reshape(-1, self._each).sum(1)
    ranks = np.empty(live.size, np.int64)
    for first in self._first.ravel():
      own = slice(first, first + self._each)
      order = np.lexsort((~held[own], ~live[own]))  # live slots, then free ones with rows, then the others
      ranks[own][order] = np.arange(self._each)

    def turn(slot: int) -> tuple[int, int, int]:
      device, rank = slot // self._each, int(ranks[slot])
      return rank - (rank - int(taken[device])) % self._together, device, rank

    return sorted(np.flatnonzero(~live).tolist(), key=turn)

  def rows_of(self, slots: Sequence[int]) -> np.ndarray:
    """Returns the rows of these slots, which must have some."""
    return np.searchsorted(self.slots, slots)

  def claim(self, slots: Sequence[int], samples: Sequence[Sample | None]) -> None:
    """Notes that free slots will hold samples of one prefix.

    Args:
      slots: the slots.
      samples: the samples of all B slots before that, `None` where a slot is free.
    """

  def fit(self, samples: Sequence[Sample | None], drawn: Sequence[int], padded: Sequence[int]) -> None:
    """Takes the shape that costs least and holds all samples.

    Args:
      samples: the samples of the B slots.
      drawn: the number of completion tokens that each may reach.
      padded: the lengths of the prefixes that are put next.
    """
    lengths = [len(s.prompt) + n for s, n in zip(samples, drawn, strict=True) if s is not None]
    self.resize(live_slots(samples), max([*lengths, *padded]))

  def put(self, length: int, new: Cache, batch: Sequence[Sequence[int]], samples: Sequence[Sample | None]) -> None:
    """Copies prefixes into slots.

    Args:
      length: T, the padded length of the prefixes.
      new: their keys and values in L layers, each [R, N, T, d].
      batch: the slots of each prefix.
      samples: the samples of the B slots.
    """
    del samples
    targets = [(i, row) for i, slots in enumerate(batch) for row in self.rows_of(slots)]
    self.layers = self._copy(self._programs.put(length, *self.shape), self.layers, new, targets)

  def prompts(self, samples: Sequence[Sample | None]) -> SharedPrompts | None:
    """Returns the prompts that the slots share, for a decode step; `None` where every slot has its own."""
    del samples
    return None

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
    layers, self.layers = list(self.layers), ()
    self.layers = self._move(self._programs.resize(self.shape, shape), layers, rows)
    self.shape, self._local = shape, new

  def _choose(self, live: np.ndarray, count: int) -> np.ndarray:
    """Returns the slots, numbered on their devices, that get `count` rows: int64 [devices, rows of each]."""
    live = live.reshape(self._programs.shards, -1)
    order = np.argsort(~live, axis=1, kind="stable")
    return np.sort(order[:, : count // len(live)], axis=1)

  def _move(self, program: Callable[..., Any], layers: list[Any], rows: np.ndarray) -> Cache:
    """Runs a program of `_decode.resize` in every layer and lets go of each at once; `layers` is used up."""
    rows = jax.device_put(rows, self._programs.rows)
    for i in range(len(layers)):
      layers[i] = program(layers[i], rows)
    return tuple(layers)

  def _copy(
    self,
    program: Callable[..., Any],
    layers: Cache,
    new: Cache,
    targets: Sequence[tuple[int, ...]],
    copies: int | None = None,
  ) -> Cache:
    """Runs a program of `_decode.put`.

    Args:
      program: the program.
      layers: what it copies into; donated.
      new: the keys and values of the prefixes.
      targets: of each copy, the prefix, the row to put it into and, where the program asks for it, the start.
      copies: the most copies of a prefix; `None` for the samples of a group.
    """
    size = len(new[0][0]) * (copies or self._programs.config.group_size)
    beyond = 2 * self._programs.config.slots + np.arange(size)  # rows that there are not: dropped
    table = np.zeros((len(targets[0]), size), np.int32)
    table[1] = beyond
    table[:, : len(targets)] = np.array(targets).T
    index = jax.device_put(tuple(table), self._programs.whole)
    return program(layers, new, *index)


def live_slots(samples: Sequence[Sample | None]) -> np.ndarray:
  """Returns which slots hold a sample, bool [B]."""
  return np.array([s is not None for s in samples])
