"""The folder of a run: where its files are, and whether a process may use it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import TextIO

_MARK = "run.json"
_LOCK = ".lock"
_REPLACED = ".replaced"
#: Names of what a run writes, including what `Checkpointer` and Weights & Biases put beside the rest.
_ENTRIES = frozenset(
  {
    _MARK,
    "base",
    "checkpoints",
    "config.txt",
    "damaged",
    "metrics.jsonl",
    "metrics.tmp",
    "reference",
    "report.png",
    "schedule.jsonl",
    "tensorboard",
    "wandb",
    "wandb_id.txt",
  }
)
#: The schedules of the processes beside the first one.
_OTHER_SCHEDULE = re.compile(r"schedule_\d+\.jsonl")


class RunFolderError(RuntimeError):
  """The folder cannot hold this run; the message is one sentence for the user, with the remedy."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """An opened folder and the places in it.

  The folder is locked until `close`, or until the process ends, however that happens: no other process can open it.

  Attributes:
    path: the folder.
    resumed: whether it already held this run.
    process: the number of this process among those of the run; the first one alone locks the folder and writes what
      they share.
  """

  path: pathlib.Path
  resumed: bool
  _lock: TextIO | None = dataclasses.field(repr=False, compare=False)
  process: int = 0

  def close(self) -> None:
    """Releases the lock. Idempotent."""
    if self._lock is not None:
      self._lock.close()

  def __enter__(self) -> RunFolder:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  @property
  def checkpoints(self) -> pathlib.Path:
    """Folder of the Orbax checkpoints."""
    return self.path / "checkpoints"

  @property
  def reference(self) -> pathlib.Path:
    """Checkpoint of the reference policy."""
    return self.path / "reference"

  @property
  def metrics(self) -> pathlib.Path:
    """Metrics, one JSON object a line."""
    return self.path / "metrics.jsonl"

  @property
  def tensorboard(self) -> pathlib.Path:
    """Folder of the TensorBoard events."""
    return self.path / "tensorboard"

  @property
  def wandb_id(self) -> pathlib.Path:
    """Identifier of the run at Weights & Biases."""
    return self.path / "wandb_id.txt"

  @property
  def config(self) -> pathlib.Path:
    """The configuration as text."""
    return self.path / "config.txt"

  @property
  def schedule(self) -> pathlib.Path:
    """Recorded schedule of this process."""
    return schedule_of(self.path / "schedule.jsonl", self.process)

  @property
  def report(self) -> pathlib.Path:
    """Picture of the run."""
    return self.path / "report.png"

  @classmethod
  def open(
    cls, path: str | pathlib.Path, config_text: str, fingerprint: Mapping[str, Any], *, overwrite: bool = False
  ) -> RunFolder:
    """Opens or makes the folder of a run, and locks it.

    Args:
      path: the folder; made if missing.
      config_text: the configuration, to be read by people; written to config.txt.
      fingerprint: the options that make two runs the same: a JSON-like mapping, without those that may change on a
        resume (number of steps, intervals, log targets).
      overwrite: whether to replace a run that the folder holds. It is deleted by `discard_replaced`, and put back by
        `remove`; what no run has written stays where it is.

    Raises:
      RunFolderError: if the folder is in use, holds another run or other files, or cannot be written.
    """
    path = pathlib.Path(path).expanduser()
    fingerprint = json.loads(json.dumps(fingerprint))
    lock = None
    try:
      _check_no_foreign_files(path)
      path.mkdir(parents=True, exist_ok=True)
      lock = _take_lock(path)
      _check_no_foreign_files(path)
      resumed = (path / _MARK).exists() and not overwrite
      if resumed:
        _check_same(path, fingerprint)
      else:
        _set_aside(path)
      if not resumed:
        (path / _MARK).write_text(json.dumps(fingerprint, indent=2) + "\n")
      (path / "config.txt").write_text(config_text)
      return cls(path, resumed, lock)
    except BaseException as error:
      if lock is not None:
        lock.close()
      if isinstance(error, OSError):
        raise RunFolderError(f"cannot write the run folder {path}: {error.strerror or error}") from error
      raise

  @classmethod
  def join(cls, path: str | pathlib.Path, process: int) -> RunFolder:
    """Returns the folder for another process of the run, after the first one has opened it.

    Args:
      path: the folder.
      process: the number of this process, above 0.

    Raises:
      RunFolderError: if this process does not see the folder.
    """
    path = pathlib.Path(path).expanduser()
    if not (path / _MARK).exists():
      raise RunFolderError(
        f"process {process} does not see {path}, which process 0 has opened: choose a folder on storage that all "
        "processes share"
      )
    return cls(path, True, None, process)

  def discard_replaced(self) -> None:
    """Deletes the run that this one replaces; call it once this one has begun."""
    shutil.rmtree(self.path / _REPLACED, ignore_errors=True)

  def remove(self) -> None:
    """Deletes what this run wrote, puts back the run that it replaced, and releases the lock."""
    for entry in _entries_of_run(self.path):
      _delete(entry)
    replaced = self.path / _REPLACED
    if replaced.is_dir():
      for entry in replaced.iterdir():
        entry.rename(self.path / entry.name)
      replaced.rmdir()
    if [entry.name for entry in self.path.iterdir()] == [_LOCK]:
      shutil.rmtree(self.path, ignore_errors=True)
    self.close()


def find_checkpoints(path: str | pathlib.Path) -> pathlib.Path:
  """Returns the folder of the checkpoints of a run, which may belong to another process.

  Raises:
    RunFolderError: if the folder holds no run, or its run has no checkpoint yet.
  """
  path = pathlib.Path(path).expanduser()
  if not (path / _MARK).exists():
    missing = f"{_MARK} is missing" if path.is_dir() else "there is no such folder"
    raise RunFolderError(f"{path} holds no run: {missing}; give the folder of a run")
  if not any(entry.name.isdecimal() for entry in path.glob("checkpoints/*")):
    raise RunFolderError(f"the run in {path} has no checkpoint yet; wait for its first one")
  return path / "checkpoints"


def schedule_of(path: pathlib.Path, process: int) -> pathlib.Path:
  """Returns the file of a process's schedule; `path` is the first one's."""
  return path.with_stem(f"{path.stem}_{process}") if process else path


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
  """Yields "name: old value -> new value" for each difference of two JSON-like trees."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in [*old, *(key for key in new if key not in old)]:
      yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
  elif old != new:
    yield f"{name}: {old!r} -> {new!r}"


def _take_lock(path: pathlib.Path) -> TextIO:
  """Locks the folder for this process and returns the open lock file, which names the process."""
  while True:
    lock = (path / _LOCK).open("a+")
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if (path / _LOCK).exists() and os.path.samestat(os.fstat(lock.fileno()), (path / _LOCK).stat()):
        break
    except BlockingIOError as error:
      lock.seek(0)
      owner = lock.read().strip() or "another process"
      lock.close()
      raise RunFolderError(
        f"{path} is in use by {owner}: wait until it has ended, or choose another folder with --run-dir"
      ) from error
    lock.close()  # the process that held it removed the folder
  lock.truncate(0)
  lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
  lock.flush()
  return lock


def _check_no_foreign_files(path: pathlib.Path) -> None:
  if path.is_dir() and not (path / _MARK).exists() and any(entry.name != _LOCK for entry in path.iterdir()):
    raise RunFolderError(f"{path} contains files that do not belong to a run: choose another folder")


def _entries_of_run(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns what a run has written, apart from the lock, which other processes must keep meeting."""
  return [entry for entry in path.iterdir() if entry.name in _ENTRIES or _OTHER_SCHEDULE.fullmatch(entry.name)]


def _set_aside(path: pathlib.Path) -> None:
  """Moves a run into a folder of its own within its folder; one that lies there already is the older of the two."""
  entries = _entries_of_run(path)
  if entries:
    shutil.rmtree(path / _REPLACED, ignore_errors=True)
    (path / _REPLACED).mkdir()
  for entry in entries:
    entry.rename(path / _REPLACED / entry.name)


def _delete(path: pathlib.Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink()


def _check_same(path: pathlib.Path, fingerprint: Mapping[str, Any]) -> None:
  try:
    old = json.loads((path / _MARK).read_text())
  except ValueError:
    old = None
  if not isinstance(old, dict):
    raise RunFolderError(f"{path / _MARK} is damaged: choose another folder, or pass --overwrite to delete the run")
  changes = list(differences(old, fingerprint))
  if changes:
    raise RunFolderError(
      f"{path} holds another run ({'; '.join(changes)}): undo these changes to resume it, "
      f"choose another folder (where --init-from {shlex.quote(str(path))} starts from its parameters), or pass "
      "--overwrite to delete it and start again"
    )
