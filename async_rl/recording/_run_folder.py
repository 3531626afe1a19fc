"""The folder of a run: where its files are, and whether a process may use it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import socket
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TextIO

from async_rl._buckets import PROBE
from async_rl._buckets import check_access
from async_rl._paths import Path
from async_rl._paths import as_path
from async_rl._paths import delete
from async_rl._paths import list_folder
from async_rl._paths import make_folder
from async_rl._paths import move
from async_rl._paths import write_text
from async_rl.recording._bucket_lock import BucketLock
from async_rl.recording._bucket_lock import InUseError

_MARK = "run.json"
_LOCK = ".lock"
_REPLACED = ".replaced"
#: Names of what a run writes, including what `Checkpointer` and Weights & Biases put beside the rest.
_ENTRIES = frozenset(
  {
    _MARK,
    "base",
    "checkpoints",
    "config.tmp",
    "config.txt",
    "damaged",
    "metrics.jsonl",
    "metrics.tmp",
    "reference",
    "report.png",
    "run.tmp",
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
  In a bucket, the lock of a process that was killed ends some seconds later, see `BucketLock`.

  Attributes:
    path: the folder, on a disk or in a bucket.
    resumed: whether it already held this run.
    process: the number of this process among those of the run; the first one alone locks the folder and writes what
      they share.
  """

  path: Path
  resumed: bool
  _lock: TextIO | BucketLock | None = dataclasses.field(repr=False, compare=False)
  process: int = 0

  def close(self) -> None:
    """Releases the lock. Idempotent."""
    if self._lock is not None:
      self._lock.close()

  def check_lock(self) -> None:
    """Raises RunFolderError if another process took over the folder: this one could not reach its bucket for long."""
    if isinstance(self._lock, BucketLock):
      try:
        self._lock.check()
      except InUseError as error:
        raise RunFolderError(
          f"{self.path} was taken over by {error} while this process could not reach the bucket: let only one of them "
          "go on"
        ) from error

  def __enter__(self) -> RunFolder:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  @property
  def checkpoints(self) -> Path:
    """Folder of the Orbax checkpoints."""
    return self.path / "checkpoints"

  @property
  def reference(self) -> Path:
    """Checkpoint of the reference policy."""
    return self.path / "reference"

  @property
  def metrics(self) -> Path:
    """Metrics, one JSON object a line."""
    return self.path / "metrics.jsonl"

  @property
  def tensorboard(self) -> Path:
    """Folder of the TensorBoard events."""
    return self.path / "tensorboard"

  @property
  def wandb_id(self) -> Path:
    """Identifier of the run at Weights & Biases."""
    return self.path / "wandb_id.txt"

  @property
  def config(self) -> Path:
    """The configuration as text."""
    return self.path / "config.txt"

  @property
  def schedule(self) -> Path:
    """Recorded schedule of this process."""
    return schedule_of(self.path / "schedule.jsonl", self.process)

  @property
  def report(self) -> Path:
    """Picture of the run."""
    return self.path / "report.png"

  @classmethod
  def open(
    cls, path: str | Path, config_text: str, fingerprint: Mapping[str, Any], *, overwrite: bool = False
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
    path = as_path(path, "run_dir")
    if not isinstance(path, pathlib.Path) and len(path.parts) < 4:
      raise RunFolderError(f"{str(path)!r} is a whole bucket: choose a folder in it, such as {path / 'runs' / 'first'}")
    fingerprint = json.loads(json.dumps(fingerprint))
    lock = None
    try:
      now = check_access(path, write=True)
      _check_no_foreign_files(path)
      make_folder(path)
      lock = _take_lock(path, now)
      if not ((path / _MARK).exists() and (path / _REPLACED / _MARK).exists()):
        _put_back(path)  # what an earlier start set aside and could not replace
      _check_no_foreign_files(path)
      resumed = (path / _MARK).exists() and not overwrite
      if resumed:
        _check_same(path, fingerprint)
        write_text(path / "config.txt", config_text)
      else:
        _begin(path, fingerprint, config_text)
      return cls(path, resumed, lock)
    except BaseException as error:
      if lock is not None:
        lock.close()
      if isinstance(error, OSError):
        raise RunFolderError(f"cannot write the run folder {path}: {error.strerror or error}") from error
      raise

  @classmethod
  def join(cls, path: str | Path, process: int) -> RunFolder:
    """Returns the folder for another process of the run, after the first one has opened it.

    Args:
      path: the folder.
      process: the number of this process, above 0.

    Raises:
      RunFolderError: if this process does not see the folder.
    """
    path = as_path(path, "run_dir")
    try:
      check_access(path, write=True)
    except OSError as error:
      raise RunFolderError(f"process {process} cannot write the run folder {path}: {error}") from error
    if not (path / _MARK).exists():
      raise RunFolderError(
        f"process {process} does not see {path}, which process 0 has opened: choose a folder on storage that all "
        "processes share"
      )
    return cls(path, True, None, process)

  def discard_replaced(self) -> None:
    """Deletes the run that this one replaces; call it once this one has begun."""
    with contextlib.suppress(OSError):
      for entry in _mark_last(list_folder(self.path / _REPLACED)):
        delete(entry)
      delete(self.path / _REPLACED)

  def remove(self) -> None:
    """Deletes what this run wrote, puts back the run that it replaced, and releases the lock."""
    for entry in _mark_last(_entries_of_run(self.path)):
      delete(entry)
    _put_back(self.path)
    if isinstance(self.path, pathlib.Path) and [entry.name for entry in list_folder(self.path)] == [_LOCK]:
      delete(self.path)
    self.close()


def find_checkpoints(path: str | Path) -> Path:
  """Returns the folder of the checkpoints of a run, which may belong to another process.

  Raises:
    RunFolderError: if the folder holds no run, or its run has no checkpoint yet.
  """
  path = as_path(path)
  check_access(path, checkpoints=True)
  if not (path / _MARK).exists():
    raise RunFolderError(f"{describe_missing_run(path, _MARK)}; give the folder of a run")
  if not _has_checkpoint(path):
    raise RunFolderError(f"the run in {path} has no checkpoint yet; wait for its first one")
  return path / "checkpoints"


def describe_missing_run(path: Path, file: str) -> str:
  """Returns why a folder without `file` holds no run."""
  missing = f"{file} is missing" if path.is_dir() else "there is no such folder"
  return f"{path} holds no run: {missing}"


def schedule_of(path: Path, process: int) -> Path:
  """Returns the file of a process's schedule; `path` is the first one's."""
  return path.with_stem(f"{path.stem}_{process}") if process else path


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
  """Yields "name: old value -> new value" for each difference of two JSON-like trees."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in [*old, *(key for key in new if key not in old)]:
      yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
  elif old != new:
    yield f"{name}: {old!r} -> {new!r}"


def _take_lock(path: Path, now: float) -> TextIO | BucketLock:
  """Locks the folder for this process; `now` is the time of the bucket that holds it."""
  try:
    return lock_file(path / _LOCK) if isinstance(path, pathlib.Path) else BucketLock(path / _LOCK, now)
  except InUseError as error:
    raise RunFolderError(
      f"{path} is in use by {error}: wait until it has ended, or choose another folder with --run-dir"
    ) from error


def lock_file(path: pathlib.Path, waiting: str = "") -> TextIO:
  """Locks a file, made if missing, and returns it open; it names the process.

  Args:
    path: the file.
    waiting: printed where another process has it locked, before waiting for that one; if empty, there is no waiting.

  Raises:
    InUseError: if another process has it locked, unless this one waits.
  """
  while True:
    lock = path.open("a+")
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      if not waiting:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        raise InUseError(owner) from error
      print(waiting, flush=True)
      fcntl.flock(lock, fcntl.LOCK_EX)
    if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
      break
    lock.close()  # the process that held it removed the folder
  lock.truncate(0)
  lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
  lock.flush()
  return lock


def _check_no_foreign_files(path: Path) -> None:
  names = {entry.name for entry in list_folder(path)}
  holds_run = _MARK in names or (path / _REPLACED / _MARK).exists()
  if not holds_run and {"checkpoints", "config.txt"} <= names:
    raise RunFolderError(f"{path} holds a run whose {_MARK} is missing: restore it, or choose another folder")
  ours = {_LOCK, _REPLACED, "run.tmp"}
  if not holds_run and any(name not in ours and not name.startswith(PROBE) for name in names):
    raise RunFolderError(f"{path} contains files that do not belong to a run: choose another folder")


def _entries_of_run(path: Path) -> list[Path]:
  """Returns what a run has written, apart from the lock, which other processes must keep meeting."""
  return [entry for entry in list_folder(path) if entry.name in _ENTRIES or _OTHER_SCHEDULE.fullmatch(entry.name)]


def _begin(path: Path, fingerprint: Mapping[str, Any], config_text: str) -> None:
  """Begins a run in the folder; the run that this holds is set aside."""
  _set_aside(path)
  try:
    write_text(path / _MARK, json.dumps(fingerprint, indent=2) + "\n")
    write_text(path / "config.txt", config_text)
  except OSError:
    delete(path / _MARK)
    _put_back(path)
    raise


def _set_aside(path: Path) -> None:
  """Moves a run into a folder of its own within its folder.

  If one lies there already, that is the older of the two; it is kept in place of the newer one if this never began.
  """
  entries = _entries_of_run(path)
  if list_folder(path / _REPLACED) and not _has_checkpoint(path):
    for entry in _mark_last(entries):
      delete(entry)
    return
  if entries:
    delete(path / _REPLACED)
    make_folder(path / _REPLACED)
  for entry in _mark_last(entries):
    move(entry, path / _REPLACED / entry.name)


def _put_back(path: Path) -> None:
  """Moves what was set aside to its place, where nothing is."""
  for entry in _mark_last(list_folder(path / _REPLACED)):
    move(entry, path / entry.name)
  delete(path / _REPLACED)


def _mark_last(entries: Sequence[Path]) -> list[Path]:
  """Sorts entries so that a folder has its mark as long as it has anything else."""
  return sorted(entries, key=lambda entry: entry.name == _MARK)


def _has_checkpoint(path: Path) -> bool:
  return any(entry.name.isdecimal() for entry in list_folder(path / "checkpoints"))


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
