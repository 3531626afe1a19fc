"""Weights that change under unfinished samples, and unfinished samples that move to another engine."""

import functools
import itertools

import jax
import numpy as np
import pytest
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import engine_of
from sampling_helpers import make
from sampling_helpers import one_step
from sampling_helpers import requests_of
from sampling_helpers import rescore
from sampling_helpers import same
from sampling_helpers import weights

from async_rl import sampling


def run_with_updates(engine, requests, every=2):
  """Generates with new weights after every other chunk."""
  engine.set_weights(weights(0), 0)
  for request in requests:
    engine.submit(request)
  completions = []
  for chunk in itertools.count(1):
    completions += engine.step()
    if engine.idle:
      return sorted(completions, key=lambda c: (c.ticket, c.sample))
    if chunk % every == 0:
      engine.set_weights(weights(chunk // every), chunk // every)


def with_kept_cache(completion, prompt):
  """Log-probabilities when each token enters the cache under the weights that draw the next one."""
  policy, _ = make()
  cache, logprobs = policy.init_cache(1, 64), []
  sequence = np.concatenate([prompt, completion.tokens]).astype(np.int32)
  for position in range(len(sequence) - 1):
    drawn = position + 1 - len(prompt)
    params = weights(int(completion.versions[max(drawn, 0)]))
    scores, cache = one_step()(params, sequence[position], np.int32(position), cache)
    if drawn >= 0:
      logprobs.append(scores[sequence[position + 1]])
  return np.array(logprobs)


def test_versions_change_between_chunks_only():
  completions = run_with_updates(engine_of(), requests_of(range(6)))
  assert max(len(set(c.versions)) for c in completions) > 2
  for c in completions:
    assert (np.diff(c.versions) >= 0).all()
    inner = np.diff(np.flatnonzero(np.diff(c.versions)))
    assert (inner == 2 * CONFIG.chunk).all()


def test_recomputed_cache_gives_the_learners_logprobs_after_an_update():
  requests = requests_of(range(6))
  for c in run_with_updates(engine_of(on_update="recompute"), requests):
    for version in set(c.versions):
      expected = rescore(c, requests[c.ticket].tokens, weights(int(version)))
      drawn = c.versions == version
      np.testing.assert_allclose(c.logprobs[drawn], expected[drawn], atol=1e-5)


def test_kept_cache_gives_the_logprobs_of_the_mixed_cache():
  requests = requests_of(range(6))
  gaps, drifts = [], []
  for c in run_with_updates(engine_of(), requests):
    prompt, first = requests[c.ticket].tokens, int(c.versions[0])
    np.testing.assert_allclose(c.logprobs, with_kept_cache(c, prompt), atol=1e-5)
    for version in set(c.versions[c.versions > first].tolist()):
      drawn = c.versions == version
      new, old = (rescore(c, prompt, weights(v))[drawn] for v in (version, first))
      gaps.append(np.abs(c.logprobs[drawn] - new).mean())
      drifts.append(np.abs(old - new).mean())
  # What keeping costs: the learner computes other log-probabilities than the sampler drew with, though nearer ones than
  # those of the weights that the cache is of.
  assert 0.1 * np.mean(drifts) < np.mean(gaps) < np.mean(drifts)


def test_updates_do_not_compile_after_warmup():
  policy, _ = make()
  engine = engine_of(on_update="recompute", length_buckets=2)
  engine.warmup()
  compilations = engine.compilations
  for version in range(20):
    weights(version)
  prepared = jax.jit(functools.partial(sampling.prepare_weights, policy))(weights(9))
  with jax.transfer_guard("disallow"):
    run_with_updates(engine, requests_of(range(6)), every=1)
    engine.set_weights(prepared, 9)
    sampling.generate(engine, requests_of(range(2)))
  assert engine.compilations == compilations


def interrupted(engine, other, requests, steps):
  """Moves everything from one engine to the other after some steps."""
  engine.set_weights(weights(0), 0)
  other.set_weights(weights(0), 0)
  for request in requests:
    engine.submit(request)
  completions = []
  for _ in range(steps):
    completions += engine.step()
  state = sampling.Snapshot(*(np.array(a) for a in engine.snapshot()))
  other.restore(state)
  assert all(np.array_equal(a, b) for a, b in zip(other.snapshot(), state, strict=True))
  while not other.idle:
    completions += other.step()
  while not engine.idle:  # goes on undisturbed
    engine.step()
  return sorted(completions, key=lambda c: (c.ticket, c.sample)), state


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_restored_samples_go_on_as_if_nothing_had_happened(steps):
  requests = requests_of(range(8))
  engine = engine_of()
  engine.set_weights(weights(0), 0)
  expected = sampling.generate(engine, requests)
  completions, state = interrupted(engine, engine_of(slots=11, chunk=40), requests, steps)
  same(completions, expected, exact=False)
  if steps == 0:
    assert not state.lengths.any()
    assert len(state.tickets) == 16
  else:
    assert state.lengths.any()
    assert not state.lengths.all(), "some should still wait"


def test_waiting_groups_share_their_prefill_after_a_restore():
  other = engine_of(slots=11, chunk=40)
  before = other.counters.prefill_tokens
  requests = requests_of(range(4))
  interrupted(engine_of(), other, requests, 0)
  assert other.counters.prefill_tokens - before == sum(len(r.tokens) for r in requests)


def test_versions_and_logprobs_survive_a_restore():
  engine, other = engine_of(), engine_of(slots=11, chunk=40)
  engine.set_weights(weights(0), 0)
  engine.submit(requests_of([3])[0])
  engine.step()
  before = engine.snapshot()
  other.set_weights(weights(5), 5)
  other.restore(before)
  while not engine.idle:
    engine.step()
  completions = []
  while not other.idle:
    completions += other.step()
  assert len(completions) == 2
  for c in completions:
    np.testing.assert_array_equal(c.versions[:5], 0)
    np.testing.assert_array_equal(c.versions[5:], 5)
    np.testing.assert_array_equal(c.logprobs[:5], before.logprobs[c.sample, :5])


def test_restore_refuses_a_busy_engine_and_lower_limits():
  policy, _ = make()
  engine = engine_of()
  engine.set_weights(weights(0), 0)
  engine.submit(requests_of([1])[0])
  engine.step()
  state = engine.snapshot()
  with pytest.raises(RuntimeError, match="idle"):
    engine.restore(state)
  while not engine.idle:
    engine.step()
  lower = sampling.SamplerConfig(slots=2, group_size=2, max_prompt_tokens=20, max_new_tokens=5)
  with pytest.raises(ValueError, match="completions of 5 tokens"):
    sampling.Engine(policy, lower, STOPS, pad_id=0).restore(state)
  nothing = engine.snapshot()
  assert len(nothing.tickets) == 0
  engine.restore(nothing)
  assert engine.idle
