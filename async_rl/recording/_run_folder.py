"""The folder of a run: what lies where, and whether it may be used."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

_MARK = "run.json"


class RunFolderError(RuntimeError):
  """The folder cannot hold this run; the message is one sentence for the user, with the remedy."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """An opened folder and the places in it.

  Attributes:
    path: the folder.
    resumed: whether it already held this run.
  """

  path: pathlib.Path
  resumed: bool

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
  def config(self) -> pathlib.Path:
    """The configuration as text."""
    return self.path / "config.txt"

  @property
  def schedule(self) -> pathlib.Path:
    """Recorded schedule of an asynchronous run."""
    return self.path / "schedule.jsonl"

  @property
  def report(self) -> pathlib.Path:
    """Picture of the run."""
    return self.path / "report.png"

  @classmethod
  def open(
    cls, path: str | pathlib.Path, config_text: str, fingerprint: Mapping[str, Any], *, overwrite: bool = False
  ) -> RunFolder:
    """Opens or makes the folder of a run.

    Args:
      path: the folder; made if missing.
      config_text: the configuration, to be read by people; written to config.txt.
      fingerprint: what makes two runs the same: a JSON-like mapping, without options that may change on a resume
        (number of steps, intervals, log targets).
      overwrite: delete a run that the folder holds. Folders that hold anything else are never deleted.

    Raises:
      RunFolderError: if the folder holds another run or other files, or cannot be written.
    """
    path = pathlib.Path(path).expanduser()
    fingerprint = json.loads(json.dumps(fingerprint))
    try:
      resumed = False
      if (path / _MARK).exists():
        if overwrite:
          shutil.rmtree(path)
        else:
          _check_same(path, fingerprint)
          resumed = True
      elif path.is_dir() and any(path.iterdir()):
        raise RunFolderError(f"{path} holds files that are not of a run: choose another folder")
      path.mkdir(parents=True, exist_ok=True)
      (path / "config.txt").write_text(config_text)
      if not resumed:
        (path / _MARK).write_text(json.dumps(fingerprint, indent=2) + "\n")
    except OSError as error:
      raise RunFolderError(f"cannot write the run folder {path}: {error.strerror or error}") from error
    return cls(path, resumed)


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
  """Yields "name: old value -> new value" for each difference of two JSON-like trees."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in [*old, *(key for key in new if key not in old)]:
      yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
  elif old != new:
    yield f"{name}: {old!r} -> {new!r}"


def _check_same(path: pathlib.Path, fingerprint: Mapping[str, Any]) -> None:
  try:
    old = json.loads((path / _MARK).read_text())
  except ValueError as error:
    raise RunFolderError(f"{path / _MARK} is damaged: choose another folder, or overwrite this one") from error
  changes = list(differences(old, fingerprint))
  if changes:
    raise RunFolderError(
      f"{path} holds another run ({'; '.join(changes)}): undo these changes to resume it, "
      "choose another folder, or pass --overwrite to start afresh and lose it"
    )
