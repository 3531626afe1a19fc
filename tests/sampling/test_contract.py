"""What a run relies on in its sampler. Every backend passes these tests; add a new one to `BACKENDS`."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from full_forward import FullForwardSampler
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import VOCAB
from sampling_helpers import make
from sampling_helpers import requests_of
from sampling_helpers import rescore
from sampling_helpers import same
from sampling_helpers import weights

from async_rl import models
from async_rl import sampling
from async_rl.types import LENGTH
from async_rl.types import NO_VERSION
from async_rl.types import STOP
from async_rl.types import Prompt
from async_rl.types import Request


class Pool(sampling.EnginePool):
  """Three engines."""

  def __init__(self, policy, config, stop_ids, pad_id, mesh=None):
    devices = np.array(jax.devices()[1:4]).reshape(3, 1, 1)
    super().__init__(policy, config, stop_ids, pad_id, mesh or models.named_mesh(devices))


class SharedPrompts(sampling.Engine):
  """An engine that keeps the prompt of a group once."""

  def __init__(self, policy, config, stop_ids, pad_id, mesh=None):
    super().__init__(policy, dataclasses.replace(config, shared_prompts=True), stop_ids, pad_id, mesh)


BACKENDS = {
  "engine": sampling.Engine,
  "shared_prompts": SharedPrompts,
  "pool": Pool,
  "full_forward": FullForwardSampler,
}
#: Backends that consist of engines.
ENGINES = {name for name, backend in BACKENDS.items() if issubclass(backend, (sampling.Engine, sampling.EnginePool))}
#: Each with the next one, the last with the first.
RING = list(zip(BACKENDS, [*BACKENDS][1:] + [*BACKENDS][:1], strict=True))


@functools.cache
def sampler_of(backend, **options):
  """A sampler at version 3; kept for its compiled programs, so every test leaves it idle."""
  policy, _ = make()
  config = sampling.SamplerConfig(**{**vars(CONFIG), "on_update": "recompute", **options})
  sampler = BACKENDS[backend](policy, config, STOPS, 0)
  sampler.set_weights(weights(3), 3)
  return sampler


@pytest.fixture(params=BACKENDS)
def backend(request):
  return request.param


@pytest.fixture
def sampler(backend):
  sampler = sampler_of(backend)
  sampler.set_weights(weights(3), 3)
  yield sampler
  assert sampler.idle, "the test must leave the sampler idle"


def finish(sampler):
  completions = []
  while not sampler.idle:
    completions += sampler.step()
  return completions


def by_sample(state):
  """The samples of a snapshot by ticket and index: backends may hold them in any order."""
  order = np.lexsort((state.samples, state.tickets))
  return sampling.Snapshot(*(array[order] for array in state))


def in_order(completions):
  return sorted(completions, key=lambda c: (c.ticket, c.sample))


def test_a_backend_has_every_method_of_the_protocol(backend):
  members = {name for name in vars(sampling.Sampler) if not name.startswith("_")}
  assert {"submit", "resume", "step", "snapshot", "weight_shardings"} <= members
  for name in members:
    theirs = getattr(BACKENDS[backend], name)
    assert theirs is not getattr(sampling.Sampler, name), f"{name} is not implemented"
    if inspect.isfunction(theirs):
      wanted = inspect.signature(getattr(sampling.Sampler, name)).parameters
      assert list(inspect.signature(theirs).parameters) == list(wanted), name


def test_the_checksum_is_of_the_weights_that_it_holds(sampler):
  prepared = jax.jit(functools.partial(sampling.prepare_weights, make()[0]))(weights(3))
  assert sampler.checksum == sampling.checksum_weights(prepared)
  found = [sampler.checksum]
  layers = prepared["layers"]
  scale = prepared["ends"]["final_norm"]["scale"]
  for other in (
    weights(4),
    {**prepared, "layers": layers[::-1]},
    {**prepared, "ends": {**prepared["ends"], "final_norm": {"scale": scale.at[-1].set(jnp.nextafter(scale[-1], 2))}}},
  ):
    sampler.set_weights(other, 4)
    found.append(sampler.checksum)
  assert len(set(found)) == len(found)
  assert all(0 <= checksum < 2**32 for checksum in found)
  sampler.set_weights(prepared, 5)
  assert sampler.checksum == found[0]


def test_every_request_gives_one_completion_per_sample(sampler):
  for request in requests_of(range(5)):
    sampler.submit(request)
  completions = in_order(finish(sampler))
  assert [(c.ticket, c.sample) for c in completions] == [(t, k) for t in range(5) for k in range(2)]
  assert {c.finish for c in completions} == {STOP, LENGTH}
  for c in completions:
    assert (c.tokens.dtype, c.logprobs.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
    assert c.mask.dtype == np.bool_
    assert c.mask.all()
    assert len(c.tokens) == len(c.logprobs) == len(c.versions) == len(c.mask) <= CONFIG.max_new_tokens
    assert not set(c.tokens[:-1]) & set(STOPS)
    assert (c.tokens[-1] in STOPS) == (c.finish == STOP)
    assert len(c.tokens) == CONFIG.max_new_tokens or c.finish == STOP
    assert c.tokens.max() < VOCAB - 5, "padding of the vocabulary"


def test_log_probabilities_are_the_learners(sampler):
  requests = requests_of(range(5))
  for c in sampling.generate(sampler, requests):
    np.testing.assert_allclose(c.logprobs, rescore(c, requests[c.ticket].tokens, weights(3)), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3, "logprobs_of": "truncated"}], ids=str)
def test_backends_draw_the_same_tokens(options):
  # With options, the draws of one engine stand for those of all.
  names = [name for name in BACKENDS if not options or name == "engine" or name not in ENGINES]
  first, *others = (sampling.generate(sampler_of(name, **options), requests_of(range(3))) for name in names)
  for completions in others:
    same(completions, first, exact=False)


def test_first_tokens_follow_the_policys_distribution(backend):
  policy, _ = make()
  prompt = np.array([5, 9, 30], np.int32)
  sampler = sampler_of(backend, slots=96, group_size=32, max_new_tokens=1, temperature=1.0)
  completions = sampling.generate(sampler, [Request(t, prompt, Prompt(0, "", None)) for t in range(16)])
  hidden = policy.hidden(weights(3), prompt[None], np.ones((1, 3), np.int32), np.arange(3)[None])
  expected = np.asarray(jax.nn.softmax(policy.logits(weights(3), hidden)[0, -1]), np.float64) * len(completions)
  observed = np.bincount([c.tokens[0] for c in completions], minlength=VOCAB)
  often = expected >= 5
  value = ((observed - expected)[often] ** 2 / expected[often]).sum()
  assert abs(value - often.sum()) < 4 * np.sqrt(2 * often.sum())


def test_a_sample_depends_on_neither_company_nor_order(sampler):
  together = sampling.generate(sampler, requests_of(range(4)))
  alone = [c for t in (2, 0, 3, 1) for c in sampling.generate(sampler, requests_of([t]))]
  same(in_order(alone), together, exact=False)


def test_tokens_carry_the_version_that_drew_them_and_its_log_probability(sampler):
  requests = requests_of(range(2))
  for request in requests:
    sampler.submit(request)
  completions = []
  for version in range(4, 12):
    completions += sampler.step()
    sampler.set_weights(weights(version), version)
  completions += finish(sampler)
  assert max(len(set(c.versions)) for c in completions) > 2
  for c in completions:
    assert c.versions[0] == 3
    assert (np.diff(c.versions) >= 0).all()
    for version in set(c.versions.tolist()):
      drawn = c.versions == version
      expected = rescore(c, requests[c.ticket].tokens, weights(version))
      np.testing.assert_allclose(c.logprobs[drawn], expected[drawn], atol=1e-5)


def test_resumed_samples_keep_their_tokens_and_mask_the_context(sampler):
  request = requests_of([1], seed=1)[0]
  first = next(c for c in sampling.generate(sampler, [request]) if sampler.room(c) > 6)
  said = [7, 8, 9]
  sampler.resume(request, first, said)
  assert not sampler.idle
  (whole,) = finish(sampler)
  start, end = len(first.tokens), len(first.tokens) + len(said)
  assert (whole.ticket, whole.sample) == (first.ticket, first.sample)
  np.testing.assert_array_equal(whole.tokens[:end], [*first.tokens, *said])
  np.testing.assert_array_equal(np.flatnonzero(~whole.mask), range(start, end))
  np.testing.assert_array_equal(whole.versions[start:end], NO_VERSION)
  np.testing.assert_array_equal(whole.logprobs[start:end], 0.0)
  np.testing.assert_array_equal(whole.logprobs[:start], first.logprobs)
  expected = rescore(whole, request.tokens, weights(3))
  np.testing.assert_allclose(whole.logprobs[whole.mask], expected[whole.mask], atol=1e-5)
  assert sampler.room(whole) == CONFIG.max_new_tokens - len(whole.tokens)


def test_context_that_leaves_nothing_to_draw_is_refused(sampler):
  request = requests_of([1], seed=1)[0]
  completion = next(c for c in sampling.generate(sampler, [request]) if sampler.room(c) > 6)
  with pytest.raises(ValueError, match="leave nothing to draw"):
    sampler.resume(request, completion, [5] * sampler.room(completion))
  with pytest.raises(ValueError, match="outside 0..144"):
    sampler.resume(request, completion, [VOCAB - 1])


def test_a_sampler_takes_requests_until_it_has_no_room(sampler):
  assert sampler.idle
  accepted = 0
  while sampler.has_room():
    sampler.submit(requests_of([accepted])[0])
    accepted += 1
  assert accepted == CONFIG.slots // CONFIG.group_size
  assert not sampler.idle
  sampler.submit(requests_of([accepted])[0])  # waits
  assert len(finish(sampler)) == (accepted + 1) * CONFIG.group_size
  assert sampler.has_room()
  assert sampler.step() == []


@pytest.mark.parametrize(
  ("ticket", "tokens", "message"),
  [
    (7, np.arange(3, 24), "21 tokens, more than max_prompt_tokens=20"),
    (7, np.zeros(0), "shape \\(0,\\)"),
    (7, np.array([VOCAB]), "outside 0..144"),
    (2**32, np.array([5]), "Request 4294967296"),
  ],
)
def test_bad_requests_are_refused(sampler, ticket, tokens, message):
  with pytest.raises(ValueError, match=message):
    sampler.submit(Request(ticket, tokens, Prompt(5, "", None)))


@pytest.mark.parametrize(("backend", "target"), RING)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_snapshot_continues_in_another_backend(sampler, target, steps):
  requests = requests_of(range(4))
  expected = sampling.generate(sampler, requests)
  for request in requests:
    sampler.submit(request)
  early = [c for _ in range(steps) for c in sampler.step()]
  state = sampling.Snapshot(*(np.array(a) for a in sampler.snapshot()))
  other = sampler_of(target, slots=12)
  other.set_weights(weights(3), 3)
  other.restore(state)
  for a, b in zip(by_sample(other.snapshot()), by_sample(state), strict=True):
    np.testing.assert_array_equal(a, b)
  same(in_order(early + finish(other)), expected, exact=False)
  same(in_order(early + finish(sampler)), expected, exact=False)  # goes on unchanged


def test_only_an_idle_sampler_restores(sampler):
  sampler.submit(requests_of([0])[0])
  state = sampler.snapshot()
  with pytest.raises(RuntimeError, match="idle"):
    sampler.restore(state)
  with pytest.raises(RuntimeError, match="idle"):
    sampling.generate(sampler, [])
  finish(sampler)


def test_samples_beyond_the_limits_are_not_restored(backend, sampler):
  sampler.submit(requests_of([1], seed=1)[0])
  sampler.step()
  state = sampler.snapshot()
  finish(sampler)
  with pytest.raises(ValueError, match="too many for max_prompt_tokens=20 and max_new_tokens=5"):
    sampler_of(backend, max_new_tokens=5).restore(state)


def test_counters_grow_by_the_tokens_that_each_step_draws(sampler):
  for request in requests_of(range(3)):
    sampler.submit(request)
  held = 0  # drawn tokens of unfinished samples
  while not sampler.idle:
    before = sampler.counters.tokens, sampler.counters.slot_steps
    completions = sampler.step()
    drawn = sampler.counters.tokens - before[0]
    left = int(sampler.snapshot().lengths.sum())
    assert drawn == left + sum(len(c.tokens) for c in completions) - held
    assert 0 < drawn <= sampler.counters.slot_steps - before[1]
    held = left


def test_weights_may_be_raw_or_prepared_and_raw_ones_donated(sampler):
  policy, _ = make()
  expected = sampling.generate(sampler, requests_of(range(2)))
  raw = jax.tree.map(jnp.array, weights(3))
  sampler.set_weights(raw, 3)
  prepared = jax.jit(functools.partial(sampling.prepare_weights, policy))(raw)
  for leaf in jax.tree.leaves(raw):
    leaf.delete()
  same(sampling.generate(sampler, requests_of(range(2))), expected)
  sampler.set_weights(jax.device_put(prepared, sampler.weight_shardings), 3)
  same(sampling.generate(sampler, requests_of(range(2))), expected)


def test_a_sampler_without_weights_or_with_those_of_another_policy_says_so(backend):
  policy, _ = make()
  sampler = BACKENDS[backend](policy, CONFIG, STOPS, 0)
  sampler.submit(requests_of([0])[0])
  with pytest.raises(RuntimeError, match="set_weights"):
    sampler.step()
  wrong = {**weights(3), "ends": {**weights(3)["ends"], "embed": jnp.zeros((VOCAB, 16))}}
  with pytest.raises(ValueError, match="params must be this policy's"):
    sampler.set_weights(wrong, 0)


def test_the_seed_repeats_a_sample_and_another_seed_does_not(backend, sampler):
  requests = requests_of(range(2))
  first, again = (sampling.generate(sampler, requests) for _ in range(2))
  same(again, first)
  other = sampling.generate(sampler_of(backend, seed=CONFIG.seed + 1), requests)
  assert not any(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, other, strict=True))
