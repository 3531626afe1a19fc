"""Metrics of a run: measured, fetched without stalling the devices, and written to files."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from async_rl.recording._run_folder import RunFolder
from async_rl.types import Group

Values = Mapping[str, float | np.ndarray]


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

  Args:
    folder: the run's folder.
    resume_step: the step from which the run goes on. Later rows, which will be written again, are dropped.
    wandb: log to Weights & Biases too.
    config: configuration for Weights & Biases.

  Raises:
    ImportError: if `wandb` is asked for and not installed.
  """

  def __init__(
    self, folder: RunFolder, *, resume_step: int = 0, wandb: bool = False, config: Mapping[str, Any] | None = None
  ):
    import tensorboardX

    self._wandb = _start_wandb(folder, config) if wandb else None
    kept = [json.dumps(row) for row in read_metrics(folder.metrics) if row["step"] <= resume_step]
    temporary = folder.metrics.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(folder.metrics)
    self._lines = folder.metrics.open("a")
    self._tensorboard = tensorboardX.SummaryWriter(str(folder.tensorboard), purge_step=resume_step + 1)

  def write(self, step: int, metrics: Values) -> None:
    """Writes one row; the values are on the host. Values that JSON lacks (NaN, infinity) are null there."""
    numbers = {name: _number(value) for name, value in metrics.items()}
    self._lines.write(json.dumps({"step": step, **{name: _json(value) for name, value in numbers.items()}}) + "\n")
    self._lines.flush()
    for name, value in numbers.items():
      if not isinstance(value, float):
        self._add_histogram(name, value, step)
      elif math.isfinite(value):  # TensorBoard has no use for others either, and its writer logs a warning for each
        self._tensorboard.add_scalar(name, value, step)
    if self._wandb is not None:
      self._wandb.log({name: value for name, value in numbers.items() if isinstance(value, float)}, step=step)

  def close(self) -> None:
    """Writes out what is buffered."""
    self._lines.close()
    self._tensorboard.close()
    if self._wandb is not None:
      self._wandb.finish()

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


def read_metrics(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a metrics.jsonl; none if it is missing. A last line that a crash cut off is left out."""
  if not path.exists():
    return
  with path.open() as lines:
    for line in lines:
      if line.endswith("\n"):
        yield json.loads(line)


def _number(value: Any) -> float | np.ndarray:
  array = np.asarray(value)
  return float(array) if array.ndim == 0 else array


def _json(value: float | np.ndarray) -> Any:
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return value.tolist()


def _start_wandb(folder: RunFolder, config: Mapping[str, Any] | None) -> Any:
  try:
    import wandb
  except ImportError as error:
    raise ImportError("wandb is not installed: `pip install wandb`, or do not log to Weights & Biases") from error
  return wandb.init(project="async_rl", name=folder.path.name, dir=folder.path, config=dict(config or {}))
