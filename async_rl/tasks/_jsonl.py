"""Reading of line-by-line JSON with errors that name the line."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any


def read_jsonl(path: str | os.PathLike, required: Sequence[str]) -> list[dict[str, Any]]:
  """The records of a file with one JSON object per line; blank lines are skipped.

  Args:
    path: the file.
    required: fields that every record must have, and not as null.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is not an object with these fields, or if there is none.
  """
  path = pathlib.Path(path).expanduser()
  if not path.is_file():
    raise FileNotFoundError(f"there is no file {str(path)!r}: give the folder that holds {path.name}")
  records = []
  with path.open(encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      try:
        record = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from error
      missing = [field for field in required if not isinstance(record, dict) or record.get(field) is None]
      if missing:
        raise ValueError(f"{path}:{number}: expected an object with {', '.join(required)}; missing: {missing}")
      records.append(record)
  if not records:
    raise ValueError(f"{path} holds no records")
  return records
