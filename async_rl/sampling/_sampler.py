"""The protocol between a run and whatever draws its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Protocol

from jax.sharding import Mesh

from async_rl.models import Params
from async_rl.models import Policy
from async_rl.sampling._sampler_config import SamplerConfig
from async_rl.sampling._samples import Snapshot
from async_rl.types import Completion
from async_rl.types import Request


@dataclasses.dataclass
class Counters:
  """Running totals of a sampler.

  Attributes:
    tokens: the number of tokens drawn.
    prefill_tokens: the number of tokens of prompts and of recomputed prefixes, without padding.
    chunks: the number of decode chunks run.
    steps: the number of decode steps run.
    slot_steps: `steps` times the number of slots; tokens / slot_steps is the occupancy.
    seconds: the time spent in `step`.
  """

  tokens: int = 0
  prefill_tokens: int = 0
  chunks: int = 0
  steps: int = 0
  slot_steps: int = 0
  seconds: float = 0.0


class Sampler(Protocol):
  """Completes each request K times while the weights change: all that a run asks of its sampler.

  The calls come from one thread at a time and are never concurrent. A sample is determined by (seed, ticket, index in
  its group, weights), up to rounding: it depends neither on its neighbors nor on when it starts. A backend that draws
  with `draw_tokens` and `token_uniforms` returns the same tokens as the other backends.

  `tests/sampling/test_contract.py` tests what this protocol promises; a new backend is added to its table.

  Attributes:
    counters: the running totals. `tokens` grows during `step` by exactly the tokens that were drawn, also those of
      samples that are still unfinished; `slot_steps` bounds it from above.
  """

  counters: Counters

  @property
  def weight_shardings(self) -> Params:
    """Returns the shardings in which `set_weights` takes prepared weights without moving them."""

  def set_weights(self, params: Params, version: int) -> None:
    """Changes the weights from the next `step` on, also those of unfinished samples.

    Args:
      params: the parameters, as from `Policy.init` (copied, so that they may be donated afterwards) or as from
        `prepare_weights` (used as they are, so they must not be donated). They may lie on other devices.
      version: the number of optimizer steps that made them, written on every token that they draw.

    Raises:
      ValueError: if the parameters are not the policy's.
    """

  @property
  def checksum(self) -> int:
    """The checksum of the weights that the next `step` draws with: that of `checksum_weights`, computed from them.

    It costs a pass over the weights for each `set_weights`, and may wait for it.

    Raises:
      RuntimeError: if there are no weights yet.
    """

  def submit(self, request: Request) -> None:
    """Queues a request, which starts as soon as there is room.

    Raises:
      ValueError: if the prompt is empty, too long or not of this vocabulary, or the ticket is not a uint32.
    """

  def resume(self, request: Request, completion: Completion, tokens: Sequence[int]) -> None:
    """Resumes a finished sample after appending `tokens` that the policy did not draw, such as a tool's reply.

    The sample keeps its ticket, index and earlier tokens; the new ones have mask False, log-probability 0 and
    `NO_VERSION`. They count toward the longest completion and toward the positions that key the random numbers.

    Args:
      request: the sample's request.
      completion: the finished sample, as `step` returned it.
      tokens: the context to append; at least one more token must fit behind it, see `room`.

    Raises:
      ValueError: if the tokens do not fit or are not of this vocabulary.
    """

  def room(self, completion: Completion) -> int:
    """Returns the number of tokens by which `completion` may still grow."""

  def has_room(self) -> bool:
    """Returns whether one more request would start at the next `step`."""

  @property
  def idle(self) -> bool:
    """Returns whether no sample is unfinished."""

  def step(self) -> list[Completion]:
    """Draws some tokens of the unfinished samples and returns the samples that finished.

    It returns after a bounded number of tokens per sample, so that weights can change in the middle of samples.

    Raises:
      RuntimeError: if there are no weights yet.
    """

  def snapshot(self) -> Snapshot:
    """Returns every unfinished sample, for a checkpoint. The sampler itself goes on unchanged."""

  def restore(self, state: Snapshot) -> None:
    """Continues the samples of a snapshot, which may be another backend's.

    Raises:
      RuntimeError: if the sampler is not idle.
      ValueError: if the samples are longer than this sampler's limits allow.
    """

  def warmup(self, resumes: bool = False) -> None:
    """Compiles what later calls need, so that none of them does.

    Args:
      resumes: whether `resume` will be called.
    """


class SamplerFactory(Protocol):
  """The constructor of a backend, such as `Engine`: what a run calls to make its samplers."""

  def __call__(
    self, policy: Policy, config: SamplerConfig, stop_ids: Sequence[int], pad_id: int, mesh: Mesh | None = None
  ) -> Sampler:
    """Makes a sampler.

    Args:
      policy: the architecture.
      config: the sizes and the sampling distribution.
      stop_ids: the tokens that end a sample; a stop token is kept as the last token of its completion.
      pad_id: the id used to fill unused positions.
      mesh: the devices, all of this process; `None` uses the first device. A process that only learns makes one, too,
        on devices of another process: it is asked for its shardings, given weights without data, and draws nothing.
    """


def generate(sampler: Sampler, requests: Iterable[Request]) -> list[Completion]:
  """Runs `requests` to their end and returns their completions, in the order of the requests and of their samples.

  Args:
    sampler: an idle sampler that has weights.
    requests: the requests, of distinct tickets.

  Raises:
    RuntimeError: if samples of other requests are unfinished.
  """
  if not sampler.idle:
    raise RuntimeError("generate needs an idle sampler; finish its unfinished samples with step first.")
  order = {}
  for i, request in enumerate(requests):
    sampler.submit(request)
    order[request.ticket] = i
  completions: list[Completion] = []
  while not sampler.idle:
    completions += sampler.step()
  return sorted(completions, key=lambda c: (order[c.ticket], c.sample))
