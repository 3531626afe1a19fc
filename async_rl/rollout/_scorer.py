"""A reward model used in place of a reward function."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import models
from async_rl import tasks
from async_rl._monitor import Monitor
from async_rl.types import STOP
from async_rl.types import Prompt

#: Seconds that a batch waits to be filled: texts come in one by one, and a batch costs the same however few it has.
_FILL_SECONDS = 3e-3


class TextLimits(NamedTuple):
  """Maximum numbers of tokens of a prompt and of a completion, the end token included."""

  prompt: int
  completion: int


def encode_text(
  tokenizer: models.Tokenizer, prompt: str | list[dict[str, str]], text: str
) -> tuple[list[int], list[int]]:
  """Returns the tokens of a prompt and of a finished completion, as a reward model is trained on and scores them."""
  return tokenizer.encode_prompt(prompt), [*tokenizer.encode(text), tokenizer.stop_ids[0]]


class _Job(NamedTuple):
  future: Future[tasks.RewardResult]
  tokens: list[int]


class RewardModelScorer:
  """Scores completions by a reward model; a `tasks.Scorer`, so a run can use it in place of its `RewardPool`.

  A thread scores what waits, up to `rows` texts of about the same length at a time, in one of a few fixed shapes that
  are compiled at the start. The score of a text does not depend on the texts beside it, so that runs can be repeated
  bit for bit. A score that is not finite counts as a failure of that sample; an error of the model is raised for
  everybody who waits, and by `submit` from then on.

  Args:
    model: the architecture; one device runs it whole.
    params: its parameters; they are copied to `device` in the compute dtype.
    tokenizer: the model's tokenizer.
    limits: the longest prompt and completion. Longer completions are truncated. (Re-encoding can lengthen a text that
      was sampled with a non-canonical tokenization.)
    rows: the number of texts in a batch.
    lengths: the number of batch shapes.
    missing_end: the reward assigned to unfinished completions, which are not scored by the model.
    device: the device that runs the model; `None` is the first.
  """

  def __init__(
    self,
    model: models.RewardModel,
    params: models.Params,
    tokenizer: models.Tokenizer,
    limits: TextLimits,
    *,
    rows: int = 16,
    lengths: int = 4,
    missing_end: float = -1.0,
    device: jax.Device | None = None,
  ):
    if rows < 1 or lengths < 1:
      raise ValueError(f"rows and lengths must be at least 1, got rows={rows}, lengths={lengths}.")
    self._model = model
    self._tokenizer = tokenizer
    self._limits = limits
    self._rows = rows
    self._missing_end = missing_end
    self._device = device or jax.devices()[0]
    self._params = jax.device_put(
      jax.jit(functools.partial(models.as_used, dtype=model.policy.dtype))(params), self._device
    )
    self.lengths = tuple(sorted({-(-sum(limits) * i // lengths) for i in range(1, lengths + 1)}))
    for length in self.lengths:
      self._values([[0]] * rows, length)
    self._monitor = Monitor("the reward-model scorer")
    self._waiting: dict[int, collections.deque[_Job]] = {length: collections.deque() for length in self.lengths}
    self._failures: collections.Counter[str] = collections.Counter()
    self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
    self._thread.start()

  @property
  def failures(self) -> dict[str, int]:
    """How many scores failed so far, by reason."""
    with self._monitor:
      return dict(self._failures)

  @property
  def first_reasons(self) -> tuple[str, ...]:
    """The reason of the first failure, if there was one."""
    with self._monitor:
      return ("reward model: non-finite score",) if self._failures else ()

  def submit(self, prompt: Prompt, text: str, finish: str) -> Future[tasks.RewardResult]:
    """Queues one completion.

    Raises:
      ValueError: if the prompt is too long.
      RuntimeError: if the scorer is closed, or its model failed.
    """
    future: Future[tasks.RewardResult] = Future()
    if finish != STOP:
      future.set_result(tasks.RewardResult(self._missing_end))
      return future
    before, tokens = encode_text(self._tokenizer, prompt.text, text)
    if len(before) > self._limits.prompt:
      raise ValueError(
        f"Prompt {prompt.id} has {len(before)} tokens for the reward model, which takes {self._limits.prompt}; "
        "raise max_prompt_tokens."
      )
    if len(tokens) > self._limits.completion:
      tokens = [*tokens[: self._limits.completion - 1], tokens[-1]]
    job = _Job(future, before + tokens)
    length = next(n for n in self.lengths if n >= len(job.tokens))
    with self._monitor:
      self._monitor.check_open()
      self._waiting[length].append(job)
      self._monitor.notify()
    return future

  def close(self) -> None:
    """Cancels what waits. Idempotent; waits for the batch at hand."""
    with self._monitor:
      self._monitor.close()
      for job in itertools.chain(*self._waiting.values()):
        job.future.cancel()
    self._thread.join()

  def __enter__(self) -> RewardModelScorer:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _serve(self) -> None:
    while True:
      with self._monitor:
        if not self._monitor.wait_for(lambda: any(self._waiting.values())):
          return
        self._monitor.wait_for(lambda: any(len(q) >= self._rows for q in self._waiting.values()), _FILL_SECONDS)
        length, queue = max(self._waiting.items(), key=lambda item: len(item[1]))
        jobs = [queue.popleft() for _ in range(min(self._rows, len(queue)))]
      jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
      try:
        values = self._values([job.tokens for job in jobs], length)
      except Exception as error:
        self._give_up(error, jobs)
        return
      for job, value in zip(jobs, values):
        job.future.set_result(self._result(value))

  def _result(self, value: float) -> tasks.RewardResult:
    if math.isfinite(value):
      return tasks.RewardResult(value)
    with self._monitor:
      self._failures["non-finite"] += 1
    return tasks.RewardResult(0.0, True, f"non-finite reward {value}")

  def _give_up(self, error: Exception, jobs: list[_Job]) -> None:
    failure = RuntimeError(f"The reward model failed: {error}")
    failure.__cause__ = error
    with self._monitor:
      self._monitor.close(failure)
      waiting = [job for queue in self._waiting.values() for job in queue if job.future.set_running_or_notify_cancel()]
    for job in [*jobs, *waiting]:
      job.future.set_exception(error)

  def _values(self, texts: Sequence[Sequence[int]], length: int) -> list[float]:
    """Scores of up to `rows` texts in the shape [rows, length]."""
    tokens, counts = np.zeros((self._rows, length), np.int32), np.zeros(self._rows, np.int32)
    for row, text in enumerate(texts):
      tokens[row, : len(text)], counts[row] = text, len(text)
    tokens, counts = jax.device_put((tokens, counts), self._device)
    return np.asarray(_last_values(self._model, self._params, tokens, counts)).tolist()[: len(texts)]


@functools.partial(jax.jit, static_argnums=0)
def _last_values(model: models.RewardModel, params: models.Params, tokens: jax.Array, counts: jax.Array) -> jax.Array:
  """Values of texts [B, T] of `counts` tokens, float32 [B]."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  segments = (positions < counts[:, None]).astype(jnp.int32)
  values = model.values(params, tokens, segments, positions)
  return jnp.take_along_axis(values, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
