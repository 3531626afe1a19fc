"""An engine that reads the prompt of a group once draws the samples of one whose slots each have their own."""

import dataclasses

import jax
import numpy as np
import pytest
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import engine_of
from sampling_helpers import make
from sampling_helpers import requests_of
from sampling_helpers import same

from async_rl import models
from async_rl import sampling
from async_rl.types import Prompt
from async_rl.types import Request

SIZED = dataclasses.replace(CONFIG, slots=64, group_size=4, shared_prompts=True)


def converse(engine, requests, watch=lambda: None):
  """Draws the samples of all requests; those that end early are answered once, with a token for each."""
  of_ticket, done, answered = {r.ticket: r for r in requests}, [], set()
  for request in requests:
    engine.submit(request)
  while not engine.idle:
    for c in engine.step():
      if (c.ticket, c.sample) in answered or engine.room(c) < 10 or c.ticket % 3:
        done.append(c)
      else:
        answered.add((c.ticket, c.sample))
        engine.resume(of_ticket[c.ticket], c, [5 + c.sample, 7])
    watch()
  assert answered
  return sorted(done, key=lambda c: (c.ticket, c.sample))


def work():
  """Groups of all lengths, down to a prompt of one token, of which nothing is shared."""
  one = Request(40, np.array([9], np.int32), Prompt(40, "", None))
  longest = Request(41, np.arange(3, 23, dtype=np.int32), Prompt(41, "", None))
  return [one, longest, *requests_of(range(22))]


@pytest.fixture(scope="module")
def expected():
  return converse(engine_of(slots=64, group_size=4, slot_buckets=1), work())


@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 2}], ids=str)
def test_samples_are_those_of_slots_with_a_prompt_each(axes, expected):
  """With conversations, refills, a cache that follows its live slots, and a mesh; nothing compiles on the way."""
  policy, params = make()
  devices = np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(tuple(axes.values()))
  engine = sampling.Engine(policy, SIZED, STOPS, pad_id=0, mesh=models.named_mesh(devices, tuple(axes)))
  engine.set_weights(params, 3)
  engine.warmup(resumes=True)
  compilations, shapes = engine.compilations, []
  with jax.transfer_guard("disallow"):
    got = converse(engine, work(), lambda: shapes.append((engine.cache_shape[0], engine._cache.prompt_count)))
  assert engine.compilations == compilations
  same(got, expected, exact=False)
  assert shapes[0] == (64, 16), "whole groups have a prompt each"
  assert (64, 64) in shapes, "samples that are resumed have one each"
  assert {rows for rows, _ in shapes} == {64, 16}, "the last samples move"


def test_keys_and_values_of_a_prompt_are_held_once():
  policy, _ = make()
  sizes = dataclasses.replace(CONFIG, slots=16, group_size=8, max_prompt_tokens=320, max_new_tokens=64)
  position = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers and 2 heads of 8, float32
  own = sampling.Engine(policy, sizes, STOPS, pad_id=0)
  assert own.cache_bytes == 16 * (320 + 64) * position
  shared = sampling.Engine(policy, dataclasses.replace(sizes, shared_prompts=True), STOPS, pad_id=0)
  assert shared.cache_bytes == (2 * 320 + 16 * 64) * position


def test_an_engine_whose_kernel_takes_no_shared_prompts_is_refused():
  config = dataclasses.replace(make()[0].config, head_dim=24)
  policy = models.Policy(config, dtype="bfloat16", attention="cudnn")
  with pytest.raises(ValueError, match="shared_prompts=True is not for cuDNN's decode kernel"):
    sampling.Engine(policy, SIZED, STOPS, pad_id=0)


def test_groups_of_one_have_nothing_to_share():
  assert not dataclasses.replace(CONFIG, shared_prompts=True, group_size=1).shares_prompts
  config = dataclasses.replace(CONFIG, shared_prompts=True, group_size=1)
  assert config.cache_shapes(1, filled_only=False) == dataclasses.replace(CONFIG, group_size=1).cache_shapes(1, False)
  assert config.prompt_counts(1, 6) == (0,)


def test_while_slots_are_refilled_groups_that_are_not_whole_keep_their_prompts_too():
  config = dataclasses.replace(SIZED, slots=256, group_size=8)
  assert config.prompt_counts(1, 256) == (32, 96, 256)
  assert config.prompt_counts(4, 64) == (64,)
  assert SIZED.prompt_counts(1, 64) == (16, 64), "48 would save little"


def test_a_group_is_filled_on_one_device():
  """While there is one with room for it; the least loaded one first."""
  programs = sampling.Programs(make()[0], SIZED, STOPS, models.named_mesh(np.array(jax.devices()[:2]), ("data",)))
  engine = sampling.Engine(make()[0], SIZED, STOPS, pad_id=0, mesh=programs.whole.mesh)
  live = np.zeros(64, bool)
  live[[1, 2, 40]] = True
  order = np.array(engine._cache.fill_order(live))
  devices = order.reshape(-1)[: 4 * 14].reshape(-1, 4) // 32
  assert (devices == devices[:, :1]).all()
  assert devices[:4, 0].tolist() == [1, 0, 1, 0]
  assert sorted(order.tolist()) == np.flatnonzero(~live).tolist()


def test_slots_with_rows_are_filled_first_also_by_samples_that_come_alone():
  """Else their rows would move to a cache of the same shape, for which there is no program."""
  cache = sampling.Engine(make()[0], SIZED, STOPS, pad_id=0)._cache
  live = np.zeros(64, bool)
  live[17:33] = True
  cache.resize(live, 16)
  live[17:20] = False  # of the four that are filled next, one has no row
  assert cache.fill_order(live)[:4] == [17, 18, 19, 0]
