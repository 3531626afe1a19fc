"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

import tqdm

_RATE = "throughput/generated"
#: Metrics that are shown: label, name, format.
_SHOWN = (
  ("reward", "reward/mean", "{:.3f}"),
  ("lag", "staleness/mean", "{:.1f}"),
  ("ESS", "ess/sequence", "{:.2f}"),
  ("tokens/s", _RATE, "{:,.0f}"),
)


class Progress:
  """Shows the steps done and the metrics that say whether all is well.

  The last step shows the mean rate of the run, since generation has ended by then.

  Args:
    total: the number of steps of the whole run.
    start: the number of steps done before, if the run is resumed.
    every: seconds between lines where the output is not a terminal.
    output: the stream to write to; `None` is standard error.
    process: the number of this process among those of the run; others than the first show warnings alone.
  """

  def __init__(
    self, total: int, start: int = 0, *, every: float = 10.0, output: TextIO | None = None, process: int = 0
  ):
    self._process = process
    self._output = output or sys.stderr
    self._total = total
    self._every = every
    self._tokens = 0.0
    self._seconds = 0.0
    self._last_line = -float("inf")
    self._warned: set[str] = set()
    self._bar = None
    if self._output.isatty() and not process:
      self._bar = tqdm.tqdm(
        total=total, initial=start, unit="step", dynamic_ncols=True, file=self._output, smoothing=0.1
      )

  def update(self, done: int, metrics: Mapping[str, float]) -> None:
    """Shows that `done` steps are done, with the newest metrics."""
    if _RATE in metrics and "time/step" in metrics:
      self._tokens += metrics[_RATE] * metrics["time/step"]
      self._seconds += metrics["time/step"]
      if done == self._total:
        metrics = {**metrics, _RATE: self._tokens / self._seconds}
    shown = ", ".join(f"{label} {form.format(metrics[name])}" for label, name, form in _SHOWN if name in metrics)
    if self._bar is not None:
      self._bar.set_postfix_str(shown, refresh=False)
      self._bar.update(done - self._bar.n)
    elif done == self._total or time.monotonic() - self._last_line >= self._every:
      self._last_line = time.monotonic()
      self.note(f"step {done}/{self._total}: {shown}")

  def note(self, text: str) -> None:
    """Writes a line, above the bar if there is one."""
    if not self._process:
      self._write(text)

  def warn(self, text: str) -> None:
    """Writes a line unless it has been written before."""
    if text not in self._warned:
      self._warned.add(text)
      self._write(f"process {self._process}: {text}" if self._process else text)

  def close(self) -> None:
    """Ends the bar where it is."""
    if self._bar is not None:
      self._bar.close()

  def _write(self, text: str) -> None:
    if self._bar is not None:
      self._bar.write(text, file=self._output)
    else:
      print(text, file=self._output, flush=True)
