"""Assembly of groups into the packed, fixed-shape batch of one optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from async_rl.types import LENGTH
from async_rl.types import NO_GROUP
from async_rl.types import NO_VERSION
from async_rl.types import Batch
from async_rl.types import Completion
from async_rl.types import Group


@dataclasses.dataclass(frozen=True)
class BatchShape:
  """The static shape of a batch; one shape means one compilation.

  Attributes:
    sequences: B, sequences per optimizer step (groups * K).
    row_tokens: T, tokens of a packed row; at least the longest prompt plus the longest completion.
    rows: R, rows of a micro-batch; the learner mesh's data and fsdp axes must divide it.
    completion_tokens: C, longest completion.
    prompt_tokens: longest prompt; `None`: all that a row has room for beside a completion. The exact gradient norms of
      trajectories are computed over this many tokens more than a completion has.
    row_sequences: the most sequences of a row; `None` for any number. With it, attention on GPUs skips what lies
      outside of a sequence, which costs the more the higher it is; rows of many short sequences stay emptier.
    micro_batches: M, how many micro-batches there is room for. Only those that hold tokens are computed, so room
      costs nothing but a few integers. `None`: enough for the worst case, every sequence in a row of its own.
  """

  sequences: int
  row_tokens: int
  rows: int
  completion_tokens: int
  prompt_tokens: int | None = None
  row_sequences: int | None = None
  micro_batches: int | None = None

  def __post_init__(self):
    for field in ("sequences", "row_tokens", "rows", "completion_tokens"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} must be at least 1, got {field}={getattr(self, field)}.")
    for field in ("prompt_tokens", "row_sequences"):
      if getattr(self, field) is not None and getattr(self, field) < 1:
        raise ValueError(f"{field} must be at least 1, got {field}={getattr(self, field)}.")
    if self.completion_tokens >= self.row_tokens:
      raise ValueError(
        f"row_tokens must exceed completion_tokens, got row_tokens={self.row_tokens}, "
        f"completion_tokens={self.completion_tokens}; a row holds the prompt too."
      )

  @property
  def sequence_tokens(self) -> int:
    """Tokens of the longest sequence, prompt included."""
    if self.prompt_tokens is None:
      return self.row_tokens
    return min(self.row_tokens, self.prompt_tokens + self.completion_tokens)

  @property
  def max_segments(self) -> int | None:
    """The most segments of a row: its sequences and padding."""
    return None if self.row_sequences is None else self.row_sequences + 1

  @property
  def capacity(self) -> int:
    """M, resolved."""
    return self.micro_batches or -(-self.sequences // self.rows)

  def abstract(self) -> Batch:
    """Returns the shapes and dtypes of `pack`'s result, as ShapeDtypeStructs."""
    token_plane = jax.ShapeDtypeStruct((self.capacity, self.rows, self.row_tokens), np.int32)
    loss_plane = (self.sequences, self.completion_tokens)
    return Batch(
      tokens=token_plane,
      segments=token_plane,
      positions=token_plane,
      used=jax.ShapeDtypeStruct((), np.int32),
      index=jax.ShapeDtypeStruct(loss_plane, np.int32),
      micro=jax.ShapeDtypeStruct((self.sequences,), np.int32),
      mask=jax.ShapeDtypeStruct(loss_plane, np.bool_),
      logprobs=jax.ShapeDtypeStruct(loss_plane, np.float32),
      versions=jax.ShapeDtypeStruct(loss_plane, np.int32),
      rewards=jax.ShapeDtypeStruct((self.sequences,), np.float32),
      groups=jax.ShapeDtypeStruct((self.sequences,), np.int32),
      truncated=jax.ShapeDtypeStruct((self.sequences,), np.bool_),
    )


def pack(groups: Sequence[Group], shape: BatchShape) -> Batch:
  """Packs the sequences of `groups` into rows, longest first, each into the first row with room.

  The result depends on the order of `groups` only through rounding: sequences keep their order in the loss plane. A
  sample whose reward failed fills its place, but its tokens are masked and it belongs to no group.

  Args:
    groups: finished groups with `shape.sequences` completions in all.
    shape: the static shape.

  Returns:
    A `Batch` of numpy arrays.

  Raises:
    ValueError: if the number of sequences is not the shape's, or something does not fit; nothing is cut silently.
  """
  sequences = [(i, group.request.tokens, c) for i, group in enumerate(groups) for c in group.completions]
  if len(sequences) != shape.sequences:
    raise ValueError(f"The batch takes {shape.sequences} sequences, got {len(sequences)} in {len(groups)} groups.")
  lengths = np.array([len(prompt) + len(c.tokens) for _, prompt, c in sequences])
  _check_fits(sequences, lengths, shape)
  row_of, start_of, num_rows = _first_fit(lengths, shape.row_tokens, shape.row_sequences)
  used = -(-num_rows // shape.rows)
  if used > shape.capacity:
    raise ValueError(
      f"{num_rows} rows of {shape.row_tokens} tokens do not fit {shape.capacity} micro-batches of {shape.rows} rows; "
      "raise micro_batches, rows or row_tokens."
    )
  plane = (shape.capacity * shape.rows, shape.row_tokens)
  tokens, segments, positions = (np.zeros(plane, np.int32) for _ in range(3))
  loss_plane = (shape.sequences, shape.completion_tokens)
  index, versions = np.zeros(loss_plane, np.int32), np.full(loss_plane, NO_VERSION, np.int32)
  mask, logprobs = np.zeros(loss_plane, bool), np.zeros(loss_plane, np.float32)
  in_row = np.zeros(plane[0], np.int32)
  group_of = np.array([NO_GROUP if c.sample in groups[i].failed else i for i, _, c in sequences], np.int32)
  for b, (_, prompt, c) in enumerate(sequences):
    row, start, size, count = row_of[b], start_of[b], lengths[b], len(c.tokens)
    in_row[row] += 1
    tokens[row, start : start + size] = np.concatenate([prompt, c.tokens])
    segments[row, start : start + size] = in_row[row]
    positions[row, start : start + size] = np.arange(size)
    first = (row % shape.rows) * shape.row_tokens + start + len(prompt)
    index[b, :count] = first + np.arange(count)
    trained = c.mask & (group_of[b] != NO_GROUP)
    mask[b, :count] = trained
    logprobs[b, :count] = np.where(trained, c.logprobs, 0.0)
    versions[b, :count] = np.where(trained, c.versions, NO_VERSION)
  if np.any((versions == NO_VERSION) & mask):
    raise ValueError("A token to be trained has no version; the sampler must write one on every token it draws.")
  split = lambda x: x.reshape(shape.capacity, shape.rows, shape.row_tokens)
  return Batch(
    tokens=split(tokens),
    segments=split(segments),
    positions=split(positions),
    used=np.int32(used),
    index=index,
    micro=(np.asarray(row_of) // shape.rows).astype(np.int32),
    mask=mask,
    logprobs=logprobs,
    versions=versions,
    rewards=np.concatenate([g.rewards for g in groups]).astype(np.float32),
    groups=group_of,
    truncated=np.array([c.finish == LENGTH for _, _, c in sequences]),
  )


def _check_fits(
  sequences: Sequence[tuple[int, np.ndarray, Completion]], lengths: np.ndarray, shape: BatchShape
) -> None:
  longest_prompt = shape.prompt_tokens or shape.row_tokens - 1
  for (_, prompt, c), length in zip(sequences, lengths, strict=True):
    fits = 0 < len(prompt) <= longest_prompt and len(c.tokens) <= shape.completion_tokens
    if not fits or length > shape.row_tokens:
      raise ValueError(
        f"Sample {c.sample} of group {c.ticket} has {len(prompt)} prompt and {len(c.tokens)} completion tokens; "
        f"the batch takes 1 to {longest_prompt} prompt tokens, at most completion_tokens={shape.completion_tokens}, "
        f"and at most row_tokens={shape.row_tokens} together."
      )


def _first_fit(lengths: np.ndarray, capacity: int, limit: int | None) -> tuple[np.ndarray, np.ndarray, int]:
  """First-fit decreasing, at most `limit` to a row: row and start of every sequence, and the number of rows."""
  row_of, start_of = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
  fill, held = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
  num_rows = 0
  for b in np.argsort(-lengths, kind="stable"):
    row = int(np.argmax((fill + lengths[b] <= capacity) & (held < (limit or len(lengths)))))
    row_of[b], start_of[b] = row, fill[row]
    fill[row] += lengths[b]
    held[row] += 1
    num_rows = max(num_rows, row + 1)
  return row_of, start_of, num_rows
