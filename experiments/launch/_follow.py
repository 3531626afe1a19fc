"""What the hosts of a run leave in the bucket: their logs, which are printed as they grow, and their states."""

from __future__ import annotations

import pathlib

from experiments.launch._commands import say
from experiments.launch._job import RESTART_STATUSES


class Follower:
  """Reads the copy of an attempt's folder, as often as it is copied.

  A host leaves NAME.log and NAME.state; the state is "installing", "running RESTARTS" or "ended STATUS", and a number
  that changes as long as the host lives.

  Args:
    folder: the copy.
    count: the number of hosts.
  """

  def __init__(self, folder: pathlib.Path, count: int):
    self._folder, self._count = folder, count
    self._read: dict[str, int] = {}
    self._states: dict[str, str] = {}
    self._silent: dict[str, int] = {}
    self._looks = 0

  def look(self) -> None:
    """Prints what is new in the logs, and reads the states."""
    self._looks += 1
    for file in sorted(self._folder.glob("*.log")):
      text = file.read_bytes()[self._read.get(file.stem, 0) :]
      whole = text[: text.rfind(b"\n") + 1]
      self._read[file.stem] = self._read.get(file.stem, 0) + len(whole)
      for line in whole.decode(errors="replace").splitlines():
        say(f"[{file.stem}] {line}")
    for file in sorted(self._folder.glob("*.state")):
      state = file.read_text().strip()
      self._silent[file.stem] = self._silent.get(file.stem, 0) + 1 if self._states.get(file.stem) == state else 0
      self._states[file.stem] = state

  @property
  def ended(self) -> dict[str, int]:
    """Returns the exit statuses of the hosts that ended, by their names."""
    words = {host: state.split() for host, state in self._states.items()}
    return {host: int(state[1]) for host, state in words.items() if state[0] == "ended"}

  @property
  def status(self) -> int | None:
    """Returns the exit status of the run: an error's if there is one; `None` while it goes on."""
    ended = self.ended
    errors = [status for status in ended.values() if status not in (0, *RESTART_STATUSES)]
    if errors:
      return errors[0]
    return max(ended.values()) if len(ended) >= self._count else None

  def find_silent(self, looks: int) -> str:
    """Returns a sentence about the hosts that gave no sign of life in that many looks; "" if there are none."""
    silent = [host for host, count in self._silent.items() if count >= looks and host not in self.ended]
    never = self._count - len(self._states) if self._looks > looks else 0
    parts = [", ".join(silent)] * bool(silent) + [f"{never} that never gave a sign of life"] * (never > 0)
    lost = len(silent) + max(never, 0)
    return f"{lost} of {self._count} hosts are lost: {' and '.join(parts)}" if lost else ""
