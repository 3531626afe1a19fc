"""The slot engine against the scorer, and against itself in other slots, batches and lengths."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import VOCAB
from sampling_helpers import engine_of
from sampling_helpers import make
from sampling_helpers import requests_of
from sampling_helpers import rescore
from sampling_helpers import same

from async_rl import sampling
from async_rl.sampling._programs import compiler_options
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Prompt
from async_rl.types import Request


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "length_buckets": 3, "prefill_tokens": 1}])
def test_logprobs_are_the_learners_in_float32(options):
  _, params = make()
  requests = requests_of(range(7))
  completions = sampling.generate(engine_of(**options), requests)
  assert [(c.ticket, c.sample) for c in completions] == [(t, k) for t in range(7) for k in range(2)]
  assert len({len(c.tokens) for c in completions}) > 1, "lengths should be mixed"
  for c in completions:
    expected = rescore(c, requests[c.ticket].tokens, params, temperature=options.get("temperature", 0.8))
    np.testing.assert_allclose(c.logprobs, expected, atol=1e-5)
    assert c.tokens.dtype == np.int32
    assert c.logprobs.dtype == np.float32
    assert c.mask.all()
    np.testing.assert_array_equal(c.versions, 3)


def test_logprobs_are_near_the_learners_in_bfloat16():
  _, params = make("bfloat16")
  requests = requests_of(range(12))
  completions = sampling.generate(engine_of("bfloat16"), requests)
  errors = [c.logprobs - rescore(c, requests[c.ticket].tokens, params, "bfloat16") for c in completions]
  assert np.mean(np.abs(np.concatenate(errors))) <= 1e-2


def test_greedy_decoding_follows_the_learners_argmax():
  policy, params = make()
  requests = requests_of(range(3))
  for c in sampling.generate(engine_of(temperature=0.0, group_size=1), requests):
    np.testing.assert_allclose(c.logprobs, rescore(c, requests[c.ticket].tokens, params, temperature=1.0), atol=1e-5)
    sequence = np.concatenate([requests[c.ticket].tokens, c.tokens])[None]
    positions = np.arange(sequence.shape[1])[None]
    hidden = policy.hidden(params, sequence, np.ones_like(sequence), positions)
    best = np.argmax(policy.logits(params, hidden), -1)[0, len(requests[c.ticket].tokens) - 1 : -1]
    np.testing.assert_array_equal(c.tokens, best)


def test_samples_end_at_a_stop_token_or_at_the_limit():
  completions = sampling.generate(engine_of(), requests_of(range(20), seed=1))
  assert {c.finish for c in completions} == {STOP, LENGTH}
  for c in completions:
    assert not set(c.tokens[:-1]) & set(STOPS)
    assert (c.tokens[-1] in STOPS) == (c.finish == STOP)
    assert len(c.tokens) == 28 or c.finish == STOP


def test_single_tokens_follow_the_softmax_over_tickets_and_samples():
  policy, params = make()
  prompt = np.array([5, 9, 30], np.int32)
  engine = engine_of(slots=64, group_size=32, max_new_tokens=1, temperature=1.0)
  completions = sampling.generate(engine, [Request(t, prompt, Prompt(0, "", None)) for t in range(128)])
  assert all(len(c.tokens) == 1 for c in completions)
  hidden = policy.hidden(params, prompt[None], np.ones((1, 3), np.int32), np.arange(3)[None])
  expected = np.asarray(jax.nn.softmax(policy.logits(params, hidden)[0, -1]), np.float64) * len(completions)
  observed = np.bincount([c.tokens[0] for c in completions], minlength=VOCAB)
  often = expected >= 5
  value = ((observed - expected)[often] ** 2 / expected[often]).sum()
  assert abs(value - often.sum()) < 4 * np.sqrt(2 * often.sum())
  assert max(c.tokens.max() for c in completions) < VOCAB - 5, "padding of the vocabulary"


def test_a_sample_is_the_same_in_any_company():
  """Bit for bit in the same programs: other slots, neighbors, arrival and weights' copies do not matter."""
  engine = engine_of()
  together = sampling.generate(engine, requests_of(range(9)))
  alone = [c for t in reversed(range(9)) for c in sampling.generate(engine, requests_of([t]))]
  same(together, sorted(alone, key=lambda c: (c.ticket, c.sample)))
  arrived: list = []
  for request in requests_of([4, 0, 8, 1, 2, 3, 5, 6, 7]):
    engine.submit(request)
    arrived += engine.step()
  while not engine.idle:
    arrived += engine.step()
  same(together, sorted(arrived, key=lambda c: (c.ticket, c.sample)))


@pytest.mark.parametrize("options", [{"slots": 11, "chunk": 40}, {"length_buckets": 3}])
def test_a_sample_is_the_same_under_other_sizes(options):
  expected = sampling.generate(engine_of(), requests_of(range(9)))
  same(expected, sampling.generate(engine_of(**options), requests_of(range(9))), exact=False)


def test_seed_ticket_and_sample_all_change_what_is_drawn():
  prompt = np.arange(5, 15, dtype=np.int32)
  requests = [Request(t, prompt, Prompt(0, "", None)) for t in (0, 1, 2**32 - 1)]
  completions = sampling.generate(engine_of(), requests)
  other = sampling.generate(engine_of(seed=5), requests)
  assert len({tuple(c.tokens) for c in completions + other}) == len(completions + other) == 12


def test_nothing_compiles_or_moves_implicitly_after_warmup(compilations):
  policy, params = make()
  engine = sampling.Engine(policy, dataclasses.replace(CONFIG, length_buckets=2), STOPS, pad_id=0)
  engine.warmup()
  programs = engine.compilations
  compilations.clear()
  with jax.transfer_guard("disallow"):
    engine.set_weights(params, 0)
    for longest in (3, 20, 1, 12):
      sampling.generate(engine, requests_of(range(5), longest, longest))
      engine.set_weights(params, longest)
  assert engine.compilations == programs
  assert not compilations


def test_counters():
  engine = engine_of()
  before = vars(engine.counters).copy()
  requests = requests_of(range(8))
  completions = sampling.generate(engine, requests)
  change = {name: value - before[name] for name, value in vars(engine.counters).items()}
  assert change["tokens"] == sum(len(c.tokens) for c in completions)
  assert change["prefill_tokens"] == sum(len(r.tokens) for r in requests)
  assert change["slot_steps"] == 6 * change["steps"] >= change["tokens"]
  assert 0 < change["steps"] <= 5 * change["chunks"]
  assert change["seconds"] > 0


def test_room_and_idleness():
  engine = engine_of()
  assert engine.idle
  assert engine.free == 6
  for ticket in range(3):
    assert engine.has_room()
    engine.submit(requests_of([ticket])[0])
  assert not engine.has_room()
  assert not engine.idle
  engine.submit(requests_of([3])[0])
  assert engine.free == 0
  with pytest.raises(RuntimeError, match="idle"):
    sampling.generate(engine, [])
  while not engine.idle:
    engine.step()
  assert engine.free == 6
  assert engine.step() == []


@pytest.mark.parametrize(
  ("ticket", "tokens", "message"),
  [
    (7, np.arange(3, 24), r"Request 7 \(prompt 5\) has 21 tokens, more than max_prompt_tokens=20: raise"),
    (7, np.zeros(0), "shape \\(0,\\)"),
    (7, np.zeros((2, 2)), "shape \\(2, 2\\)"),
    (7, np.array([VOCAB]), "outside 0..144"),
    (7, np.array([-1]), "outside 0..144"),
    (2**32, np.array([5]), "Request 4294967296"),
  ],
)
def test_bad_requests_are_refused(ticket, tokens, message):
  engine = engine_of()
  with pytest.raises(ValueError, match=message):
    engine.submit(Request(ticket, tokens, Prompt(5, "", None)))
  assert engine.idle


def test_bad_weights_and_tokens_are_refused():
  policy, params = make()
  with pytest.raises(ValueError, match=r"0\.\.144, got 149"):
    sampling.Engine(policy, CONFIG, [VOCAB - 1], pad_id=0)
  engine = sampling.Engine(policy, CONFIG, STOPS, pad_id=0)
  engine.submit(requests_of([0])[0])
  with pytest.raises(RuntimeError, match="set_weights"):
    engine.step()
  with pytest.raises(ValueError, match=r"'embed'.*\(150, 16\)"):
    engine.set_weights({**params, "ends": {**params["ends"], "embed": jnp.zeros((150, 16))}}, 0)
  with pytest.raises(ValueError, match="bfloat16"):
    engine.set_weights(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), 0)
  with pytest.raises(ValueError, match="in their containers: give them as dicts and lists"):
    engine.set_weights(collections.OrderedDict(params), 0)
  prepared = sampling.prepare_weights(policy, params)
  with pytest.raises(ValueError, match="in their containers"):
    engine.set_weights(collections.OrderedDict(prepared), 0)
  del prepared["layers"][1]["attention_norm"]
  with pytest.raises(ValueError, match=r"\['layers'\]\[1\]\['attention_norm'\].*: None, expected \(\(32,\)"):
    engine.set_weights(prepared, 0)


def test_weights_may_be_prepared_elsewhere_and_the_originals_donated():
  policy, params = make()
  expected = sampling.generate(engine_of(), requests_of(range(3)))
  engine = sampling.Engine(policy, CONFIG, STOPS, pad_id=0)
  mine = jax.tree.map(jnp.copy, params)
  engine.set_weights(mine, 3)
  for leaf in jax.tree.leaves(mine):
    leaf.delete()
  same(sampling.generate(engine, requests_of(range(3))), expected)
  mine = jax.tree.map(jnp.copy, params)
  prepared = jax.jit(functools.partial(sampling.prepare_weights, policy))(mine)
  for leaf in jax.tree.leaves(mine):
    leaf.delete()
  engine.set_weights(prepared, 3)
  same(sampling.generate(engine, requests_of(range(3))), expected)


def test_prepared_weights_keep_norms_in_float32():
  policy, params = make("bfloat16")
  prepared = sampling.prepare_weights(policy, params)
  types = {path[-1].key: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(prepared)}
  assert types.pop("scale") == jnp.float32
  assert set(types.values()) == {jnp.dtype(jnp.bfloat16)}


def test_loops_of_steps_are_graphs_on_gpus_unless_flags_say_otherwise(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "")
  assert compiler_options("cpu") == {}
  assert "WHILE" in compiler_options("gpu")["xla_gpu_enable_command_buffer"]
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
  assert list(compiler_options("gpu")) == ["xla_gpu_graph_min_graph_size"]
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer_va_remapping=false")
  assert "xla_gpu_enable_command_buffer" in compiler_options("gpu"), "another flag, whose name is longer"


def test_this_version_of_xla_knows_the_options_for_gpus(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "")
  program = jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options("gpu"))  # parsed for any device
  assert program(1.0) == 2
