"""Unfinished samples: what the host keeps of each, and their form in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from async_rl.sampling._sampler_config import SamplerConfig
from async_rl.types import NO_VERSION
from async_rl.types import Completion
from async_rl.types import Request


@dataclasses.dataclass(eq=False)
class Sample:
  """An unfinished sample. The host's copy is the only one: the device holds nothing of it but the cache.

  Attributes:
    ticket: the ticket of its group.
    index: its place in the group.
    prompt: int32 [T], the tokens of the prompt.
    tokens: int32 [C], the completion, of which the first `length` tokens exist.
    logprobs: float32 [C], the log-probability of each token.
    versions: int32 [C], the version of each token, `NO_VERSION` where the policy did not draw it.
    length: the number of completion tokens so far.
  """

  ticket: int
  index: int
  prompt: np.ndarray
  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  length: int = 0

  @classmethod
  def empty(cls, ticket: int, index: int, prompt: np.ndarray, limit: int) -> Sample:
    """Makes a sample without completion tokens; `limit` is C, the longest completion."""
    return cls(
      ticket,
      index,
      prompt,
      np.zeros(limit, np.int32),
      np.zeros(limit, np.float32),
      np.full(limit, NO_VERSION, np.int32),
    )

  @property
  def last_token(self) -> int:
    """Returns the last token of the prompt and the completion so far."""
    return int(self.tokens[self.length - 1] if self.length else self.prompt[-1])

  def prefix(self) -> np.ndarray:
    """Returns the prompt and the completion so far."""
    return np.concatenate([self.prompt, self.tokens[: self.length]])

  def extend(self, tokens: np.ndarray, logprobs: np.ndarray | np.float32, versions: np.ndarray | np.int32) -> None:
    """Appends tokens; a scalar holds for all of them."""
    new = slice(self.length, self.length + len(tokens))
    self.tokens[new] = tokens
    self.logprobs[new] = logprobs
    self.versions[new] = versions
    self.length = new.stop

  def completion(self, finish: str) -> Completion:
    """Returns the sample as finished, for the reason `finish`."""
    versions = self.versions[: self.length].copy()
    return Completion(
      ticket=self.ticket,
      sample=self.index,
      tokens=self.tokens[: self.length].copy(),
      logprobs=self.logprobs[: self.length].copy(),
      versions=versions,
      mask=versions != NO_VERSION,
      finish=finish,
    )


def start_samples(request: Request, config: SamplerConfig, vocab_size: int) -> tuple[Sample, ...]:
  """Makes the K samples of a new request, without completion tokens.

  Args:
    request: the request.
    config: the limits, and K.
    vocab_size: the number of token ids that may occur.

  Raises:
    ValueError: if the prompt is empty, too long or not of this vocabulary, or the ticket is not a uint32.
  """
  tokens = np.asarray(request.tokens, np.int32)
  name = f"Request {request.ticket} (prompt {getattr(request.prompt, 'id', None)})"
  if tokens.ndim != 1 or not tokens.size:
    raise ValueError(f"{name} must have tokens [T] with T >= 1, got shape {tokens.shape}; encode a non-empty prompt.")
  if len(tokens) > config.max_prompt_tokens:
    raise ValueError(
      f"{name} has {len(tokens)} tokens, more than max_prompt_tokens={config.max_prompt_tokens}: "
      "raise max_prompt_tokens, or drop such prompts from the task."
    )
  if tokens.min() < 0 or tokens.max() >= vocab_size:
    raise ValueError(f"{name} has a token outside 0..{vocab_size - 1}; is this the model's tokenizer?")
  if not 0 <= request.ticket < 2**32:
    raise ValueError(f"{name}: tickets must lie in 0..2**32-1, because they key the random numbers.")
  return tuple(Sample.empty(request.ticket, k, tokens, config.max_new_tokens) for k in range(config.group_size))


def continue_sample(
  request: Request, completion: Completion, tokens: Sequence[int], config: SamplerConfig, vocab_size: int
) -> Sample:
  """Makes an unfinished sample of a finished one by appending `tokens` that the policy did not draw.

  Args:
    request: the sample's request.
    completion: the finished sample.
    tokens: the context to append.
    config: the limits.
    vocab_size: the number of token ids that may occur.

  Raises:
    ValueError: if the tokens leave nothing to draw or are not of this vocabulary.
  """
  name = f"Sample {completion.sample} of request {request.ticket}"
  if len(completion.tokens) + len(tokens) >= config.max_new_tokens:
    raise ValueError(
      f"{name} has {len(completion.tokens)} tokens, and {len(tokens)} more leave nothing to draw of "
      f"max_new_tokens={config.max_new_tokens}: end it, or raise max_new_tokens."
    )
  if not all(0 <= token < vocab_size for token in tokens):
    raise ValueError(f"{name} was given a token outside 0..{vocab_size - 1}; is this the model's tokenizer?")
  prompt = np.asarray(request.tokens, np.int32)
  sample = Sample.empty(request.ticket, completion.sample, prompt, config.max_new_tokens)
  sample.extend(completion.tokens, completion.logprobs, completion.versions)
  sample.extend(np.asarray(tokens, np.int32), np.float32(0), np.int32(NO_VERSION))
  return sample


class Snapshot(NamedTuple):
  """All unfinished samples of a sampler, waiting ones included, as numpy arrays: N samples, S = capacity.

  Attributes:
    tickets: uint32 [N].
    samples: int32 [N].
    prompt_lengths: int32 [N].
    lengths: int32 [N], completion tokens so far.
    tokens: int32 [N, S], prompt and completion, followed by zeros.
    logprobs: float32 [N, C].
    versions: int32 [N, C].
  """

  tickets: np.ndarray
  samples: np.ndarray
  prompt_lengths: np.ndarray
  lengths: np.ndarray
  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray


def pack_samples(samples: Sequence[Sample], config: SamplerConfig) -> Snapshot:
  """Packs samples into the arrays of a checkpoint."""
  tokens = np.zeros((len(samples), config.capacity), np.int32)
  for row, sample in zip(tokens, samples, strict=True):
    prefix = sample.prefix()
    row[: len(prefix)] = prefix
  shape = (-1, config.max_new_tokens)
  return Snapshot(
    tickets=np.array([s.ticket for s in samples], np.uint32),
    samples=np.array([s.index for s in samples], np.int32),
    prompt_lengths=np.array([len(s.prompt) for s in samples], np.int32),
    lengths=np.array([s.length for s in samples], np.int32),
    tokens=tokens,
    logprobs=np.array([s.logprobs for s in samples], np.float32).reshape(shape),
    versions=np.array([s.versions for s in samples], np.int32).reshape(shape),
  )


def unpack_samples(state: Snapshot, config: SamplerConfig) -> list[Sample]:
  """Inverts `pack_samples`; the limits may have been raised in between.

  Raises:
    ValueError: if the limits were lowered below the lengths that the samples already have.
  """
  prompt_limit, limit = config.max_prompt_tokens, config.max_new_tokens
  if len(state.tickets) and (state.prompt_lengths.max() > prompt_limit or state.lengths.max() >= limit):
    raise ValueError(
      f"The snapshot holds prompts of {state.prompt_lengths.max()} and completions of {state.lengths.max()} tokens, "
      f"too many for max_prompt_tokens={prompt_limit} and max_new_tokens={limit}; "
      "restore it with limits as high as before."
    )
  samples = []
  for ticket, index, start, length, tokens, logprobs, versions in zip(*state, strict=True):
    sample = Sample.empty(int(ticket), int(index), np.array(tokens[:start]), limit)
    sample.extend(tokens[start : start + length], logprobs[:length], versions[:length])
    samples.append(sample)
  return samples
