"""What the host keeps of each unfinished sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from async_rl.types import NO_VERSION
from async_rl.types import Completion


@dataclasses.dataclass(eq=False)
class Sample:
  """An unfinished sample. The host's copy is the only one: the device holds nothing of it but the cache.

  Attributes:
    ticket: the group.
    index: its place in the group.
    prompt: int32 [T].
    tokens: int32 [C], of which the first `length` are there.
    logprobs: float32 [C].
    versions: int32 [C], `NO_VERSION` where the policy did not draw the token.
    length: completion tokens so far.
  """

  ticket: int
  index: int
  prompt: np.ndarray
  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  length: int = 0

  @classmethod
  def empty(cls, ticket: int, index: int, prompt: np.ndarray, limit: int) -> Sample:
    """A sample of which nothing is drawn yet; `limit` is its longest completion C."""
    return cls(
      ticket,
      index,
      prompt,
      np.zeros(limit, np.int32),
      np.zeros(limit, np.float32),
      np.full(limit, NO_VERSION, np.int32),
    )

  def prefix(self) -> np.ndarray:
    """Prompt and completion so far."""
    return np.concatenate([self.prompt, self.tokens[: self.length]])

  def extend(self, tokens: np.ndarray, logprobs: np.ndarray | np.float32, versions: np.ndarray | np.int32) -> None:
    """Adds tokens at the end; scalars are for all of them."""
    new = slice(self.length, self.length + len(tokens))
    self.tokens[new], self.logprobs[new], self.versions[new] = tokens, logprobs, versions
    self.length = new.stop

  def completion(self, finish: str) -> Completion:
    tokens, logprobs, versions = (a[: self.length].copy() for a in (self.tokens, self.logprobs, self.versions))
    return Completion(self.ticket, self.index, tokens, logprobs, versions, versions != NO_VERSION, finish)


class Snapshot(NamedTuple):
  """All unfinished samples of an engine, waiting ones included, as numpy arrays: N samples, S = capacity.

  Attributes:
    tickets: uint32 [N].
    samples: int32 [N].
    prompt_lengths: int32 [N].
    lengths: int32 [N], completion tokens so far.
    tokens: int32 [N, S], prompt and completion, 0 behind.
    logprobs: float32 [N, C].
    versions: int32 [N, C].
  """

  tickets: np.ndarray
  samples: np.ndarray
  prompt_lengths: np.ndarray
  lengths: np.ndarray
  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray


def pack(samples: Sequence[Sample], capacity: int, limit: int) -> Snapshot:
  """Samples to arrays; `capacity` is S, `limit` is C."""
  tokens = np.zeros((len(samples), capacity), np.int32)
  for row, sample in zip(tokens, samples, strict=True):
    prefix = sample.prefix()
    row[: len(prefix)] = prefix
  table = lambda name, dtype: np.array([getattr(s, name) for s in samples], dtype).reshape(-1, limit)
  return Snapshot(
    tickets=np.array([s.ticket for s in samples], np.uint32),
    samples=np.array([s.index for s in samples], np.int32),
    prompt_lengths=np.array([len(s.prompt) for s in samples], np.int32),
    lengths=np.array([s.length for s in samples], np.int32),
    tokens=tokens,
    logprobs=table("logprobs", np.float32),
    versions=table("versions", np.int32),
  )


def unpack(state: Snapshot, limit: int) -> list[Sample]:
  """Inverse of `pack`; the longest completion `limit` may have changed in between."""
  samples = []
  for ticket, index, start, length, tokens, logprobs, versions in zip(*state, strict=True):
    sample = Sample.empty(int(ticket), int(index), np.array(tokens[:start]), limit)
    sample.extend(tokens[start : start + length], logprobs[:length], versions[:length])
    samples.append(sample)
  return samples
