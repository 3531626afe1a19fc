"""Summaries and their gold reward."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from async_rl import tasks
from async_rl.types import LENGTH
from async_rl.types import STOP


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
  folder = tmp_path_factory.mktemp("posts")
  row = {"subreddit": "pets", "title": "My cat", "post": " She sleeps all day. ", "summary": "The cat sat down."}
  (folder / "train.jsonl").write_text(json.dumps(row))
  pair = {"prompt": "p", "chosen": "good", "rejected": "bad"}
  (folder / "test_preferences.jsonl").write_text(json.dumps(pair))
  return folder


def test_summaries(posts):
  task = tasks.Summaries(posts)
  prompt = task.prompts("train")[0]
  assert prompt.text == "SUBREDDIT: r/pets\n\nTITLE: My cat\n\nPOST: She sleeps all day.\n\nTL;DR:"
  assert task.reward(prompt, task.solution(prompt, np.random.default_rng(0)), STOP) == 1.0
  assert task.reward(prompt, "the cat SAT", STOP) == pytest.approx(6 / 7)
  assert task.reward(prompt, "the cat sat", LENGTH) == -1.0
  assert task.reward(prompt, "", STOP) == 0.0
  assert task.preferences("test") == [tasks.Preference("p", "good", "bad")]
  with pytest.raises(ValueError, match="give either folder .* or dataset"):
    tasks.Summaries()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"post": ""}, "'post' must be a text that is not blank"),
    ({"post": 5}, "'post' must be a text that is not blank, got 5"),
    ({"title": ["My cat"]}, "'title' must be a text"),
    ({"summary": "..."}, "'summary' must hold a word"),
    ({"summary": None}, r"missing: \['summary'\]"),
    ({"title": "\ud83d"}, "'title' holds half of a surrogate pair"),
  ],
)
def test_a_record_of_no_use_is_refused_at_load(tmp_path, fields, message):
  rows = [{"post": "a", "summary": "b"}, {"post": "a", "summary": "b"} | fields]
  (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
  with pytest.raises(ValueError, match=rf"train\.jsonl:2: .*{message}"):
    tasks.Summaries(tmp_path).prompts("train")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"prompt": " "}, "'prompt' must be a text that is not blank"),
    ({"chosen": 1}, "'chosen' must be a text, got 1"),
    ({"chosen": "bad"}, "'chosen' and 'rejected' are the same text"),
  ],
)
def test_a_comparison_of_no_use_is_refused_at_load(tmp_path, fields, message):
  row = {"prompt": "p", "chosen": "good", "rejected": "bad"} | fields
  (tmp_path / "train_preferences.jsonl").write_text(json.dumps(row))
  with pytest.raises(ValueError, match=rf"train_preferences\.jsonl:1: .*{message}"):
    tasks.Summaries(tmp_path).preferences("train")


def test_summaries_from_tfds(tmp_path):
  import tensorflow_datasets as tfds

  class Posts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      features = {key: tfds.features.Text() for key in ("documents", "tldr")}
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      for i in range(100):
        yield i, {"documents": f"post {i}", "tldr": f"summary {i}"}

  Posts(data_dir=tmp_path, file_format="array_record").download_and_prepare()
  task = tasks.Summaries(dataset="posts", post="documents", summary="tldr", data_dir=str(tmp_path))
  train, test = task.prompts("train"), task.prompts("test")
  assert (len(train), len(test)) == (95, 5)
  assert len({p.text for p in [*train, *test]}) == 100
  assert train[0].text.startswith("POST: post ")
  assert train[0].answer == train[0].text[len("POST: ") : -len("\n\nTL;DR:")].replace("post", "summary")


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_rouge_agrees_with_a_plain_recursion(a, b):
  def longest(i, j):
    if not i or not j:
      return 0
    if a[i - 1] == b[j - 1]:
      return 1 + longest(i - 1, j - 1)
    return max(longest(i - 1, j), longest(i, j - 1))

  expected = 2 * longest(len(a), len(b)) / (len(a) + len(b)) if a and b else 0.0
  assert tasks.rouge_l(" ".join(a), " ".join(b)) == pytest.approx(expected)
