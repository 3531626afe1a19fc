"""Options: each part refuses its bad values, names alone set them, and the part decides what a resume may change."""

import dataclasses
import math

import pytest
from tiny import Options
from tiny import tiny

from async_rl import learning
from async_rl import runtime


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(steps=0), "steps=0"),
    (dict(steps=2.5), "must be an integer at least 1, got steps=2.5"),
    (dict(seed=-1), "seed=-1"),
    (dict(groups=0), "groups=0"),
    (dict(samples=0), "samples=0"),
    (dict(epochs=0), "epochs=0; leave it out for no limit"),
    (dict(max_prompt_tokens=0), "max_prompt_tokens=0"),
    (dict(temperature=0), "temperature=0; training needs samples"),
    (dict(temperature=math.inf), "temperature=inf"),
    (dict(temperature=math.nan), "temperature=nan"),
    (dict(on_update="forget"), "on_update='forget'"),
    (dict(mode="simulate"), "mode='simulate'"),
    (dict(max_lag=-1), "max_lag=-1"),
    (dict(lag="hevy"), "lag='hevy', which is no file"),
    (dict(lag="fixd", mode="async"), "lag='fixd', which is no file"),
    (dict(generation_devices=-1), "generation_devices=-1"),
    (dict(generation_hosts=-1), "generation_hosts=-1"),
    (dict(generation_hosts=1, generation_devices=2), "generation_hosts=1 and generation_devices=2; give one of them"),
    (dict(generation_tensor=0), "generation_tensor=0"),
    (dict(rows=0), "rows=0"),
    (dict(reward_workers=-1), "reward_workers=-1"),
    (dict(exact_norms="fast"), "exact_norms=.fast."),
    (dict(reward_timeout=math.nan), "reward_timeout=nan"),
    (dict(reward_timeout=0.0), "reward_timeout=0.0"),
    (dict(reward_timeout=1e9), "at most 1000000.0, got reward_timeout=1000000000.0"),
    (dict(eval_temperature=-0.5), "eval_temperature=-0.5"),
    (dict(keep=0), "keep=0"),
    (dict(run_dir=""), "run_dir=''"),
    (dict(learning_rate=math.nan), "learning_rate=nan"),
    (dict(learning_rate=math.inf), "learning_rate=inf"),
    (dict(learning_rate=-1.0), "must be a number above 0, got learning_rate=-1.0"),
    (dict(slots=1), "slots=1, samples=2; a group needs all its slots at once"),
    (dict(row_tokens=23), "max_completion_tokens=24, got row_tokens=23; 0 stands for that many"),
    (dict(samples=1), "samples. must be at least 2 with these advantages"),
    (dict(mode="async", max_lag=0, generation_devices=0), "max_lag=0 on shared devices .* use mode='sync'"),
    (dict(max_lagg=3), "unknown option 'max_lagg': did you mean 'max_lag'"),
  ],
)
def test_bad_values_are_refused_by_name_before_anything_happens(options, message):
  with pytest.raises(ValueError, match=message):
    tiny(**options)


def test_rows_are_no_longer_than_a_whole_batch():
  assert tiny(row_tokens=10**9).batch_shape.row_tokens == 4 * 2 * (8 + 16)
  assert tiny(row_tokens=30).batch_shape.row_tokens == 30
  assert tiny().batch_shape.row_tokens == 8 + 16


def test_override_sets_options_in_their_parts_and_leaves_the_rest():
  options = runtime.override(Options(), max_lag=3, steps=4, learning_rate=1e-3, lag="heavy")
  assert (options.schedule.max_lag, options.schedule.lag) == (3, "heavy")
  assert options.length.steps == 4
  assert options.learning_rate == 1e-3
  assert options.rollout == Options().rollout
  assert runtime.flatten(options) == runtime.flatten(Options()) | dict(
    max_lag=3, steps=4, learning_rate=1e-3, lag="heavy"
  )


def test_the_sampler_draws_as_the_options_of_the_rollout_say():
  given: dict = dict(
    temperature=0.5, on_update="recompute", slots=12, prefill_tokens=99, length_buckets=3, slot_buckets=2
  )
  config = tiny(decode_chunk=3, shared_prompts=True, **given).sampler_config
  assert (given | dict(chunk=3, shared_prompts=True)).items() <= dataclasses.asdict(config).items()


def test_values_that_are_only_valid_together_can_be_set_together():
  assert tiny(slots=16, samples=16).options.training.samples == 16


def test_no_two_parts_have_an_option_of_the_same_name():
  parts = (runtime.Training, runtime.Rollout, runtime.Schedule, runtime.Devices, runtime.Length, runtime.Output)
  names = [name for part in parts for name in runtime.flatten(part())]
  assert len(names) == len(set(names))


def test_the_fingerprint_holds_what_a_resume_must_not_change():
  fingerprint = tiny().fingerprint()
  resumable = {name for part in runtime.RESUMABLE for name in runtime.flatten(part())}
  assert set(fingerprint) == {"config"} | set(runtime.flatten(Options())) - resumable
  assert {"steps", "run_dir", "rows", "eval_every"} <= resumable
  assert {"learning_rate", "train_prompts", "max_lag", "seed", "slots"} <= set(fingerprint)


def test_one_sample_is_refused_with_the_advantages_that_compare_a_group():
  refused, options = set(), runtime.override(Options(), samples=1)
  for name in learning.ADVANTAGES:
    try:
      dataclasses.replace(tiny(), options=options, objective=learning.objective("reinforce", advantages=name))
    except ValueError:
      refused.add(name)
  assert {"grpo", "dr_grpo", "rloo", "opo", "opob"} <= refused
  assert not {"reinforce", "gae"} & refused


@pytest.mark.parametrize(("learners", "data", "tensor", "slots"), [(3, 3, 1, 9), (4, 2, 2, 8)])
def test_evaluations_run_on_any_number_of_learner_devices(learners, data, tensor, slots):
  """Slots are rounded up, and weights are split as for generation where that divides the devices."""
  meshes, made = [], []
  experiment = tiny(
    generation_devices=8 - learners,
    generation_tensor=5 if learners == 3 else 2,
    sampler=lambda policy, config, stop_ids, pad_id, mesh: made.append(config) or meshes.append(mesh),
  )
  experiment.make_evaluator(experiment.make_meshes().learner)
  assert made[0].slots == slots
  assert dict(meshes[0].shape) == {"data": data, "fsdp": 1, "tensor": tensor}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(max_prompt_tokens=3), "max_prompt_tokens=3"),
    (dict(rows=3, generation_devices=4), "must be a multiple of 4, .* got rows=3; the next is rows=4"),
    (dict(slots=6, generation_devices=4), "must be a multiple of 4, .* got slots=6; the next is slots=8"),
    (dict(fsdp=4, generation_devices=2), "divide the 6 devices .* fsdp=4, tensor=1; the nearest that does is fsdp=3"),
    (dict(generation_tensor=4, generation_devices=6), "got generation_tensor=4; .* is generation_tensor=3"),
    (dict(generation_devices=8), "generation_devices=8 of 8 devices"),
  ],
)
def test_bad_options_end_with_the_value_and_the_remedy(tmp_path, options, message):
  with pytest.raises(ValueError, match=message):
    runtime.train(tiny(run_dir=str(tmp_path), **options))
