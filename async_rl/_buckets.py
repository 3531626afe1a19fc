"""What lies in a bucket and is needed on a disk, the other way round, and the rights to a bucket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from async_rl._paths import Path
from async_rl._paths import file_system

#: The start of the names of the objects with which rights are tried.
PROBE = ".probe-"


def cache_folder() -> pathlib.Path:
  """Returns the folder of copies of what lies elsewhere: $ASYNC_RL_CACHE, by default ~/.cache/async_rl."""
  cache = os.environ.get("ASYNC_RL_CACHE") or pathlib.Path.home() / ".cache" / "async_rl"
  return pathlib.Path(cache).expanduser()


def copy_to_disk(path: Path) -> pathlib.Path:
  """Returns a file or folder on the disk: itself, or a copy of what a bucket holds, made once for each state of it.

  Copies are kept in `cache_folder()`.

  Raises:
    FileNotFoundError: if there is nothing at `path` in the bucket.
  """
  if isinstance(path, pathlib.Path):
    return path
  check_access(path)
  files = file_system()
  start = str(path).removeprefix("gs://")
  found = {name: entry for name, entry in files.find(start, detail=True).items() if not name.endswith("/")}
  if not found or any(".." in name.split("/") for name in found):
    raise FileNotFoundError(f"there is no file or folder at {path}; check the path")
  state = "\n".join(f"{name} {entry['generation']}" for name, entry in sorted(found.items()))
  folder = cache_folder() / "buckets" / hashlib.sha256(state.encode()).hexdigest()[:16]
  if not folder.exists():
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
      for name in found:
        target = pathlib.Path(scratch, "copy", path.name + name.removeprefix(start))
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(name, str(target))
      with contextlib.suppress(OSError):  # another process has made the same one
        pathlib.Path(scratch, "copy").rename(folder)
  return folder / path.name


@contextlib.contextmanager
def written_on_disk(path: Path) -> Iterator[pathlib.Path]:
  """Gives a place on the disk for a new folder or file, which is `path`, or is uploaded there at the end."""
  if isinstance(path, pathlib.Path):
    yield path
    return
  if path.exists():
    raise FileExistsError(f"{path} exists; choose another folder or remove it.")
  mirror = Mirror(path)
  try:
    yield mirror.local
    mirror.upload()
  finally:
    mirror.discard()


class Mirror:
  """A file, or a folder of files, that grows: written in place on a disk; for a bucket written beside and uploaded.

  Args:
    path: the file, which may exist, or the folder, of which only new files are written.
    check: a function that raises if this process must not write to the bucket any more.

  Attributes:
    path: the file or folder.
    local: where to write it.
  """

  def __init__(self, path: Path, check: Callable[[], None] | None = None):
    self.path = path
    self._check = check
    self._scratch: tempfile.TemporaryDirectory[str] | None = None
    self._uploaded: dict[pathlib.Path, tuple[int, int]] = {}
    self._last = -float("inf")
    if isinstance(path, pathlib.Path):
      self.local = path
      return
    self._scratch = tempfile.TemporaryDirectory(prefix="async_rl-")
    self.local = pathlib.Path(self._scratch.name, path.name)
    if path.exists() and not path.is_dir():
      self.local.write_bytes(path.read_bytes())

  def upload(self, *, at_most_every: float = 0.0) -> None:
    """Uploads the files that changed, each as a whole, so that readers see one state of it or the next.

    Args:
      at_most_every: seconds since the last upload within which nothing is done.

    Raises:
      OSError: if that failed.
      Exception: what `check` raises.
    """
    if self._scratch is None or time.monotonic() - self._last < at_most_every:
      return
    if self._check is not None:
      self._check()
    for file in sorted(self.local.rglob("*")) if self.local.is_dir() else [self.local]:
      if not file.is_file():
        continue
      state = (file.stat().st_size, file.stat().st_mtime_ns)
      if state == self._uploaded.get(file):
        continue
      target = self.path if file == self.local else self.path / file.relative_to(self.local)
      try:
        file_system().put_file(str(file), str(target))
      except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"{target} cannot be written ({reason}); correct this, then rerun the same command") from error
      self._uploaded[file] = state
    self._last = time.monotonic()

  def close(self) -> None:
    """Uploads what is left, and deletes the files on the disk."""
    try:
      self.upload()
    finally:
      self.discard()

  def discard(self) -> None:
    """Deletes the files on the disk, uploaded or not."""
    if self._scratch is not None:
      self._scratch.cleanup()


def check_access(path: Path, *, checkpoints: bool = False, write: bool = False) -> float:
  """Checks the rights to a path in a bucket by using them; does nothing for a path on a disk.

  Args:
    path: the path.
    checkpoints: whether there are checkpoints; to read these, Orbax must see the bucket itself.
    write: whether to write, read and delete a small object in the folder `path`, too.

  Returns:
    The store's own time, in seconds since 1970, if it was written to; otherwise 0.

  Raises:
    OSError: if a right, the bucket, the network or credentials are missing: one sentence with the remedy.
  """
  if isinstance(path, pathlib.Path):
    return 0.0
  from google.api_core import exceptions
  from google.auth.exceptions import GoogleAuthError
  from google.cloud import storage

  name, _, inside = str(path).removeprefix("gs://").partition("/")
  try:
    bucket = storage.Client().bucket(name)
    if checkpoints or write:
      bucket.reload(retry=None)
    next(iter(bucket.client.list_blobs(bucket, prefix=inside, max_results=1, retry=None)), None)
    return _use_probe(bucket.blob(f"{inside}/{PROBE}{os.urandom(8).hex()}")) if write else 0.0
  except exceptions.NotFound as error:
    raise FileNotFoundError(
      f"there is no bucket gs://{name} for {path}; correct the name, or make it: `gcloud storage buckets create "
      f"gs://{name}`"
    ) from error
  except (exceptions.Forbidden, exceptions.Unauthorized) as error:
    verb, role = ("written", "objectAdmin") if write else ("read", "objectViewer")
    raise PermissionError(
      f"{path} cannot be {verb} with these credentials ({error.message}); grant their account roles/storage.{role} and "
      f"roles/storage.legacyBucketReader on gs://{name}, and a TPU VM the scope cloud-platform"
    ) from error
  except GoogleAuthError as error:
    raise PermissionError(
      f"{path} needs valid credentials ({error}); run `gcloud auth application-default login`, or give the TPU VM a "
      "service account"
    ) from error
  except (exceptions.GoogleAPIError, OSError) as error:
    raise ConnectionError(f"{path} cannot be reached ({error}); check the network and the project") from error


def _use_probe(blob: Any) -> float:
  """Writes, reads and deletes an object; returns the store's time of the first."""
  blob.upload_from_string(b"probe", retry=None)
  blob.download_as_bytes(retry=None)
  blob.delete(retry=None)
  return blob.time_created.timestamp()
