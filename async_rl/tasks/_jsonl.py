"""Reading of line-by-line JSON with errors that name the file, the line and the field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from async_rl._buckets import check_access
from async_rl._paths import Path
from async_rl._paths import as_path

#: What other files start with, what they are, and the remedy.
_FOREIGN = (
  (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` where it lies"),
  (b"\x1f\x8b", "compressed data", "decompress it"),
  (b"PAR1", "a Parquet table", "convert it"),
  ((b"\xff\xfe", b"\xfe\xff"), "UTF-16", "save it as UTF-8"),
)


class JsonLines(Sequence[dict[str, Any]]):
  """The records of a file with one JSON object per line, and where each of them stands."""

  def __init__(self, path: Path, records: Sequence[dict[str, Any]], lines: Sequence[int]):
    """Args: path: the file; records: the objects; lines: the line number of each, from 1 on."""
    self._path = path
    self._records = records
    self._lines = lines

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index):
    return self._records[index]

  def where(self, index: int) -> str:
    """Returns file and line of a record, as `path:line`."""
    return f"{self._path}:{self._lines[index]}"


def read_jsonl(
  path: str | os.PathLike, fields: Sequence[str], check: Callable[[dict[str, Any]], Any] | None = None
) -> JsonLines:
  """Reads a file with one JSON object per line; blank lines are skipped, and so is a byte-order mark.

  Args:
    path: the file, in UTF-8, on a disk or in a bucket.
    fields: the fields that every record must have, and not as null.
    check: a function that raises a ValueError, which names the field, for a record that is of no use.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a line is no such object, a text in it cannot be encoded, or there is no line; it names file and
      line.
  """
  path = as_path(path)
  check_access(path)
  if not path.is_file():
    raise FileNotFoundError(f"there is no file {str(path)!r}: give the folder that holds {path.name}")
  records, lines = [], []
  content = path.read_bytes()
  for start, found, remedy in _FOREIGN:
    if content.startswith(start):
      raise ValueError(f"{path} holds {found}, not lines of JSON; {remedy}")
  for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
    if not line.strip():
      continue
    try:
      record = _parse(line, fields)
      if check is not None:
        check(record)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from error
    records.append(record)
    lines.append(number)
  if not records:
    raise ValueError(f"{path} holds no records")
  return JsonLines(path, records, lines)


def _parse(line: bytes, fields: Sequence[str]) -> dict[str, Any]:
  try:
    record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
  except UnicodeDecodeError as error:
    raise ValueError(f"not UTF-8: {error}; save the file as UTF-8") from error
  except RecursionError as error:
    raise ValueError("not JSON that can be read: nested too deeply") from error
  except json.JSONDecodeError as error:
    raise ValueError(f"not JSON: {error}; each line must be one whole object") from error
  missing = [field for field in fields if not isinstance(record, dict) or record.get(field) is None]
  if missing:
    raise ValueError(f"expected an object with {', '.join(fields)}; missing: {missing}")
  for field, value in record.items():
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      raise ValueError(
        f"field {field!r} holds half of a surrogate pair, which no tokenizer can encode (a cut emoji?): {error.reason}"
      ) from error
  return record


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is no JSON and no answer")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Makes an object; a field that occurs twice is refused, since readers differ in which one they take."""
  record = dict(pairs)
  if len(record) < len(pairs):
    names = [name for name, _ in pairs]
    raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} occurs twice")
  return record


def text_field(record: dict[str, Any], field: str) -> str:
  """Returns a field that must be a text with something in it, stripped; TFDS hands out bytes, JSON str.

  Raises:
    ValueError: if it is something else, or blank.
  """
  value = record[field]
  if isinstance(value, bytes):
    value = value.decode()
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"field {field!r} must be a text that is not blank, got {_short(value)}")
  return value.strip()


def answer_field(record: dict[str, Any], field: str) -> str:
  """Returns a field that must be a text or a number, as a text.

  Raises:
    ValueError: if it is something else, or blank.
  """
  value = record[field]
  if isinstance(value, int | float) and not isinstance(value, bool):
    return str(value)
  if not isinstance(value, str | bytes):
    raise ValueError(f"field {field!r} must be a text or a number, got {_short(value)}")
  return text_field(record, field)


def _short(value: Any) -> str:
  shown = repr(value)
  return shown if len(shown) <= 80 else f"{shown[:77]}..."
