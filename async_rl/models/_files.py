"""Reading of files that came from elsewhere: what cannot be read is named, with the likely cause."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

_LFS_POINTER = b"version https://git-lfs"


@contextlib.contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turns what a reader raises on a damaged file into a ValueError with its path, the cause and the remedy."""
  try:
    yield
  except (FileNotFoundError, IsADirectoryError):
    raise
  except Exception as error:
    if _is_lfs_pointer(pathlib.Path(path)):
      raise ValueError(
        f"{path} is a Git LFS pointer in place of the file; run `git lfs pull` where it lies."
      ) from error
    raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again.") from error


def _is_lfs_pointer(path: pathlib.Path) -> bool:
  if not path.is_file():
    return False
  with path.open("rb") as file:
    return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a file that holds one JSON object.

  Raises:
    ValueError: if it holds anything else.
  """
  with explained(path):
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, dict):
      raise TypeError(f"it holds a {type(content).__name__}, not an object")
  return content
