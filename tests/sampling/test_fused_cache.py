"""An engine whose decode steps run the kernels for GPUs, interpreted, draws the samples of one that does not."""

import dataclasses

import jax
import numpy as np
import pytest
from sampling_helpers import CONFIG
from sampling_helpers import STOPS
from sampling_helpers import VOCAB
from sampling_helpers import make
from sampling_helpers import requests_of
from sampling_helpers import same

from async_rl import models
from async_rl import sampling
from async_rl.models import _fused_decode
from async_rl.sampling import _fused_draw

SIZED = dataclasses.replace(CONFIG, slots=32, max_new_tokens=12)  # the last samples move into a cache of 8 rows


def drawn(mesh=None, shared=False):
  config = dataclasses.replace(make()[0].config, head_dim=32)
  policy = models.Policy(config, dtype="float32", attention="xla")
  engine = sampling.Engine(policy, dataclasses.replace(SIZED, shared_prompts=shared), STOPS, pad_id=0, mesh=mesh)
  engine.set_weights(jax.jit(policy.init)(jax.random.key(0)), 3)
  return engine, sampling.generate(engine, requests_of(range(16))) + sampling.generate(engine, requests_of(range(3)))


@pytest.fixture(scope="module")
def expected():
  return drawn()[1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2, "tensor": 2}], ids=str)
def test_samples_and_their_logprobs_are_those_of_plain_attention(axes, shared, expected, monkeypatch):
  monkeypatch.setattr(models.Policy, "cache_backend", "triton")
  monkeypatch.setattr(_fused_decode, "_BLOCK", 8)
  kernel, layers = _fused_decode.rotate_store_and_attend, []
  dead = []

  def counted(*arrays, **options):
    layers.append(options)
    jax.debug.callback(lambda entries: dead.append((np.asarray(entries) < 0).any()), arrays[4])
    return kernel(*arrays, **options)

  def drawn_with(*arrays, **options):
    limits.append(options["limit"])
    return draw(*arrays, **options)

  draw, limits = _fused_draw.draw_in_kernels, []
  monkeypatch.setattr(_fused_draw, "draw_in_kernels", drawn_with)
  monkeypatch.setattr(_fused_decode, "rotate_store_and_attend", counted)
  devices = np.array(jax.devices()[: np.prod(list(axes.values()))]).reshape(tuple(axes.values()))
  engine, got = drawn(models.named_mesh(devices, tuple(axes)), shared)
  assert engine.cache_shape[0] == (8 if axes["data"] == 1 else 32)
  assert {options["prompts"] is not None for options in layers} == {shared}
  assert {*limits} == (set() if "tensor" in axes else {VOCAB - 5})
  jax.effects_barrier()
  assert {*dead} == {True, False}, "nothing is computed for slots in which no sample lives"
  assert engine._cache.layers[0][0].format.layout.major_to_minor == (0, 2, 1, 3), "as the kernel reads it"
  same(got, expected, exact=False)
