"""Summaries of forum posts, in the form of the TL;DR task (Stiennon et al., Learning to summarize, 2020)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.tasks._jsonl import read_jsonl
from async_rl.tasks._jsonl import text_field
from async_rl.tasks._task import Preference
from async_rl.tasks._task import Prompts
from async_rl.tasks._task import known
from async_rl.tasks._tfds_records import prepared
from async_rl.types import STOP
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True)
class Summaries:
  """Posts with reference summaries, from a folder of jsonl files or from TFDS.

  `reward` is a gold reward that needs no model, so that over-optimization of a trained proxy can be measured against
  it: ROUGE-L (Lin, 2004), the F measure of the longest common subsequence of words with the reference. A completion
  that was cut off gets `missing_end`. A reward model trained on `preferences` replaces it in a configuration.

  Attributes:
    folder: the folder with `train.jsonl` and `test.jsonl`, one object per line with the fields below and perhaps
      `title` and `subreddit`; None takes `dataset`. The comparisons are in `train_preferences.jsonl` and
      `test_preferences.jsonl`, with `prompt`, `chosen` and `rejected`.
    dataset: the name of a TFDS data set, such as "reddit_tifu/long". If it has no test split, the last 5 % of train are
      that.
    post: the field with the text to summarize.
    summary: the field with the reference summary.
    missing_end: the reward of a completion that did not end.
    data_dir: the folder in which TFDS keeps its data sets; None means its default.
  """

  folder: str | os.PathLike | None = None
  dataset: str | None = None
  post: str = "post"
  summary: str = "summary"
  missing_end: float = -1.0
  data_dir: str | None = None

  def __post_init__(self):
    if (self.folder is None) == (self.dataset is None):
      raise ValueError(
        f"give either folder (with train.jsonl and test.jsonl) or dataset, got folder={self.folder!r}, "
        f"dataset={self.dataset!r}"
      )

  @property
  def name(self) -> str:
    return "summaries"

  def prompts(self, split: str) -> Sequence[Prompt]:
    known("split", split, ("train", "test"))
    if self.folder is not None:
      path = os.path.join(self.folder, f"{split}.jsonl")
      return Prompts(read_jsonl(path, (self.post, self.summary), lambda record: self.prompt(0, record)), self.prompt)
    import tensorflow_datasets as tfds

    builder = prepared(lambda: tfds.builder(self.dataset, data_dir=self.data_dir, file_format="array_record"))
    if "test" not in builder.info.splits:
      split = {"train": "train[:95%]", "test": "train[95%:]"}[split]
    return Prompts(builder.as_data_source(split=split), self.prompt)

  def prompt(self, id: int, record: dict[str, Any]) -> Prompt:
    """Returns the prompt of one record, ending in `TL;DR:`.

    Raises:
      ValueError: if a field is no text, or the post or the summary is blank.
    """
    heads = (("SUBREDDIT: r/", "subreddit"), ("TITLE: ", "title"), ("POST: ", self.post))
    parts = [head + text_field(record, field) for head, field in heads if record.get(field) or field == self.post]
    summary = text_field(record, self.summary)
    if not _words(summary):
      raise ValueError(f"field {self.summary!r} must hold a word, so that a summary can share one; got {summary!r:.80}")
    return Prompt(id, "\n\n".join([*parts, "TL;DR:"]), summary)

  def reward(self, prompt: Prompt, text: str, finish: str) -> float:
    return rouge_l(text, prompt.answer) if finish == STOP else self.missing_end

  def same_answer(self, prompt: Prompt, other: Prompt) -> bool:
    """Returns True: several summaries of one post may all be good."""
    del prompt, other
    return True

  def solution(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Returns the reference summary."""
    del rng
    return f" {prompt.answer}"

  def preferences(self, split: str) -> list[Preference]:
    """Returns the comparisons of `split` in the folder."""
    known("split", split, ("train", "test"))
    if self.folder is None:
      raise ValueError("preferences come from the folder: give folder")
    path = os.path.join(self.folder, f"{split}_preferences.jsonl")
    return [_preference(record) for record in read_jsonl(path, Preference._fields, _preference)]


def _preference(record: dict[str, Any]) -> Preference:
  """Returns the comparison of one record. Completions are taken as they are; they may be blank."""
  if not isinstance(record["prompt"], list):
    text_field(record, "prompt")
  for field in ("chosen", "rejected"):
    if not isinstance(record[field], str):
      raise ValueError(f"field {field!r} must be a text, got {record[field]!r:.80}")
  if record["chosen"] == record["rejected"]:
    raise ValueError("fields 'chosen' and 'rejected' are the same text, so there is no preference")
  return Preference(record["prompt"], record["chosen"], record["rejected"])


def rouge_l(text: str, reference: str, max_words: int = 400) -> float:
  """Returns ROUGE-L, from 0 to 1: the F measure of the longest common subsequence of words (of the first `max_words`).

  >>> round(rouge_l("The cat sat.", "the cat sat down"), 3)
  0.857
  """
  words, others = _words(text)[:max_words], _words(reference)[:max_words]
  if not words or not others:
    return 0.0
  longest = [0] * (len(others) + 1)
  for word in words:
    diagonal = 0
    for j, other in enumerate(others, 1):
      diagonal, longest[j] = longest[j], diagonal + 1 if word == other else max(longest[j], longest[j - 1])
  return 2 * longest[-1] / (len(words) + len(others))


def _words(text: str) -> list[str]:
  return [word.lower() for word in re.findall(r"\w+", text)]
