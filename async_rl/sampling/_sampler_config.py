"""Settings of a sampler."""

from __future__ import annotations

import dataclasses
import math

from async_rl._validation import check_choice

ON_UPDATE = ("keep", "recompute")
LOGPROBS_OF = ("plain", "truncated")
_GRANULE = 16  # lengths are multiples of this
_FEWEST = 8  # slots of a device that are worth programs of their own


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """Sets the sizes and the sampling distribution of a sampler; hashable, so it can be a static argument.

  Attributes:
    slots: the number of samples decoded at the same time. Each owns key/value cache for `capacity` tokens, or with
      `shared_prompts` for `max_new_tokens`.
    group_size: K, the number of samples of each request.
    max_prompt_tokens: the length of the longest prompt accepted.
    max_new_tokens: the length of the longest completion; reaching it ends a sample with `LENGTH`.
    chunk: the number of decode steps per chunk. Between chunks, finished slots are refilled and weights can change.
    temperature: the temperature of the softmax. Log-probabilities are of the tempered distribution,
      softmax(logits / temperature), so the learner must score at the same temperature. At 0 the most likely token is
      taken and its log-probability is the one at temperature 1.
    top_k: the number of most likely tokens to draw from (and those tied with the last of them); `None` for all.
    top_p: the probability that the tokens to draw from must have together, as few and likely as possible; `None` for
      all tokens.
    logprobs_of: with `top_k` or `top_p`, the distribution that the log-probabilities are of: "plain" is the whole
      tempered softmax (what a learner computes, but not what the token was drawn from), "truncated" is the one drawn
      from (right for importance weights, but a learner that scores the whole softmax sees ratios below 1).
    on_update: the fate of the cache of unfinished samples when the weights change: "keep" continues with keys and
      values of the older weights, so that the learner's log-probabilities of later tokens differ from the sampler's;
      "recompute" replaces them, at the cost of a prefill of all unfinished samples for every update.
    seed: the seed of all randomness, 0 <= seed < 2**32.
    length_buckets: n; programs are compiled for prompts and for a cache of 1/n, 2/n, ... of the greatest length. The
      cost of a decode step grows with the length, so the shortest that holds all samples is used. With 1, and
      `slot_buckets` 1, a sample does not depend on its neighbors bit for bit; with more, up to the rounding of programs
      of different shapes. Kernels that read only what is filled need no shorter cache.
    slot_buckets: n; programs are also compiled for a cache of a quarter, a sixteenth, ... of the slots: n numbers of
      slots in all, less those below 8 on a device. Live samples move into the smallest cache that holds them.
    prefill_tokens: the number of tokens, padding included, that one prefill call should process.
    shared_prompts: whether the keys and values of a prompt are kept, and in a decode step read, once for all samples of
      its group, and not once for each. Changes samples up to rounding. Not for the kernel of decode steps on TPUs. A
      sample that is resumed or restored has its prompt alone.
  """

  slots: int
  group_size: int
  max_prompt_tokens: int
  max_new_tokens: int
  chunk: int = 32
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  logprobs_of: str | None = None
  on_update: str = "keep"
  seed: int = 0
  length_buckets: int = 2
  slot_buckets: int = 3
  prefill_tokens: int = 1024
  shared_prompts: bool = False

  def __post_init__(self):
    for name in (
      "slots",
      "group_size",
      "max_prompt_tokens",
      "max_new_tokens",
      "chunk",
      "length_buckets",
      "slot_buckets",
      "prefill_tokens",
    ):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {name}={getattr(self, name)}; raise it.")
    if self.slots < self.group_size:
      raise ValueError(
        f"slots must be at least group_size, got slots={self.slots}, group_size={self.group_size}: "
        "a request needs all its slots at once, so none would ever start."
      )
    if not 0 <= self.temperature < math.inf:
      raise ValueError(
        f"temperature must be finite and at least 0, got temperature={self.temperature}; 1 draws from the policy."
      )
    check_choice("on_update", self.on_update, ON_UPDATE)
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed must lie in 0..2**32-1, got seed={self.seed}; choose another one.")
    self._check_truncation()

  def _check_truncation(self) -> None:
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k must be at least 1, got top_k={self.top_k}; None draws from all tokens.")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"top_p must lie in (0, 1], got top_p={self.top_p}; None draws from all tokens.")
    truncated = self.top_k is not None or self.top_p is not None
    if truncated and self.temperature == 0:
      raise ValueError("top_k and top_p have no effect at temperature=0, which takes the most likely token; drop them.")
    if truncated and self.logprobs_of not in LOGPROBS_OF:
      raise ValueError(
        f"top_k={self.top_k}, top_p={self.top_p} draw from another distribution than the learner scores: state with "
        f"logprobs_of, one of {LOGPROBS_OF}, which one the log-probabilities are of; got {self.logprobs_of!r}."
      )
    if not truncated and self.logprobs_of is not None:
      raise ValueError(f"logprobs_of={self.logprobs_of!r} has no effect without top_k or top_p; drop it.")

  @property
  def prompt_lengths(self) -> tuple[int, ...]:
    """Returns the padded prompt lengths, ascending."""
    return _buckets(self.max_prompt_tokens, self.length_buckets)

  @property
  def lengths(self) -> tuple[int, ...]:
    """Returns the attended lengths of a decode step, ascending."""
    return _buckets(self.max_prompt_tokens + self.max_new_tokens, self.length_buckets)

  @property
  def shares_prompts(self) -> bool:
    """Returns whether prompts are shared; there is nothing to share in groups of one."""
    return self.shared_prompts and self.group_size > 1

  @property
  def own_lengths(self) -> tuple[int, ...]:
    """Returns the lengths of a slot's cache, ascending: `lengths`, or those of completions if prompts are shared."""
    return _buckets(self.max_new_tokens, self.length_buckets) if self.shares_prompts else self.lengths

  def cache_shapes(self, shards: int, filled_only: bool) -> tuple[tuple[int, int], ...]:
    """Returns the numbers of slots and positions that the cache can have, from the one that costs least to decode.

    Args:
      shards: the number of devices that split the slots.
      filled_only: whether attention reads only the filled positions, so that there is one length.
    """
    each = self.slots // shards
    counts = {-(-each // 4**i) for i in range(1, self.slot_buckets)}
    lengths = self.own_lengths
    shapes = [(self.slots, length) for length in (lengths[-1:] if filled_only else lengths)]
    shapes += [(shards * n, lengths[-1]) for n in counts if _FEWEST <= n < each]
    return tuple(sorted(shapes, key=math.prod))

  def prompt_counts(self, shards: int, rows: int) -> tuple[int, ...]:
    """Returns the numbers of shared prompts that there can be beside a cache of so many rows, ascending.

    While groups are whole, one prompt for K slots is enough. Where slots are refilled, a group lives as long as its
    longest sample, up to three times as long as the mean, and so many prompts are live. A group may have a single
    sample left, so that rows and prompts can be as many.

    Args:
      shards: the number of devices that split the slots.
      rows: the number of rows of the cache.
    """
    if not self.shares_prompts:
      return (0,)
    whole = shards * -(-self.slots // (shards * self.group_size))
    if rows < self.slots:
      return (rows,)
    return tuple(sorted({whole, rows} | ({3 * whole} if 6 * whole <= rows else set())))

  @property
  def prefix_lengths(self) -> tuple[int, ...]:
    """Returns the padded lengths of a prefill, ascending: those of prompts, then those of prompts with completions."""
    prompts = self.prompt_lengths
    return prompts + tuple(n for n in self.lengths if n > prompts[-1])

  @property
  def capacity(self) -> int:
    """Returns S, the number of cache positions of a sample."""
    return self.lengths[-1]


def _buckets(limit: int, count: int) -> tuple[int, ...]:
  return tuple(sorted({-(-limit * i // (count * _GRANULE)) * _GRANULE for i in range(1, count + 1)}))
