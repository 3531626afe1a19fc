"""The cache of a slot engine whose slots share the prompt of their group."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from async_rl.models import Cache
from async_rl.models import SharedPrompts
from async_rl.sampling._programs import Programs
from async_rl.sampling._samples import Sample
from async_rl.sampling._slot_cache import SlotCache
from async_rl.sampling._slot_cache import live_slots


class SharedCache(SlotCache):
  """A slot cache that keeps the prompt of a group once on each device that has slots of it.

  The rows of slots hold what follows: the prompt's last token, which the first decode step puts there, and the
  completion. A prompt is kept while a slot that claimed it lives. Samples that come alone, since they were resumed or
  restored, have a prompt of their own, so that there may be as many prompts as slots; where groups are whole, K times
  fewer, and the cache of prompts is as small.

  Attributes:
    prompt_count: G, the number of prompts that there is room for.

  Args:
    programs: the programs, which say the shapes that there are.
    slots: B, the number of slots.
  """

  def __init__(self, programs: Programs, slots: int):
    super().__init__(programs, slots)
    self._together = programs.config.group_size
    self.prompt_count = programs.prompt_counts(self.shape[0])[0]
    self._prompt_layers = programs.init_cache(self.prompt_count, programs.prompts)
    self._prompt_of = np.zeros(slots, np.int64)  # of each live slot, numbered on its device

  @property
  def nbytes(self) -> int:
    """Returns the bytes of all keys and values."""
    return super().nbytes + sum(x.nbytes for x in jax.tree.leaves(self._prompt_layers))

  def claim(self, slots: Sequence[int], samples: Sequence[Sample | None]) -> None:
    """Gives free slots the lowest number on each device that no live slot has."""
    live = live_slots(samples)
    for device in {slot // self._each for slot in slots}:
      taken = self._live_prompts(live, device)
      own = [slot for slot in slots if slot // self._each == device]
      self._prompt_of[own] = next(i for i in range(self._each) if i not in taken)

  def fit(self, samples: Sequence[Sample | None], drawn: Sequence[int], padded: Sequence[int]) -> None:
    """Takes the shapes that cost least and hold all samples, see `SlotCache.fit`; of prefixes, what fits is put."""
    del padded
    live = live_slots(samples)
    self.resize(live, max(drawn))
    self._resize_prompts(live)

  def put(self, length: int, new: Cache, batch: Sequence[Sequence[int]], samples: Sequence[Sample | None]) -> None:
    """Copies the prompts of prefixes to where they are shared, and what else they have into slots."""
    shards, config = self._programs.shards, self._programs.config
    prefix_of = {prompt: i for i, slots in enumerate(batch) for prompt in self._global(slots).tolist()}
    prompts = [(i, prompt) for prompt, i in prefix_of.items()]
    program = self._programs.put_prompts(length, self.prompt_count)
    self._prompt_layers = self._copy(program, self._prompt_layers, new, prompts, min(shards, config.group_size))
    own = [
      (i, row, len(sample.prompt) - 1)
      for i, slots in enumerate(batch)
      for slot, row in zip(slots, self.rows_of(slots), strict=True)
      if (sample := samples[slot]) is not None and sample.length
    ]
    if own:
      self.layers = self._copy(self._programs.put_own(length, *self.shape), self.layers, new, own)

  def prompts(self, samples: Sequence[Sample | None]) -> SharedPrompts:
    """Returns the prompts and which rows share them."""
    slots, shards, group = self.slots, self._programs.shards, self._programs.config.group_size
    live = [(row, sample) for row, slot in enumerate(slots.tolist()) if (sample := samples[slot]) is not None]
    rows = np.array([row for row, _ in live])
    members = np.array([sample.index for _, sample in live])
    counts = np.array([len(sample.prompt) - 1 for _, sample in live])
    prompts = self._global(slots[rows])
    each = self.shape[0] // shards
    lengths = np.zeros(self.prompt_count, np.int32)
    table = np.full((self.prompt_count, group), each, np.int32)
    places, starts = np.zeros((2, self.shape[0]), np.int32)
    lengths[prompts] = starts[rows] = counts
    table[prompts, members] = rows % each
    places[rows] = prompts % (self.prompt_count // shards) * group + members
    return SharedPrompts(self._prompt_layers, *jax.device_put((lengths, table, places, starts), self._programs.rows))

  def _resize_prompts(self, live: np.ndarray) -> None:
    """Takes the smallest number of prompts that there is a program for; they are numbered anew if it changes."""
    shards = self._programs.shards
    held = [sorted(self._live_prompts(live, device)) for device in range(shards)]
    counts = self._programs.prompt_counts(self.shape[0])
    count = next(n for n in counts if n >= shards * max(map(len, held)))
    if count == self.prompt_count:
      return
    moved = np.full((shards, count // shards), self.prompt_count, np.int32)  # beyond the last: nothing to take along
    for device, old in enumerate(held):
      moved[device, : len(old)] = old
      own = slice(device * self._each, (device + 1) * self._each)
      self._prompt_of[own] = np.searchsorted(old, self._prompt_of[own])
    program = self._programs.resize((self.prompt_count, self._programs.prompts), (count, self._programs.prompts))
    layers, self._prompt_layers = list(self._prompt_layers), ()
    self._prompt_layers, self.prompt_count = self._move(program, layers, moved.ravel()), count

  def _live_prompts(self, live: np.ndarray, device: int) -> set[int]:
    own = slice(device * self._each, (device + 1) * self._each)
    return set(self._prompt_of[own][live[own]].tolist())

  def _global(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the prompts of slots, numbered over all devices."""
    slots = np.asarray(slots)
    return slots // self._each * (self.prompt_count // self._programs.shards) + self._prompt_of[slots]
