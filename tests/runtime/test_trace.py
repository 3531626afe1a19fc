"""The programs of a run are known from shapes alone, and so is what stays in memory."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import tiny

from async_rl import runtime
from async_rl import sampling
from async_rl.runtime import _trace


@pytest.fixture
def experiment(tmp_path):
  return tiny(run_dir=str(tmp_path / "run"), mode="async", generation_devices=4, fsdp=2, eval_prompts=4)


def _zeros(x):
  return np.zeros(x.shape, x.dtype)


def test_the_traced_step_is_the_one_that_runs(experiment):
  trace = runtime.trace_run(experiment, jax.devices())
  learner = experiment.make_learner(trace.meshes.learner)
  state = jax.device_put(jax.tree.map(_zeros, learner.abstract()), learner.state_shardings)
  kept = trace.resident["learner"]
  held = jax.tree.leaves((state.params, state.opt_state))
  on_one = sum(x.addressable_shards[0].data.nbytes for x in held)
  assert sum(runtime.bytes_per_device(kept[kind]) for kind in ("parameters", "optimizer", "stabilizers")) == on_one
  # The gradient whose direction is remembered, and the counters; Adam's moments are the optimizer's.
  parameters = runtime.bytes_per_device(kept["parameters"])
  assert parameters < runtime.bytes_per_device(kept["stabilizers"]) < 1.1 * parameters
  assert 2 * parameters <= runtime.bytes_per_device(kept["optimizer"]) < 2.1 * parameters
  text = trace.programs["step"].trace().lower().as_text()
  batch = learner.put(jax.tree.map(_zeros, learner.shape.abstract()))
  assert text == learner._step.lower(state, batch, None).as_text()


def test_the_traced_sampler_is_the_one_that_runs(experiment):
  trace = runtime.trace_run(experiment, jax.devices())
  engine = experiment.make_sampler(experiment.sampler_config, trace.meshes.generation)
  assert list(trace.programs) == ["step", "stage", "gather", "prefill", "put", "decode"]
  cache = trace.resident["generation"]["cache"]
  assert runtime.bytes_per_device(cache) == sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(engine._cache.layers)
  )
  decode = engine._programs.decode(*engine.cache_shape)
  traced = trace.programs["decode"].trace().lower().compile()
  assert traced.input_shardings == decode.input_shardings
  assert traced.cost_analysis() == decode.cost_analysis()
  evaluator = trace.resident["learner"]["evaluator's cache"]
  assert runtime.bytes_per_device(evaluator) == runtime.bytes_per_device(cache)  # four devices on either side


def test_prompts_that_groups_share_are_kept_beside_the_cache(experiment):
  options = runtime.override(experiment.options, shared_prompts=True, slots=48, samples=6)
  trace = runtime.trace_run(dataclasses.replace(experiment, options=options), jax.devices())
  kept = trace.programs["decode"].resident
  assert [x.shape for x in jax.tree.leaves(kept["prompts"])] == [(24, 1, 16, 8)] * 2, "three times the whole groups"
  taken = trace.programs["decode"].trace().in_avals
  assert {x.shape for x in jax.tree.leaves((kept["prompts"], kept["cache"]))} <= {
    x.shape for x in jax.tree.leaves(taken)
  }


def test_a_reference_policy_brings_its_parameters_and_a_scoring_program(experiment):
  options = runtime.override(experiment.options, reference=True, eval_prompts=0)
  trace = runtime.trace_run(dataclasses.replace(experiment, options=options), jax.devices())
  kept = trace.resident["learner"]
  assert list(kept) == ["parameters", "optimizer", "stabilizers", "reference"]
  assert runtime.bytes_per_device(kept["reference"]) == runtime.bytes_per_device(kept["parameters"])  # float32
  jaxpr = trace.programs["step"].trace().jaxpr
  assert len(jaxpr.in_avals) == len(jax.tree.leaves((kept, trace.programs["step"].resident))) // 2 + 1 + 12
  assert trace.programs["score"].trace().out_info.shape == (8, 16)


def test_another_sampler_is_not_planned(experiment):
  class Other(sampling.Engine):
    """A sampler of somebody else's."""

  with pytest.raises(ValueError, match=r"programs of .*Other.* are not known"):
    runtime.trace_run(dataclasses.replace(experiment, sampler=Other), jax.devices())


def test_of_an_engine_per_device_the_programs_of_one_are_traced(experiment, monkeypatch):
  together = runtime.trace_run(experiment, jax.devices())
  monkeypatch.setattr(_trace, "takes_programs", lambda mesh, devices: False)
  trace = runtime.trace_run(experiment, jax.devices())
  assert (trace.engines, together.engines) == (4, 1)
  for name in ("gather", "decode"):
    assert {x.sharding.mesh.size for x in jax.tree.leaves(trace.programs[name].trace().in_avals)} == {1}
  for side, kind in (("generation", "weights"), ("generation", "cache"), ("learner", "evaluator's cache")):
    held = [runtime.bytes_per_device(t.resident[side][kind]) for t in (trace, together)]
    assert held[0] == held[1]
