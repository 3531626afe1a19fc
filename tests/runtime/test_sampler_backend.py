"""Whole runs with another sampler than the slot engine: what `sampling.Sampler` promises is enough for a run."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from full_forward import FullForwardSampler
from runtime_helpers import killed_at
from runtime_helpers import rows
from runtime_helpers import run
from tiny import tiny

from async_rl import models
from async_rl import runtime
from async_rl import sampling
from async_rl.rollout import _weight_store
from async_rl.runtime import _experiment

pytestmark = pytest.mark.usefixtures("two_devices")


def assert_near(a, b):
  """The same training up to rounding: the backends' programs sum in different orders."""
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3, rtol=1e-3), a, b)


def test_a_run_with_the_full_forward_sampler_is_the_run_with_the_engine(tmp_path):
  make = lambda sampler: tiny(run_dir=str(tmp_path / sampler.__name__), sampler=sampler, steps=3, eval_prompts=4)
  summary, engine, _ = run(make(sampling.Engine))
  other_summary, other, _ = run(make(FullForwardSampler))
  assert [r["reward/mean"] for r in rows(other_summary)] == [r["reward/mean"] for r in rows(summary)]
  assert other_summary.accuracy == summary.accuracy
  assert_near(other.params, engine.params)


def test_a_run_begun_with_one_backend_is_resumed_with_another(tmp_path):
  make = lambda name, sampler: tiny(run_dir=str(tmp_path / name), sampler=sampler, steps=4, checkpoint_every=2)
  _, whole, host = run(make("whole", sampling.Engine))
  with killed_at(3):
    runtime.train(make("killed", sampling.Engine))
  _, resumed, resumed_host = run(make("killed", FullForwardSampler))
  for account in ("generated", "ended"):
    assert resumed_host["ledger"][account] == host["ledger"][account]
  assert_near(resumed.params, whole.params)


def test_weights_change_under_unfinished_samples_of_an_asynchronous_run(tmp_path):
  options = dict(mode="async", steps=4, decode_chunk=2)
  summary = runtime.train(tiny(run_dir=str(tmp_path / "run"), sampler=FullForwardSampler, **options))
  assert summary.version == 4
  assert max(r["staleness/max"] for r in rows(summary)) <= 2


@pytest.mark.parametrize("mode", [pytest.param("simulated", marks=pytest.mark.slow), "async"])
def test_a_run_with_an_engine_per_device_is_the_run_with_one_engine(tmp_path, monkeypatch, mode):
  """Both share the devices with the learner; in the asynchronous run, within the bound."""
  make = lambda name: tiny(run_dir=str(tmp_path / name), mode=mode, steps=3, eval_prompts=4, generation_devices=0)
  summary, one, _ = run(make("one"))
  for module in (_experiment, _weight_store):
    monkeypatch.setattr(module, "takes_programs", lambda mesh: False)
  pooled, pool, _ = run(make("pool"))
  assert max(r["staleness/max"] for r in rows(pooled)) <= 2
  if mode == "simulated":
    assert [r["reward/mean"] for r in rows(pooled)] == [r["reward/mean"] for r in rows(summary)]
    assert pooled.accuracy == summary.accuracy
    assert_near(pool.params, one.params)


def test_slots_and_weights_that_engines_of_one_device_cannot_share_are_refused():
  config = sampling.SamplerConfig(slots=8, group_size=3, max_prompt_tokens=4, max_new_tokens=4)
  mesh = lambda *shape: models.named_mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape))
  own, meshes = sampling.split_engines(config, mesh(2, 1, 1))
  assert (own.slots, [one.size for one in meshes]) == (4, [1, 1])
  with pytest.raises(ValueError, match="generation_tensor=2"):
    sampling.split_engines(config, mesh(1, 1, 2))
  with pytest.raises(ValueError, match="slots=7; the next is slots=8"):
    sampling.split_engines(dataclasses.replace(config, slots=7), mesh(2, 1, 1))
  with pytest.raises(ValueError, match="at least samples on each of 2 devices, got slots=4, samples=3; raise it to 6"):
    sampling.split_engines(dataclasses.replace(config, slots=4), mesh(2, 1, 1))
