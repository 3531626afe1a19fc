"""Samples of several turns: what a tool writes is context, at the right positions, and nothing that anybody drew."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_helpers import CONFIG
from sampling_helpers import VOCAB
from sampling_helpers import make
from sampling_helpers import one_step
from sampling_helpers import requests_of
from sampling_helpers import rescore
from sampling_helpers import same
from sampling_helpers import weights

from async_rl import sampling
from async_rl.types import LENGTH
from async_rl.types import NO_VERSION
from async_rl.types import STOP

STOPS = tuple(range(1, 30))  # turns of about five tokens
TURNS = 3


@functools.cache
def engine_of(**options):
  policy, params = make()
  engine = sampling.Engine(policy, sampling.SamplerConfig(**{**vars(CONFIG), **options}), STOPS, pad_id=0)
  engine.set_weights(params, 3)
  return engine


def tool(completion, least=0):
  """What the tool says after this turn: `least` to 4 tokens, which depend on the sample and its length."""
  rng = np.random.default_rng([completion.ticket, completion.sample, len(completion.tokens)])
  return rng.integers(3, VOCAB - 5, rng.integers(least, 5)).tolist()


def turns_of(completion):
  return 1 + int((completion.mask & np.isin(completion.tokens, STOPS))[:-1].sum())


def wants(engine, completion, least=0):
  fits = len(tool(completion, least)) < engine.room(completion)
  return completion.finish == STOP and turns_of(completion) < TURNS and fits


def converse(engine, requests, on_chunk=lambda chunk: None, delay=0, least=0):
  """Runs requests to their end; the tool answers after `delay` further chunks, or at once if nothing else is left."""
  of_ticket = {request.ticket: request for request in requests}
  for request in requests:
    engine.submit(request)
  done, asked = [], []
  for chunk in itertools.count(1):
    for completion in engine.step():
      if wants(engine, completion, least):
        asked.append((chunk + delay, completion))
      else:
        done.append(completion)
    ready = [c for due, c in asked if due <= chunk or engine.idle]
    asked = [(due, c) for due, c in asked if not (due <= chunk or (engine.idle and ready))]
    for completion in ready:
      engine.resume(of_ticket[completion.ticket], completion, tool(completion, least))
    if engine.idle:
      return sorted(done, key=lambda c: (c.ticket, c.sample))
    on_chunk(chunk)


def expected_mask(completion):
  """The tool's tokens, found again by the rule that made them."""
  mask = np.ones(len(completion.tokens), bool)
  for i in np.flatnonzero(np.isin(completion.tokens, STOPS)):
    part = completion._replace(tokens=completion.tokens[: i + 1])
    if mask[i] and i + 1 < len(mask):
      said = tool(part)
      mask[i + 1 : i + 1 + len(said)] = False
      assert completion.tokens[i + 1 : i + 1 + len(said)].tolist() == said
  return mask


@pytest.mark.parametrize("options", [{}, {"length_buckets": 3, "prefill_tokens": 1}])
def test_drawn_tokens_have_the_logprobs_of_one_full_forward_pass(options):
  engine, requests = engine_of(**options), requests_of(range(16))
  _, params = make()
  before = engine.counters.tokens
  completions = converse(engine, requests)
  assert {turns_of(c) for c in completions} == {1, 2, 3}
  assert any(not c.mask.all() for c in completions)
  for c in completions:
    np.testing.assert_array_equal(c.mask, expected_mask(c))
    np.testing.assert_array_equal(c.versions, np.where(c.mask, 3, NO_VERSION))
    np.testing.assert_array_equal(c.logprobs[~c.mask], 0.0)
    expected = rescore(c, requests[c.ticket].tokens, params)
    np.testing.assert_allclose(c.logprobs[c.mask], expected[c.mask], atol=1e-5)
  assert engine.counters.tokens - before == sum(int(c.mask.sum()) for c in completions)


def test_greedy_tokens_after_a_tools_turn_are_those_of_the_unbatched_policy():
  policy, params = make()
  requests = requests_of(range(6))

  @jax.jit
  def best_of(tokens, segments, positions):
    return jnp.argmax(policy.logits(params, policy.hidden(params, tokens, segments, positions)), -1)[0]

  checked = 0
  for c in converse(engine_of(temperature=0.0, group_size=1), requests):
    start = len(requests[c.ticket].tokens)
    row = np.zeros((1, 64), np.int32)
    row[0, : start + len(c.tokens)] = np.concatenate([requests[c.ticket].tokens, c.tokens])
    best = np.asarray(best_of(row, np.ones_like(row), np.arange(64)[None]))[start - 1 : start - 1 + len(c.tokens)]
    np.testing.assert_array_equal(c.tokens[c.mask], best[c.mask])
    checked += turns_of(c) > 1
  assert checked


def test_neither_company_nor_the_time_of_the_answer_changes_a_sample():
  engine, requests = engine_of(), requests_of(range(9))
  together = converse(engine, requests)
  same(converse(engine, requests, delay=3), together)
  alone = [c for r in requests for c in converse(engine, [r])]
  same(alone, together)


def test_answered_samples_start_before_waiting_requests():
  engine, requests = engine_of(), requests_of(range(12))
  for request in requests:
    engine.submit(request)
  first = None
  while first is None:
    first = next((c for c in engine.step() if wants(engine, c)), None)
  engine.resume(requests[first.ticket], first, tool(first))
  longer = {(c.ticket, c.sample): len(c.tokens) for c in engine.step()}
  state = engine.snapshot()
  longer |= {(t, k): n for t, k, n in zip(state.tickets, state.samples, state.lengths, strict=True)}
  assert (11, 0) in longer, "others should still wait"
  assert longer[first.ticket, first.sample] > len(first.tokens) + len(tool(first))
  while not engine.idle:
    engine.step()


def updates(engine, every=1):
  """New weights after every chunk, in the middle of turns."""
  engine.set_weights(weights(0), 0)
  return lambda chunk: engine.set_weights(weights(chunk // every), chunk // every) if chunk % every == 0 else None


def test_recomputed_cache_gives_the_learners_logprobs_after_updates_within_turns():
  engine, requests = engine_of(on_update="recompute"), requests_of(range(8))
  completions = converse(engine, requests, updates(engine), delay=1)
  assert any(turns_of(c) > 1 and len(set(c.versions[c.mask])) > 2 for c in completions)
  for c in completions:
    for version in set(c.versions[c.mask].tolist()):
      expected = rescore(c, requests[c.ticket].tokens, weights(version))
      drawn = c.versions == version
      np.testing.assert_allclose(c.logprobs[drawn], expected[drawn], atol=1e-5)


def with_kept_cache(completion, prompt):
  """Log-probabilities when a turn starts with a cache of its first weights, and keeps it under later ones."""
  policy, _ = make()
  sequence = np.concatenate([prompt, completion.tokens]).astype(np.int32)
  logprobs = np.zeros(len(completion.tokens), np.float32)
  for i in np.flatnonzero(completion.mask):
    if i == 0 or not completion.mask[i - 1]:
      cache = policy.init_cache(1, 64)
      for position in range(len(prompt) + i - 1):
        _, cache = one_step()(weights(int(completion.versions[i])), sequence[position], np.int32(position), cache)
    last = len(prompt) + i - 1
    scores, cache = one_step()(weights(int(completion.versions[i])), sequence[last], np.int32(last), cache)
    logprobs[i] = scores[sequence[last + 1]]
  return logprobs


def test_kept_cache_starts_anew_with_each_turn():
  engine, requests = engine_of(), requests_of(range(4))
  completions = converse(engine, requests, updates(engine), delay=1, least=1)  # the mask tells the turns apart
  assert any(turns_of(c) > 1 and len(set(c.versions[c.mask])) > 2 for c in completions)
  for c in completions:
    np.testing.assert_allclose(c.logprobs, with_kept_cache(c, requests[c.ticket].tokens), atol=1e-5)


def test_a_snapshot_holds_samples_that_were_just_answered():
  engine, other, requests = engine_of(), engine_of(slots=11, chunk=40), requests_of(range(8))
  engine.set_weights(weights(0), 0)
  other.set_weights(weights(0), 0)
  whole = converse(engine, requests)
  states = []
  converse(engine, requests, lambda chunk: states.append(engine.snapshot()))
  answered = lambda s: (s.lengths > 0) & (s.versions[np.arange(len(s.lengths)), s.lengths - 1] == NO_VERSION)
  state = next(s for s in states if answered(s).any())
  other.restore(state)
  assert all(np.array_equal(a, b) for a, b in zip(other.snapshot(), state, strict=True))
  done = []
  while not other.idle:
    for c in other.step():
      if wants(other, c):
        other.resume(requests[c.ticket], c, tool(c))
      else:
        done.append(c)
  of = {(c.ticket, c.sample): c for c in done}
  same(list(of.values()), [next(c for c in whole if (c.ticket, c.sample) == key) for key in of], exact=False)
  assert len(of) >= len(set(zip(state.tickets, state.samples, strict=True)))


def test_nothing_compiles_or_moves_implicitly_after_warmup():
  engine = engine_of(length_buckets=2)
  engine.warmup(resumes=True)
  compilations, requests = engine.compilations, requests_of(range(8))
  with jax.transfer_guard("disallow"):
    converse(engine, requests)
  assert engine.compilations == compilations


def test_context_is_bounded():
  engine = engine_of()
  request = requests_of([3])[0]
  completion = next(c for c in sampling.generate(engine, [request]) if c.finish == STOP)
  room = 28 - len(completion.tokens)
  assert engine.room(completion) == room
  with pytest.raises(ValueError, match=f"{room} more leave nothing to draw of max_new_tokens=28"):
    engine.resume(request, completion, [5] * room)
  with pytest.raises(ValueError, match="outside 0..144"):
    engine.resume(request, completion, [VOCAB - 1])
  assert engine.idle
  engine.resume(request, completion, [5] * (room - 1))
  (last,) = engine.step()
  assert len(last.tokens) == 28
  assert last.finish in (STOP, LENGTH)
  assert engine.idle
