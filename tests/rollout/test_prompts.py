"""The stream of prompts: its order, epochs, and what happens to it when prompts are left out."""

import collections
import types

import numpy as np
import pytest

from async_rl import models
from async_rl import rollout
from async_rl import tasks
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Prompt

TOKENIZER = models.SentencePieceTokenizer(models.train_sentencepiece(["0123456789+=;"]))
#: Numbers of one to nine digits.
PROMPTS = [Prompt(i, "1" * (i % 9 + 1), i % 9) for i in range(50)]


def encoder(max_prompt_tokens=10):  # BOS included
  return rollout.PromptEncoder(tasks.Sums(numbers=2, train=64, test=8), TOKENIZER, max_prompt_tokens)


def ids(stream, tickets):
  return [stream.request(ticket).prompt.id for ticket in tickets]


def test_each_epoch_deals_every_prompt_once_in_an_order_of_its_own():
  stream = rollout.PromptStream(encoder(), PROMPTS, seed=0, epochs=2)
  assert stream.num_tickets == 100
  first, second = ids(stream, range(50)), ids(stream, range(50, 100))
  assert sorted(first) == sorted(second) == list(range(50))
  assert first != second


@pytest.mark.parametrize("epochs", [None, 3])
def test_leaving_prompts_out_keeps_the_order_of_the_others(epochs):
  check = encoder(max_prompt_tokens=8).check(PROMPTS, skip=True)
  assert check.reasons == {"too long": 10}
  whole = rollout.PromptStream(encoder(), PROMPTS, seed=3, epochs=epochs)
  stream = rollout.PromptStream(encoder(max_prompt_tokens=8), PROMPTS, seed=3, epochs=epochs, skipped=check.skipped)
  expected = [id for id in ids(whole, range(150)) if id not in check.skipped]
  assert ids(stream, range(120)) == expected
  assert stream.num_tickets == (120 if epochs else None)
  tickets = [100, 0, 79, 45, 81, 3]  # in any order, as after a resume
  assert ids(stream, tickets) == [expected[ticket] for ticket in tickets]


def test_what_the_error_advises_works():
  with pytest.raises(ValueError, match="5 of 50 prompts cannot be used.*raise max_prompt_tokens to 10, or skip them"):
    encoder(max_prompt_tokens=9).check(PROMPTS)
  assert encoder(max_prompt_tokens=10).check(PROMPTS).skipped == ()


def test_lengths_are_those_that_the_sampler_gets():
  check = encoder(max_prompt_tokens=100).check(PROMPTS)
  stream = rollout.PromptStream(encoder(), PROMPTS, seed=0)
  lengths = collections.Counter(len(stream.request(ticket).tokens) for ticket in range(50))
  assert check.longest == max(lengths) == 10


def test_a_stream_without_prompts_is_refused():
  for prompts, skipped in (([], ()), (PROMPTS[:2], (0, 1))):
    with pytest.raises(ValueError, match="has no training prompts"):
      rollout.PromptStream(encoder(), prompts, seed=0, skipped=skipped)


def test_the_prompts_of_a_data_set_pass(tmp_path):
  task = tasks.Sums(numbers=2, train=64, test=8, data_dir=str(tmp_path))
  check = rollout.PromptEncoder(task, TOKENIZER, 8).check(task.prompts("train"))
  assert (check.prompts, check.skipped, check.longest) == (64, (), 7)


@pytest.mark.parametrize("stop_ids", [(), (7,), (0,), (9, 3, 3, 5)])
def test_turns_end_with_drawn_stop_tokens(stop_ids):
  tokenizer = types.SimpleNamespace(stop_ids=stop_ids, decode=tuple)
  encoder = rollout.PromptEncoder(tasks.Sums(numbers=2, train=64, test=8), tokenizer, 10)
  rng = np.random.default_rng(0)
  for _ in range(200):
    tokens, mask = rng.integers(0, 12, 8).astype(np.int32), rng.random(8) < 0.8
    completion = Completion(0, 0, tokens, np.zeros(8, np.float32), np.zeros(8, np.int32), mask, STOP)
    ends = [bool(drawn and token in stop_ids) for token, drawn in zip(tokens, mask, strict=True)]
    begins = max((i + 1 for i in range(7) if ends[i] or not mask[i]), default=0)
    assert encoder.count_turns(completion) == 1 + sum(ends[:7])
    assert encoder.decode_last_turn(completion) == tuple(tokens[begins:].tolist())
