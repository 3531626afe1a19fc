"""The slot engine on meshes of eight devices."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import make
from sampling_helpers import requests_of
from sampling_helpers import same

from async_rl import models
from async_rl import sampling

SIZED = dataclasses.replace(CONFIG, slots=8)


def engine_on(devices, **axes):
  policy, params = make()
  mesh = models.named_mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
  engine = sampling.Engine(policy, SIZED, STOPS, pad_id=0, mesh=mesh)
  engine.set_weights(params, 3)
  return engine


@pytest.fixture(scope="module")
def expected():
  """The samples of one device, and the checksum of its weights."""
  engine = engine_on(jax.devices()[3:4], data=1)
  return sampling.generate(engine, requests_of(range(10))), engine.checksum


@pytest.mark.parametrize(
  "axes",
  [{"data": 8}, {"data": 4, "fsdp": 1, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}],
  ids=str,
)
def test_samples_are_those_of_one_device(axes, expected):
  engine = engine_on(jax.devices()[-math.prod(axes.values()) :], **axes)
  engine.warmup()
  compilations = engine.compilations
  with jax.transfer_guard("disallow"):
    same(sampling.generate(engine, requests_of(range(10))), expected[0], exact=False)
    assert engine.checksum == expected[1]
  assert engine.compilations == compilations


def test_the_cache_stays_where_it_is():
  """No decode step moves keys and values between devices."""
  engine = engine_on(jax.devices(), data=4, tensor=2)
  layer = math.prod((8, 2, SIZED.capacity, 8))
  text = engine._programs.decode(*engine.cache_shape).as_text()
  moved = re.findall(r"= \w+\[([\d,]+)\][^=]* (?:all-gather|all-to-all|collective-permute)\(", text)
  assert moved, "the tensor axis must communicate something"
  assert max(math.prod(map(int, shape.split(","))) for shape in moved) < layer / 8


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "tensor": 2}], ids=str)
def test_prefixes_travel_once_and_not_once_per_sample(axes):
  """Filling slots gathers the keys and values of the prefixes; nothing is summed, nothing is repeated on the way."""
  programs = engine_on(jax.devices(), **axes)._programs
  length = SIZED.prompt_lengths[-1]
  text = programs.put(length, *programs.shapes[-1]).as_text()
  moved = re.findall(r"= (\(?\w+\[[\d,]+\].*?) (all-\w+|collective-permute|reduce-scatter)\(", text)
  assert {kind for _, kind in moved} == {"all-gather"}
  prefixes = math.prod((programs.prefill_rows(length), 2 // axes.get("tensor", 1), length, 8))
  sizes = [
    math.prod(map(int, shape.split(","))) for result, _ in moved for shape in re.findall(r"\[([\d,]+)\]", result)
  ]
  assert sizes == [prefixes] * 2 * 2  # keys and values of two layers


def test_slots_that_the_mesh_cannot_divide_are_refused():
  policy, _ = make()
  mesh = models.named_mesh(np.array(jax.devices()).reshape(4, 2), models.ROWS)
  with pytest.raises(ValueError, match="multiple of 8, .* slots=6; the next is slots=8"):
    sampling.Engine(policy, CONFIG, STOPS, pad_id=0, mesh=mesh)
