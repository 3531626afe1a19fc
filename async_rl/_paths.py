"""Paths on a disk and in a bucket of Google Cloud Storage: `gs://bucket/folder` works wherever a folder does.

A path on a disk is a `pathlib.Path`, one in a bucket an `etils.epath.Path`; what both have is used alike. A bucket has
no folders that could be renamed or be empty, and no files that could grow: this module has what differs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import shutil
from typing import IO
from typing import TYPE_CHECKING
from typing import Any
from typing import TextIO
from typing import Union
from typing import cast

if TYPE_CHECKING:
  from etils import epath

#: A path on a disk or in a bucket.
Path = Union[pathlib.Path, "epath.Path"]

#: The start of a path with a scheme; `pathlib` leaves one of the two slashes.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
#: A path in a bucket; clients would read the characters that are left out as patterns or versions.
_IN_BUCKET = re.compile(r"gs://[^/*?#\[\]]+(/[^*?#\[\]]*)?")


def check_path(name: str, path: str | os.PathLike[str]) -> None:
  """Raises a ValueError unless `path`, the value of *name*, is a path on a disk or gs://bucket/folder."""
  text = os.fspath(path)
  if _SCHEME.match(text) and not _IN_BUCKET.fullmatch(text):
    raise ValueError(
      f"*{name}* must be a path on a disk or of the form gs://bucket/folder, without *?#[], got {name}={text!r}; no "
      "other store is supported."
    )


def as_path(path: str | os.PathLike[str], name: str = "path") -> Path:
  """Returns a path on a disk, `~` expanded, or in a bucket.

  Args:
    path: the path.
    name: the name of the option that holds it, for the error.

  Raises:
    ValueError: if it is of another store.
    ImportError: if it is in a bucket and the packages for it are not installed.
  """
  check_path(name, path)
  text = os.fspath(path)
  if not text.startswith("gs://"):
    return pathlib.Path(path).expanduser()
  if missing := [package for package in ("gcsfs", "google.cloud.storage") if not _is_installed(package)]:
    raise ImportError(
      f"{name}={text!r} needs {' and '.join(missing)}, not installed here; `pip install gcsfs google-cloud-storage`, "
      "or choose a path on a disk."
    )
  import fsspec
  from etils import epath

  # Others write there, too: Orbax through TensorStore, and the other processes of a run.
  fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
  return epath.Path(text)


def _is_installed(package: str) -> bool:
  with contextlib.suppress(ModuleNotFoundError):
    return importlib.util.find_spec(package) is not None
  return False


def file_system() -> Any:
  """Returns fsspec's file system of Google Cloud Storage, the one that `etils.epath` uses."""
  import fsspec

  return fsspec.filesystem("gcs", finalize_on_close=True)


def absolute(path: Path) -> Path:
  """Returns the path as it is from any folder."""
  return path.absolute() if isinstance(path, pathlib.Path) else path


def resolve(path: Path) -> Path:
  """Returns the path as it is from any folder, symbolic links followed."""
  return path.resolve() if isinstance(path, pathlib.Path) else path


def make_folder(path: Path) -> None:
  """Makes a folder and those above it; in a bucket there is nothing to make."""
  if isinstance(path, pathlib.Path):
    path.mkdir(parents=True, exist_ok=True)


def list_folder(path: Path) -> list[Path]:
  """Returns what a folder holds: nothing, if there is no such folder."""
  if isinstance(path, pathlib.Path):
    return list(path.iterdir()) if path.is_dir() else []
  try:
    found = file_system().ls(str(path), detail=False)
  except FileNotFoundError:
    return []
  names = {name.rstrip("/").rpartition("/")[2] for name in found if name.rstrip("/") != str(path).removeprefix("gs://")}
  return [path / name for name in sorted(names)]


def write_text(path: Path, text: str) -> None:
  """Writes a file in one step: whatever happens, it has its old content or the new one."""
  if not isinstance(path, pathlib.Path):
    path.write_text(text)  # an object appears as a whole
    return
  draft = path.with_suffix(".tmp")
  try:
    draft.write_text(text)
    draft.replace(path)
  except OSError:
    draft.unlink(missing_ok=True)
    raise


def move(source: Path, target: Path) -> None:
  """Moves a file or a folder to where nothing is; in a bucket one object after the other."""
  if isinstance(source, pathlib.Path):
    source.rename(target)
    return
  files, start = file_system(), str(source).removeprefix("gs://")
  found = files.find(start)
  files.mv(found, [str(target).removeprefix("gs://") + name.removeprefix(start) for name in found])


def delete(path: Path) -> None:
  """Deletes a file, or a folder and all in it, if it is there."""
  if isinstance(path, pathlib.Path):
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink(missing_ok=True)
    return
  with contextlib.suppress(FileNotFoundError):
    file_system().rm(str(path), recursive=True)


def open_text(path: Path) -> TextIO:
  """Opens a file of UTF-8 to read; bytes that are none are replaced."""
  return io.TextIOWrapper(cast("IO[bytes]", path.open("rb")), encoding="utf-8", errors="replace")
