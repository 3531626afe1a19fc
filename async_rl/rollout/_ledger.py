"""The ledger: the account in which every generated token ends, and the checksums of the weights that drew them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

#: The number of versions whose checksums are kept: more than any lag bound reaches back.
_KEPT_VERSIONS = 1000


class Ledger:
  """Counts generated tokens and how they ended, and knows the weights that drew them by their checksums; thread-safe.

  Every generated token ends in one account: `trained`; `masked/<reason>` (in a trained batch, but out of its loss);
  `stale` (beyond the lag bound: always 0 unless the bound is broken on purpose); `failed/<reason>` (its group was
  given up). Until then it is saved: in the sampler, in the buffer or in a checkpoint. `check_balance` compares this
  remainder with the tokens that those places hold.

  The checksum of a version is that of the weights which the sampler held, `Sampler.checksum`. It is the same on every
  process of a run. Checksums are compared with those entered since the start of the process: the one of a damaged copy,
  brought back by a checkpoint, would refuse the right weights after every restart.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._generated = 0
    self._ended: collections.Counter[str] = collections.Counter(trained=0, stale=0)
    self._checksums: dict[int, int] = {}
    self._earlier: dict[int, int] = {}  # the checksums of a checkpoint, for the next one

  def add_generated(self, tokens: int) -> None:
    """Enters newly drawn tokens."""
    with self._lock:
      self._generated += _checked(tokens)

  def close_trained(self, tokens: int, masked: dict[str, int] | None = None) -> None:
    """Closes the tokens of a batch: those that counted in its loss, and those `masked`, by reason."""
    with self._lock:
      self._ended["trained"] += _checked(tokens)
      for reason, count in (masked or {}).items():
        self._ended[f"masked/{reason}"] += _checked(count)

  def close_stale(self, tokens: int) -> None:
    """Closes tokens that were dropped for their lag."""
    with self._lock:
      self._ended["stale"] += _checked(tokens)

  def close_failed(self, tokens: int, reason: str) -> None:
    """Closes tokens of groups that were given up."""
    with self._lock:
      self._ended[f"failed/{reason}"] += _checked(tokens)

  def count_tokens(self) -> dict[str, int]:
    """Returns the tokens by account, with `generated` and `saved` (generated and not yet ended)."""
    with self._lock:
      return {"generated": self._generated, **self._ended, "saved": self._generated - self._ended.total()}

  def check_balance(self, saved: int) -> None:
    """Checks that no token is lost or counted twice.

    Args:
      saved: the tokens that the sampler, the buffer and the places between them hold, counted there.

    Raises:
      AssertionError: if the accounts do not add up; the message lists them.
    """
    counts = self.count_tokens()
    if counts["saved"] != saved:
      raise AssertionError(
        f"The ledger does not balance: {counts['saved']} tokens should be saved, {saved} are: {counts}."
      )

  def add_weights(self, version: int, checksum: int) -> None:
    """Enters the checksum of weights that draw tokens.

    Raises:
      AssertionError: if other weights of this version drew tokens before, in this process.
    """
    with self._lock:
      entered = self._checksums.setdefault(version, checksum)
      if entered != checksum:
        raise AssertionError(
          f"The sampler's weights of step {version} have the checksum {checksum:08x}, those that it held before have "
          f"{entered:08x}: a copy of them is damaged."
        )
      self._checksums = _latest(self._checksums)

  def weights(self, since: int = 0) -> dict[int, int]:
    """Returns the checksums of the weights that drew tokens in this process, by version, from version `since` on."""
    with self._lock:
      return {version: checksum for version, checksum in self._checksums.items() if version >= since}

  def state(self) -> dict[str, Any]:
    """Returns the accounts as numbers, for a checkpoint."""
    with self._lock:
      checksums = {str(version): checksum for version, checksum in _latest(self._earlier | self._checksums).items()}
      return {"generated": self._generated, "ended": dict(self._ended), "weights": checksums}

  def restore(self, state: dict[str, Any], saved: int) -> None:
    """Continues from a checkpoint.

    Args:
      state: the return value of `state`.
      saved: the tokens that the checkpoint brought back. The other saved tokens, of unfinished sequences, are entered
        as failed by the restart.
    """
    with self._lock:
      self._generated = state["generated"]
      self._ended = collections.Counter(state["ended"])
      self._earlier = {int(version): checksum for version, checksum in state.get("weights", {}).items()}
      lost = self._generated - self._ended.total() - saved
    if lost:
      self.close_failed(lost, "restart")

  def merge(self, states: Sequence[dict[str, Any]]) -> None:
    """Continues from the checkpoint of other processes, whose saved tokens are all entered as failed by the restart.

    Args:
      states: the return values of `state` in those processes.
    """
    ended: collections.Counter[str] = collections.Counter()
    for state in states:
      ended.update(state["ended"])
    weights = {version: checksum for state in states for version, checksum in state.get("weights", {}).items()}
    generated = sum(state["generated"] for state in states)
    self.restore({"generated": generated, "ended": ended, "weights": weights}, saved=0)


def _latest(checksums: dict[int, int]) -> dict[int, int]:
  """Returns the checksums of the versions that are kept, ascending."""
  return dict(sorted(checksums.items())[-_KEPT_VERSIONS:])


def _checked(tokens: int) -> int:
  if tokens < 0:
    raise ValueError(f"*tokens* must be at least 0, got tokens={tokens}.")
  return int(tokens)
