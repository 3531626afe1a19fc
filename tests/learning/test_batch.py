"""Packing: every token where it should be, nothing lost, nothing cut."""

import numpy as np
import pytest
from learning_helpers import make_groups

from async_rl import learning
from async_rl.types import LENGTH
from async_rl.types import NO_GROUP
from async_rl.types import NO_VERSION


@pytest.mark.parametrize("row_tokens", [20, 33, 64])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_token_is_where_index_says(row_tokens, rows):
  groups = make_groups()
  shape = learning.BatchShape(sequences=16, row_tokens=row_tokens, rows=rows, completion_tokens=12)
  batch = learning.pack(groups, shape)
  sequences = [(g, c) for g in groups for c in g.completions]
  total = 0
  for b, (group, c) in enumerate(sequences):
    tokens = batch.tokens[batch.micro[b]].reshape(-1)
    segments = batch.segments[batch.micro[b]].reshape(-1)
    positions = batch.positions[batch.micro[b]].reshape(-1)
    at = batch.index[b, : len(c.tokens)]
    np.testing.assert_array_equal(tokens[at], c.tokens)
    first = at[0] - len(group.request.tokens)
    np.testing.assert_array_equal(tokens[first : at[0]], group.request.tokens)
    whole = slice(first, at[-1] + 1)
    np.testing.assert_array_equal(positions[whole], np.arange(at[-1] + 1 - first))
    assert len(set(segments[whole])) == 1
    assert segments[first] > 0
    np.testing.assert_array_equal(batch.mask[b, : len(c.tokens)], c.mask)
    np.testing.assert_array_equal(batch.versions[b][batch.mask[b]], c.versions[c.mask])
    np.testing.assert_array_equal(batch.logprobs[b][batch.mask[b]], c.logprobs[c.mask])
    assert not batch.mask[b, len(c.tokens) :].any()
    assert batch.groups[b] == b // 4
    assert batch.truncated[b] == (c.finish == LENGTH)
    total += at[-1] + 1 - first
  assert np.sum(batch.segments > 0) == total
  assert np.all(batch.versions[~batch.mask] == NO_VERSION)
  assert np.all(batch.segments[batch.used :] == 0)


def test_segments_of_a_row_are_distinct():
  shape = learning.BatchShape(sequences=16, row_tokens=64, rows=2, completion_tokens=12)
  batch = learning.pack(make_groups(), shape)
  starts = (batch.positions == 0) & (batch.segments > 0)
  for row, begin in zip(batch.segments.reshape(-1, 64), starts.reshape(-1, 64), strict=True):
    np.testing.assert_array_equal(np.sort(row[begin]), np.arange(1, begin.sum() + 1))


@pytest.mark.parametrize("most", [1, 3])
def test_a_row_holds_no_more_sequences_than_it_may(most):
  shape = learning.BatchShape(sequences=16, row_tokens=64, rows=2, completion_tokens=12, row_sequences=most)
  batch = learning.pack(make_groups(), shape)
  held = batch.segments.max(axis=2)
  assert held.max() == most
  assert held.sum() == 16
  assert shape.max_segments == most + 1  # and padding
  with pytest.raises(ValueError, match="row_sequences=0"):
    learning.BatchShape(sequences=16, row_tokens=64, rows=2, completion_tokens=12, row_sequences=0)


def test_long_sequences_are_placed_first():
  """Lengths 4, 4, 6, 6 fill two rows of ten; in their own order they would take three."""
  lengths = (4, 4, 6, 6)
  group = make_groups(groups=1, samples=4)[0]
  completions = [c._replace(**_cut(c, length - 1)) for c, length in zip(group.completions, lengths, strict=True)]
  group = group._replace(completions=tuple(completions), request=group.request._replace(tokens=np.ones(1, np.int32)))
  shape = learning.BatchShape(sequences=4, row_tokens=10, rows=1, completion_tokens=9, micro_batches=2)
  batch = learning.pack([group], shape)
  assert batch.used == 2
  assert np.all(batch.segments > 0)


def _cut(completion, length):
  """The fields of tokens, repeated or cut to this length."""
  fields = ("tokens", "logprobs", "versions", "mask")
  return {field: np.resize(getattr(completion, field), length) for field in fields}


def test_the_longest_prompt_and_completion_fit_exactly():
  group = make_groups(groups=1, samples=2)[0]
  completions = tuple(c._replace(**_cut(c, 12)) for c in group.completions)
  group = group._replace(completions=completions, request=group.request._replace(tokens=np.ones(8, np.int32)))
  exact = dict(sequences=2, row_tokens=20, rows=1, completion_tokens=12, prompt_tokens=8)
  assert learning.pack([group], learning.BatchShape(**exact)).used == 2
  for field in ("row_tokens", "completion_tokens", "prompt_tokens"):
    with pytest.raises(ValueError, match="8 prompt and 12 completion tokens"):
      learning.pack([group], learning.BatchShape(**exact | {field: exact[field] - 1}))
  assert learning.BatchShape(**exact).sequence_tokens == 20
  assert learning.BatchShape(**exact | {"row_tokens": 64}).sequence_tokens == 20
  assert learning.BatchShape(**exact | {"row_tokens": 64, "prompt_tokens": None}).sequence_tokens == 64


def test_only_micro_batches_with_tokens_are_used():
  """Sixteen short sequences fit one row, of the sixteen there would be room for."""
  groups = make_groups(prompt=(1, 2), completion=(1, 2))
  shape = learning.BatchShape(sequences=16, row_tokens=40, rows=1, completion_tokens=12)
  assert shape.capacity == 16
  assert learning.pack(groups, shape).used == 1


def test_token_id_zero_is_a_token_like_any_other():
  groups = make_groups(vocab=1)
  shape = learning.BatchShape(sequences=16, row_tokens=20, rows=4, completion_tokens=12)
  batch = learning.pack(groups, shape)
  assert batch.segments.astype(bool).sum() == sum(
    len(g.request.tokens) + len(c.tokens) for g in groups for c in g.completions
  )


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(sequences=15), "15 sequences, got 16"),
    (dict(completion_tokens=5), "completion_tokens=5"),
    (dict(row_tokens=13), "row_tokens=13"),
    (dict(micro_batches=1, rows=1), "raise micro_batches"),
  ],
)
def test_what_does_not_fit_is_named(change, message):
  shape = dict(sequences=16, row_tokens=20, rows=4, completion_tokens=12) | change
  with pytest.raises(ValueError, match=message):
    learning.pack(make_groups(seed=1), learning.BatchShape(**shape))


def test_a_missing_version_is_an_error_not_lag_zero():
  group = make_groups(groups=1, samples=1)[0]
  c = group.completions[0]
  c = c._replace(versions=np.full_like(c.versions, NO_VERSION), mask=np.ones_like(c.mask))
  shape = learning.BatchShape(sequences=1, row_tokens=20, rows=1, completion_tokens=12)
  with pytest.raises(ValueError, match="no version"):
    learning.pack([group._replace(completions=(c,))], shape)


def test_a_sample_whose_reward_failed_is_masked_and_of_no_group():
  groups, shape = make_groups(), learning.BatchShape(sequences=16, row_tokens=20, rows=4, completion_tokens=12)
  whole = learning.pack(groups, shape)
  groups[1] = groups[1]._replace(failed=(0, 2))
  batch = learning.pack(groups, shape)
  failed = np.isin(np.arange(16), [4, 6])
  assert not batch.mask[failed].any()
  assert np.all(batch.versions[failed] == NO_VERSION)
  assert not batch.logprobs[failed].any()
  assert np.all(batch.groups[failed] == NO_GROUP)
  for field in ("mask", "versions", "logprobs", "groups"):
    np.testing.assert_array_equal(getattr(batch, field)[~failed], getattr(whole, field)[~failed])
  np.testing.assert_array_equal(batch.tokens, whole.tokens)


@pytest.mark.parametrize("field", ["sequences", "row_tokens", "rows", "completion_tokens"])
def test_shape_fields_are_checked(field):
  with pytest.raises(ValueError, match=f"{field}=0"):
    learning.BatchShape(**(dict(sequences=2, row_tokens=20, rows=1, completion_tokens=12) | {field: 0}))


def test_the_abstract_batch_is_like_a_packed_one():
  shape = learning.BatchShape(sequences=16, row_tokens=33, rows=3, completion_tokens=12)
  batch = learning.pack(make_groups(), shape)
  assert [(x.shape, x.dtype) for x in batch] == [(x.shape, x.dtype) for x in shape.abstract()]
