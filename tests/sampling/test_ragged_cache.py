"""An engine whose decode steps run the TPU kernel, interpreted, draws the samples of one that does not."""

import dataclasses

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

SIZED = dataclasses.replace(CONFIG, slots=32, max_new_tokens=12)  # the last samples move into a cache of 8 rows


def drawn(attention, mesh=None):
  config = dataclasses.replace(make()[0].config, sliding_window=6, global_every=2)  # heads of 8, filled up to 128
  policy = models.Policy(config, dtype="float32", attention=attention)
  engine = sampling.Engine(policy, SIZED, STOPS, pad_id=0, mesh=mesh)
  engine.set_weights(jax.jit(policy.init)(jax.random.key(0)), 3)
  samples = sampling.generate(engine, requests_of(range(16))) + sampling.generate(engine, requests_of(range(16, 19)))
  return engine, samples


@pytest.fixture(scope="module")
def expected():
  return drawn("xla")[1]


@pytest.mark.usefixtures("interpreted_kernels")
@pytest.mark.parametrize("axes", [pytest.param({"data": 1}, marks=pytest.mark.slow), {"data": 2, "tensor": 2}], ids=str)
def test_samples_and_their_logprobs_are_those_of_plain_attention(axes, expected):
  devices = np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(tuple(axes.values()))
  engine, got = drawn("ragged", models.named_mesh(devices, tuple(axes)))
  assert [len(layer) for layer in engine._cache.layers] == [1, 1]
  assert engine.cache_shape[0] == (8 if axes["data"] == 1 else 32)
  same(got, expected, exact=False)
