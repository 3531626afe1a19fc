"""Metrics of a run: they are fetched without stalling the devices, and written to files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import pathlib
import secrets
import sys
import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TextIO

import jax
import numpy as np

from async_rl._buckets import Mirror
from async_rl._paths import Path
from async_rl._paths import open_text
from async_rl._paths import write_text
from async_rl.recording._run_folder import RunFolder
from async_rl.types import Group

Values = Mapping[str, float | np.ndarray]

#: Seconds between two uploads of what was written, where the run folder is in a bucket; checkpoints upload it, too.
_UPLOAD_SECONDS = 60.0


class MetricsBuffer:
  """Fetches the metrics of a step when those of the next are at hand.

  By then the device has long computed them, so that fetching never waits and never lets the device run dry.
  """

  def __init__(self) -> None:
    self._held: tuple[int, dict[str, Any]] | None = None

  def push(self, step: int, *metrics: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Takes the metrics of `step`, on devices or not; returns the step before and its metrics on the host."""
    previous = self.flush()
    merged = dict(itertools.chain.from_iterable(part.items() for part in metrics))
    for value in merged.values():
      if isinstance(value, jax.Array):
        value.copy_to_host_async()
    self._held = (step, merged)
    return previous

  def flush(self) -> tuple[int, dict[str, Any]] | None:
    """Returns what is still held, waiting for it."""
    held, self._held = self._held, None
    if held is None:
      return None
    step, metrics = held
    return step, {name: _number(value) for name, value in jax.device_get(metrics).items()}


def staleness_histogram(groups: Sequence[Group], version: int, max_lag: int) -> np.ndarray:
  """Number of drawn tokens at each lag from 0 to max_lag in a batch that is trained at `version`."""
  versions = np.concatenate([c.versions[c.mask] for group in groups for c in group.completions])
  return np.bincount(version - versions, minlength=max_lag + 1)


class MetricsWriter:
  """Writes metrics to JSON lines and TensorBoard, and to Weights & Biases if asked.

  One-dimensional arrays are counts: entry i is how often the value was i. They become histograms.

  A file of JSON lines that is deleted, replaced or cut off meanwhile is noticed at the next write, and written again
  with all rows that can still be read.

  Args:
    folder: the run's folder.
    resume_step: the step of the checkpoint that the run continues from. Rows of later steps, which will be written
      again, are dropped.
    resume_rows: the number of rows at that checkpoint, as `flush` returned it; rows after them are dropped. `None`
      keeps them.
    wandb: whether to log to Weights & Biases too.
    config: the configuration for Weights & Biases.
    warn: shows the user a sentence, such as that the file was deleted.

  Attributes:
    rows: the number of rows in the file.
    damaged: one sentence for each line of an earlier file that was not a row, and so was dropped, and one if the file
      lacked rows.

  Raises:
    ImportError: if `wandb` is asked for and not installed.
  """

  def __init__(
    self,
    folder: RunFolder,
    *,
    resume_step: int = 0,
    resume_rows: int | None = None,
    wandb: bool = False,
    config: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = print,
  ):
    self._wandb = _start_wandb(folder, config) if wandb else None
    self.damaged: list[str] = []
    earlier = itertools.islice(_rows_or_errors(folder.metrics), resume_rows)
    kept = []
    for row in earlier:
      if isinstance(row, ValueError):
        self.damaged.append(f"{row}; the line was dropped")
      elif row["step"] <= resume_step:
        kept.append(json.dumps(row) + "\n")
    if resume_rows is not None and len(kept) + len(self.damaged) < resume_rows:
      self.damaged.append(f"{folder.metrics} has {len(kept)} of the {resume_rows} rows before the checkpoint")
    self._warn = warn
    self._mirrors = tuple(Mirror(path, folder.check_lock) for path in (folder.metrics, folder.tensorboard))
    self._open_lines(kept)
    self._tensorboard = _import_tensorboardx().SummaryWriter(str(self._mirrors[1].local), purge_step=resume_step + 1)

  def write(self, step: int, metrics: Values) -> None:
    """Writes one row of values on the host. NaN and infinity, which JSON lacks, become null there."""
    numbers = {name: _number(value) for name, value in metrics.items()}
    self._repair()
    self._lines.write(json.dumps({"step": step, **{name: _json(value) for name, value in numbers.items()}}) + "\n")
    self._lines.flush()
    self._size = os.fstat(self._lines.fileno()).st_size
    self.rows += 1
    for name, value in numbers.items():
      if not isinstance(value, float):
        self._add_histogram(name, value, step)
      elif math.isfinite(value):  # TensorBoard cannot plot others, and its writer logs a warning for each
        self._tensorboard.add_scalar(name, value, step)
    if self._wandb is not None:
      self._wandb.log({name: value for name, value in numbers.items() if isinstance(value, float)}, step=step)
    for mirror in self._mirrors:
      mirror.upload(at_most_every=_UPLOAD_SECONDS)

  def flush(self) -> int:
    """Writes out all rows, to a bucket too, and returns their number: the `resume_rows` to resume from."""
    self._repair()
    for mirror in self._mirrors:
      mirror.upload()
    return self.rows

  def close(self) -> None:
    """Writes out what is buffered."""
    self._tensorboard.close()
    if self._wandb is not None:
      self._wandb.finish()
    try:
      self.flush()
    finally:
      self._lines.close()
      for mirror in self._mirrors:
        mirror.discard()

  def _open_lines(self, lines: Sequence[str]) -> None:
    """Puts a file of these lines in the place of what is there, in one step, and opens it."""
    path = self._mirrors[0].local
    write_text(path, "".join(lines))
    self._lines: TextIO = path.open("a+")
    self._size = path.stat().st_size
    self.rows = len(lines)

  def _repair(self) -> None:
    """Writes the file again, from what is open of it, unless it is in its place with all that was written."""
    path, local = self._mirrors[0].path, self._mirrors[0].local
    try:
      found = local.stat()
      if os.path.samestat(found, os.fstat(self._lines.fileno())) and found.st_size >= self._size:
        return
    except FileNotFoundError:
      pass
    if path == local and not path.parent.exists():  # what is open goes with the folder
      self._warn(f"{path.parent} was moved or deleted; put it back before the next checkpoint, which needs it")
      return
    rows, old = self.rows, self._lines
    old.seek(0)  # readable even where it was deleted
    local.parent.mkdir(parents=True, exist_ok=True)
    self._open_lines([line for line in old if line.endswith("\n")])
    old.close()
    lost = rows - self.rows
    outcome = f"{lost} of its {rows} rows are lost" if lost else f"its {rows} rows are written again"
    self._warn(f"{path} was deleted, replaced or cut off by something else than this run; {outcome}")

  def _add_histogram(self, name: str, counts: np.ndarray, step: int) -> None:
    values = np.arange(len(counts))
    self._tensorboard.add_histogram_raw(
      name,
      min=0.0,
      max=float(max(len(counts) - 1, 0)),
      num=float(counts.sum()),
      sum=float(counts @ values),
      sum_squares=float(counts @ values**2),
      bucket_limits=(values + 0.5).tolist(),
      bucket_counts=counts.tolist(),
      global_step=step,
    )


class NoMetricsWriter:
  """Writes nothing, in the processes of a run beside the first one.

  Attributes:
    damaged: the lines of an earlier file that were no rows: those are the first process's concern.
  """

  damaged: Sequence[str] = ()

  def write(self, step: int, metrics: Values) -> None:
    """Does nothing."""

  def flush(self) -> int:
    """Returns the number of rows: none."""
    return 0

  def close(self) -> None:
    """Does nothing."""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a metrics.jsonl; none if it is missing. A last line that a crash cut off is left out.

  Raises:
    ValueError: at a line that is not a row; the message names the file and the line.
  """
  for row in _rows_or_errors(path):
    if isinstance(row, ValueError):
      raise row
    yield row


def has_steps(path: Path) -> bool:
  """Returns whether a metrics.jsonl, which may be missing or damaged, has a row of an optimizer step."""
  return any(isinstance(row, dict) and row["step"] > 0 for row in _rows_or_errors(path))


def _rows_or_errors(path: Path) -> Iterator[dict[str, Any] | ValueError]:
  """Yields the rows of a file as `read_metrics` does, and an error in place of each line that is not a row."""
  if not path.exists():
    return
  with open_text(path) as lines:
    for number, line in enumerate(lines, start=1):
      if not line.endswith("\n"):
        return
      try:
        row = json.loads(line)
      except ValueError:
        row = None
      if isinstance(row, dict) and isinstance(row.get("step"), int):
        yield row
      else:
        yield ValueError(f"{path}, line {number}: {line.strip()[:60]!r} is not a row of metrics")


def _number(value: Any) -> float | np.ndarray:
  array = np.asarray(value)
  return float(array) if array.ndim == 0 else array


def _json(value: float | np.ndarray) -> Any:
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return value.tolist()


def check_wandb() -> None:
  """Raises ImportError unless the package `wandb` is installed."""
  if importlib.util.find_spec("wandb") is None:
    raise ImportError("wandb is not installed: `pip install wandb`, or leave out --wandb.")


def _import_tensorboardx() -> types.ModuleType:
  """Imports tensorboardX without PyTorch: where that is installed it takes four seconds, and serves an annotation."""
  hidden = "torch" not in sys.modules
  if hidden:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
  try:
    import tensorboardX
  finally:
    if hidden:
      del sys.modules["torch"]
  return tensorboardX


def _start_wandb(folder: RunFolder, config: Mapping[str, Any] | None) -> Any:
  """Starts a run of Weights & Biases, or continues that of the folder."""
  check_wandb()
  import wandb

  if not folder.wandb_id.exists():
    folder.wandb_id.write_text(secrets.token_hex(8))
  return wandb.init(
    project="async_rl",
    name=folder.path.name,
    id=folder.wandb_id.read_text(),
    resume="allow",
    dir=folder.path if isinstance(folder.path, pathlib.Path) else None,  # it writes to disks alone
    config=dict(config or {}),
  )
