"""The warm starts of a sweep, one per seed, kept with its results.

Supervised training from the same key ends in other weights on another machine, or in a batch of another size, and a
difference between two runs of one seed is paired only if both began with the same weights. So warm starts are made
once, saved in the sweep's folder before any run uses them, and identified by a checksum that every run's record holds.
"""

from __future__ import annotations

import os
import pathlib
import zlib
from collections.abc import Collection
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reproductions import _lag_sweep_tasks as problems


class Starter(Protocol):
  """Makes a warm start; `Runner` says how."""

  def warm_start(
    self, key: jax.Array, train: problems.Problems, test: problems.Problems
  ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def checksum(weights: np.ndarray) -> int:
  """Returns the CRC-32 of weights, by which a run's record names its warm start."""
  return zlib.crc32(np.ascontiguousarray(weights, np.float32).tobytes())


class WarmStarts:
  """The warm starts of one task by seed, read from a file and extended there.

  Args:
    file: an npz file, which need not exist yet.
  """

  def __init__(self, file: pathlib.Path):
    self.file = file
    self.weights: dict[int, np.ndarray] = {}
    self.updates: dict[int, int] = {}
    self.accuracies: dict[int, float] = {}
    if file.exists():
      with np.load(file) as arrays:
        seeds = arrays["seeds"].tolist()
        self.weights = dict(zip(seeds, arrays["weights"], strict=True))
        self.updates = dict(zip(seeds, arrays["updates"].tolist(), strict=True))
        self.accuracies = dict(zip(seeds, arrays["accuracies"].tolist(), strict=True))

  def missing(self, seeds: Collection[int]) -> list[int]:
    """Returns the seeds without a warm start, in order."""
    return sorted(set(seeds) - set(self.weights))

  def make(
    self, seeds: Collection[int], runner: Starter, train: problems.Problems, test: problems.Problems
  ) -> list[int]:
    """Makes the missing warm starts of *seeds* in one batch, saves all, and returns the seeds that were missing."""
    missing = self.missing(seeds)
    if missing:
      keys = jax.vmap(jax.random.key)(jnp.array(missing))
      made = jax.jit(jax.vmap(runner.warm_start, in_axes=(0, None, None)))(keys, train, test)
      weights, updates, accuracies = (np.asarray(x) for x in made)
      self.weights |= dict(zip(missing, weights, strict=True))
      self.updates |= dict(zip(missing, updates.tolist(), strict=True))
      self.accuracies |= dict(zip(missing, accuracies.tolist(), strict=True))
      self._save()
    return missing

  def checksums(self) -> dict[int, int]:
    """Returns the checksum of every warm start by seed."""
    return {seed: checksum(weights) for seed, weights in self.weights.items()}

  def _save(self) -> None:
    self.file.parent.mkdir(parents=True, exist_ok=True)
    part = self.file.with_name(f"part_{self.file.name}")
    np.savez(
      part,
      seeds=np.array(list(self.weights)),
      weights=np.stack(list(self.weights.values())),
      updates=np.array(list(self.updates.values())),
      accuracies=np.array(list(self.accuracies.values())),
    )
    os.replace(part, self.file)
