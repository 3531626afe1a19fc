"""Everything about a data set's prompts that can be known before a run, checked in one walk."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from async_rl.tasks._task import Prompts
from async_rl.types import Prompt

#: Offending prompts that an error shows.
SHOWN = 3
#: Prompts that are encoded at a time.
BATCH = 1024

Text = str | list[dict[str, str]]
EncodePrompts = Callable[[Sequence[Text]], Sequence[Sequence[int]]]
SameAnswer = Callable[[Prompt, Prompt], bool]


@dataclasses.dataclass(frozen=True)
class PromptCheck:
  """The result of `check_prompts`.

  Attributes:
    prompts: the number of prompts, those that are left out included.
    skipped: the ids of the prompts to leave out, in ascending order.
    reasons: how many prompts are left out, by reason: `unreadable`, `misnumbered`, `blank`, `too long` or
      `contradictory` (the same text with another answer).
    repeated: the number of prompts that are used although their text is that of an earlier one.
    longest: the number of tokens of the longest prompt, 0 without an encoder.
    fingerprint: a hash of the texts and answers of all prompts and of `skipped`, for a resume to compare.
  """

  prompts: int
  skipped: tuple[int, ...]
  reasons: Mapping[str, int]
  repeated: int
  longest: int
  fingerprint: str

  def select(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns the prompts that are not left out, with their own ids.

    Args:
      prompts: the prompts that were checked.
    """
    if not self.skipped:
      return prompts
    skipped = frozenset(self.skipped)
    kept = [i for i in range(self.prompts) if i not in skipped]
    return Prompts(kept, lambda _, i: prompts[i])

  def describe(self) -> str | None:
    """Returns a sentence on the prompts that are left out or occur twice, None if there are none."""
    clauses = []
    if self.skipped:
      reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
      clauses.append(f"{len(self.skipped)} of {self.prompts} prompts are left out ({reasons})")
    if self.repeated:
      clauses.append(f"{self.repeated} of {self.prompts} prompts repeat an earlier one")
    return "; ".join(clauses) or None


def check_prompts(
  prompts: Sequence[Prompt],
  encode_prompts: EncodePrompts | None = None,
  max_tokens: int | None = None,
  *,
  same_answer: SameAnswer | None = None,
  skip: bool = False,
) -> PromptCheck:
  """Reads every prompt once and finds those that a run could not use.

  Args:
    prompts: the prompts of a split, item i with id i.
    encode_prompts: from texts to their token ids, such as a tokenizer's `encode_prompts`; None checks no tokens.
    max_tokens: the limit on the tokens of a prompt; None for no limit.
    same_answer: whether two prompts of the same text have the same answer, such as a task's `same_answer`; None
      compares their answers. All prompts of a text that has different ones are of no use.
    skip: whether such prompts are to be left out instead of refused.

  Raises:
    ValueError: if there are such prompts, unless `skip` is True and there are others. It names the first ones, with
      file and line where the task reads a file, the number of all, and the remedy.
  """
  if not isinstance(prompts, Sequence):
    raise ValueError(
      f"the prompts of a split must be a sequence, such as a list or tasks.Prompts, got {type(prompts).__name__}."
    )
  walk = _Walk(prompts, encode_prompts, max_tokens, same_answer or _have_same_answer)
  for start in range(0, len(prompts), BATCH):
    walk.check_batch(range(start, min(start + BATCH, len(prompts))))
  walk.check_copies()
  if walk.problems and (not skip or len(walk.problems) == len(prompts)):
    raise ValueError(walk.describe())
  return walk.result()


class _Walk:
  """The state of one walk over the prompts."""

  def __init__(
    self,
    prompts: Sequence[Prompt],
    encode_prompts: EncodePrompts | None,
    max_tokens: int | None,
    same_answer: SameAnswer,
  ):
    self._prompts = prompts
    self._encode = encode_prompts
    self._max_tokens = max_tokens
    self._same_answer = same_answer
    self._hash = hashlib.sha256()
    self._ids: dict[str, list[int]] = {}  # text -> ids of its prompts, in ascending order
    self._longest = 0
    self.problems: dict[int, tuple[str, str]] = {}  # id -> (reason, sentence)

  def check_batch(self, ids: range) -> None:
    readable = {}
    for i in ids:
      prompt = self._read(i)
      if prompt is not None:
        readable[i] = prompt.text
    for i, length in zip(readable, self._lengths(readable)):
      self._longest = max(self._longest, length)
      if not length:
        self.problems[i] = "blank", "it has no tokens"
      elif self._max_tokens is not None and length > self._max_tokens:
        self.problems[i] = "too long", f"it has {length} tokens, more than max_prompt_tokens={self._max_tokens}"

  def check_copies(self) -> None:
    """Finds prompts of the same text whose answers contradict each other, once all were read."""
    for ids in self._ids.values():
      if len(ids) == 1:
        continue
      first = self._prompts[ids[0]]
      others = {i for i in ids[1:] if not self._same_answer(first, self._prompts[i])}
      for i in ids if others else ():
        other = ids[0] if i in others else min(others)
        sentence = f"it has another answer than the same prompt at {self._place(other)}"
        self.problems.setdefault(i, ("contradictory", sentence))

  def _place(self, i: int) -> str:
    return self._prompts.where(i) if isinstance(self._prompts, Prompts) else f"prompt {i}"

  def _read(self, i: int) -> Prompt | None:
    """Returns prompt `i` with a text that can be encoded; notes the problem and returns None if it has none."""
    try:
      prompt = self._prompts[i]
      if not isinstance(prompt, Prompt):
        raise ValueError(f"it must be a types.Prompt, got {prompt!r:.60}")
      text = _canonical_text(prompt.text)
      self._hash.update(text.encode())
      self._hash.update(json.dumps(_canonical(prompt.answer)).encode())
    except ValueError as error:
      self._hash.update(b"unreadable")
      self.problems[i] = "unreadable", str(error)
      return None
    if prompt.id != i:
      self.problems[i] = "misnumbered", f"item {i} has id {prompt.id!r}; ids must be the positions of the prompts"
      return None
    if not _content(prompt.text).strip():
      self.problems[i] = "blank", "its text is blank"
      return None
    self._ids.setdefault(text, []).append(i)
    return prompt

  def _lengths(self, texts: Mapping[int, Text]) -> list[int]:
    if self._encode is None:
      return [1] * len(texts)  # nothing is known of tokens
    try:
      return list(map(len, self._encode(list(texts.values()))))
    except ValueError:  # of one of them: ask for each
      return [self._length(i, text) for i, text in texts.items()]

  def _length(self, i: int, text: Text) -> int:
    assert self._encode is not None
    try:
      return len(self._encode([text])[0])
    except ValueError as error:
      self.problems[i] = "unreadable", str(error)
      return 1

  def describe(self) -> str:
    """Returns the sentence of the error."""
    shown = sorted(self.problems)[:SHOWN]
    places = "; ".join(f"{self._place(i)}: {self.problems[i][1]}" for i in shown)
    more = f"; and {len(self.problems) - len(shown)} more" if len(self.problems) > len(shown) else ""
    raise_limit = f"raise max_prompt_tokens to {self._longest}, " if "too long" in self._reasons() else ""
    skipping = "or skip them (--skip-bad-prompts)" if len(self.problems) < len(self._prompts) else "or use other data"
    return (
      f"{len(self.problems)} of {len(self._prompts)} prompts cannot be used: {places}{more}. "
      f"Correct the data, {raise_limit}{skipping}."
    )

  def _reasons(self) -> dict[str, int]:
    return dict(sorted(collections.Counter(reason for reason, _ in self.problems.values()).items()))

  def result(self) -> PromptCheck:
    skipped = tuple(sorted(self.problems))
    self._hash.update(json.dumps(skipped).encode())
    used = [sum(i not in self.problems for i in ids) for ids in self._ids.values()]
    return PromptCheck(
      prompts=len(self._prompts),
      skipped=skipped,
      reasons=self._reasons(),
      repeated=sum(max(0, count - 1) for count in used),
      longest=self._longest if self._encode else 0,
      fingerprint=self._hash.hexdigest(),
    )


def _have_same_answer(prompt: Prompt, other: Prompt) -> bool:
  return json.dumps(_canonical(prompt.answer)) == json.dumps(_canonical(other.answer))


def _canonical_text(text: Any) -> str:
  """Returns a prompt's text as one string, or raises a ValueError for what is no text."""
  if isinstance(text, str):
    written = json.dumps(text, ensure_ascii=False)
  elif isinstance(text, list) and text and all(map(_is_message, text)):
    written = json.dumps(text, ensure_ascii=False, sort_keys=True, default=repr)
  else:
    raise ValueError(
      f"its text must be a string or a list of messages whose role and content are strings, got {text!r:.80}"
    )
  try:
    written.encode()
  except UnicodeEncodeError as error:
    raise ValueError("its text holds half of a surrogate pair, which no tokenizer can encode") from error
  return written


def _is_message(message: Any) -> bool:
  return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _content(text: Text) -> str:
  """The text of a prompt without roles."""
  return text if isinstance(text, str) else "".join(message["content"] for message in text)


def _canonical(value: Any) -> Any:
  """Returns an answer as JSON writes it, the same in every process; what has no such form counts by its type only."""
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, Mapping):
    return {"mapping": sorted(([str(key), _canonical(item)] for key, item in value.items()), key=lambda pair: pair[0])}
  if isinstance(value, list | tuple):
    return [_canonical(item) for item in value]
  if isinstance(value, set | frozenset):
    return {"set": sorted(json.dumps(_canonical(item)) for item in value)}
  if isinstance(value, bytes):
    return value.hex()
  if hasattr(value, "tolist"):  # of numpy
    return value.tolist()
  return {"type": type(value).__qualname__}
