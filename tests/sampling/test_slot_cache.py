"""The cache follows the live slots: its shapes, the moves of its rows, and samples that do not notice."""

import dataclasses
import math

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
from async_rl.sampling import _programs
from async_rl.sampling import _slot_cache

SIZED = dataclasses.replace(CONFIG, slots=64)


def mesh_of(**axes):
  count = math.prod(axes.values())
  return models.named_mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


@pytest.mark.parametrize(
  ("slots", "buckets", "shards", "filled_only", "expected"),
  [
    (512, 3, 1, True, ((32, 48), (128, 48), (512, 48))),
    (512, 3, 1, False, ((32, 48), (128, 48), (512, 16), (512, 32), (512, 48))),
    (512, 3, 16, True, ((128, 48), (512, 48))),  # two of a device's 32 slots are not worth a program
    (512, 1, 1, True, ((512, 48),)),
    (34, 2, 1, True, ((9, 48), (34, 48))),
    (7, 3, 1, True, ((7, 48),)),
  ],
)
def test_shapes(slots, buckets, shards, filled_only, expected):
  config = dataclasses.replace(CONFIG, slots=slots, slot_buckets=buckets, length_buckets=3)
  assert config.cache_shapes(shards, filled_only) == expected


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2, "tensor": 2}], ids=str)
def test_samples_are_those_of_a_cache_that_keeps_its_size(axes):
  policy, params = make()
  engine = sampling.Engine(policy, SIZED, STOPS, pad_id=0, mesh=mesh_of(**axes))
  engine.set_weights(params, 3)
  engine.warmup()
  compilations, got, rows = engine.compilations, [], []
  with jax.transfer_guard("disallow"):
    for requests in (requests_of(range(32)), requests_of(range(32, 40))):
      for request in requests:
        engine.submit(request)
      while not rows or (engine.cache_shape[0] == 64 and not engine.idle):  # then the others come
        got += engine.step()
        rows.append(engine.cache_shape[0])
    while not engine.idle:
      got += engine.step()
      rows.append(engine.cache_shape[0])
  assert engine.compilations == compilations
  assert rows[0] == 64
  assert rows[-1] < 64
  got.sort(key=lambda c: (c.ticket, c.sample))
  same(got, sampling.generate(engine_of(), requests_of(range(40))), exact=False)


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 4}], ids=str)
def test_every_live_slot_keeps_what_it_has(axes):
  """Against a table on the host, through random numbers of live slots, on devices that hold unequally many."""
  slots, shards = 256, axes["data"]
  config = dataclasses.replace(CONFIG, slots=slots, length_buckets=2)
  programs = _programs.Programs(make()[0], config, STOPS, mesh_of(**axes))
  cache = _slot_cache.SlotCache(programs, slots)
  rng = np.random.default_rng(0)
  live, table = np.zeros(slots, bool), np.zeros(slots)
  seen = set()
  for _ in range(30):
    live &= rng.random(slots) < rng.choice([0.2, 0.9])
    fresh = cache.fill_order(live)[: int(rng.integers(0, (~live).sum() + 1) * rng.random())]
    live[fresh] = True
    length = int(rng.choice(config.lengths))
    cache.resize(live, length)
    assert cache.shape[0] >= shards * live.reshape(shards, -1).sum(1).max()
    assert cache.shape[1] >= length
    assert set(np.flatnonzero(live)) <= set(cache.slots)
    seen.add(cache.shape)
    for layer in cache.layers:
      for x in layer:
        assert x.shape[0] == cache.shape[0]
        assert x.shape[2] == cache.shape[1]
    rows = cache.rows_of(np.flatnonzero(live))
    known = np.setdiff1d(np.flatnonzero(live), fresh)
    stored = np.asarray(cache.layers[1][0])[cache.rows_of(known), 0, 0, 0]
    np.testing.assert_array_equal(stored, table[known])
    table[live] = rng.standard_normal(live.sum()).astype(np.float32)
    new = np.asarray(cache.layers[1][0]).copy()
    new[rows, 0, 0, 0] = table[live]
    put = jax.device_put(new, programs.cache)
    cache.layers = (cache.layers[0], (put, cache.layers[1][1]))
  assert len(seen) > 2


def test_devices_are_filled_evenly_and_a_batch_does_not_depend_on_the_one_before():
  """Against another cache that never held anything; the least loaded device is filled first."""
  slots, config = 64, dataclasses.replace(CONFIG, slots=64)
  programs = _programs.Programs(make()[0], config, STOPS, mesh_of(data=2))
  used, fresh = (_slot_cache.SlotCache(programs, slots) for _ in range(2))
  rng = np.random.default_rng(0)
  nothing, first = np.zeros(slots, bool), rng.random(slots) < 0.9
  used.resize(first, 16)
  used.resize(first & (rng.random(slots) < 0.2), 16)
  for cache in (used, fresh):
    live = nothing.copy()
    for count in (12, 12):
      filled = cache.fill_order(live)[:count]
      live[filled] = True
      loads = live.reshape(2, -1).sum(1)
      assert abs(loads[0] - loads[1]) <= 1
      cache.resize(live, 16)
    if cache is used:
      expected = cache.shape, live.copy()
  assert fresh.shape == expected[0]
  np.testing.assert_array_equal(live, expected[1])
