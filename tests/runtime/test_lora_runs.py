"""Runs that train adapters: what samples and what learns agree at every version, the base stays, resumes are safe."""

import collections
import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest
import tiny
from runtime_helpers import assert_identical
from runtime_helpers import first_values
from runtime_helpers import killed_at
from runtime_helpers import rows
from runtime_helpers import run
from runtime_helpers import stage_inputs

from async_rl import models
from async_rl import recording
from async_rl import runtime
from async_rl.runtime import _session

pytestmark = pytest.mark.usefixtures("two_devices")

LORA = models.LoRA(rank=4, alpha=8.0)


@dataclasses.dataclass(frozen=True)
class Options(tiny.Options):
  """Those of the smallest experiment, and one of the adapters."""

  alpha: float = 8.0


def build(options):
  """Alignment control, step scaling and clipping, as they come with the smallest experiment, on adapters."""
  experiment = tiny.build(options)
  policy = dataclasses.replace(experiment.policy, lora=dataclasses.replace(LORA, alpha=options.alpha))
  return dataclasses.replace(experiment, policy=policy, start=start_without_adapters)


def start_without_adapters(stage):
  """Weights to start from, without adapters."""
  return models.split_trainable(first_values(dataclasses.replace(stage.learner.policy, mesh=None), 3))[1]


def tiny_lora(folder, **given):
  return tiny.tiny(Options(), build, run_dir=str(folder), **given)


@pytest.fixture
def watched(monkeypatch):
  """What a run trains on, and the parameters of each version."""
  groups, params = [], {}
  learn = _session.Session.step

  def watch(self, new):
    params[self.version] = jax.device_get(self.state.params)
    groups.extend(new)
    learn(self, new)

  monkeypatch.setattr(_session.Session, "step", watch)
  return groups, params


@functools.cache
def score(policy):
  return jax.jit(functools.partial(models.score, policy))


def logprobs(policy, params, completion, request):
  length = len(request.tokens) + len(completion.tokens)
  ids = np.zeros((1, 24), np.int32)
  ids[0, :length] = np.concatenate([request.tokens, completion.tokens])
  found = score(policy)(params, ids, np.ones_like(ids), np.arange(24, dtype=np.int32)[None]).logprobs
  return np.asarray(found[0, len(request.tokens) : length])


def test_every_sample_is_of_the_merged_weights_of_its_version(tmp_path, watched):
  """The whole chain against weights without adapters; a sampler with adapters of another version would fail."""
  experiment = tiny_lora(tmp_path, learning_rate=3e-2)
  summary = runtime.train(experiment)
  groups, params = watched
  plain = dataclasses.replace(experiment.policy, lora=None)
  merged = {version: models.merge_adapters(experiment.policy.lora, p) for version, p in params.items()}
  lags, other_version = collections.Counter(), []
  for i, group in enumerate(groups[::3]):
    completion = group.completions[i % 2]
    (version,) = set(completion.versions.tolist())
    lags[3 * i // experiment.options.training.groups - version] += 1
    got = logprobs(plain, merged[version], completion, group.request)
    np.testing.assert_allclose(completion.logprobs, got, atol=2e-5)
    other = logprobs(plain, merged[max(version - 1, 0)], completion, group.request)
    other_version.append(np.abs(completion.logprobs - other).max())
  assert len(lags) == 3
  assert max(other_version) > 1e-2
  assert {r["bytes/weight_push"] for r in rows(summary)[1:]} == {4 * size(params[0]["adapters"])}
  base = models.split_trainable(params[0])[1]
  with stage_inputs(experiment) as stage:
    assert_identical(base, jax.device_get(start_without_adapters(stage)))
  assert_identical(base, models.split_trainable(params[5])[1])


def size(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


def test_sampler_and_learner_agree_at_lag_zero_while_weights_change(tmp_path):
  options = dict(mode="async", learning_rate=3e-2, decode_chunk=2, on_update="recompute")
  summary = runtime.train(tiny_lora(tmp_path, **options))
  fresh = [r["logprob_difference/lag_zero"] for r in rows(summary) if r["staleness/min"] == 0]
  assert fresh
  assert max(fresh) < 1e-5


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_nothing_had_happened(tmp_path):
  make = lambda name, **given: tiny_lora(tmp_path / name, lag="heavy", checkpoint_every=2, **given)
  _, whole, host = run(make("whole"))
  with killed_at(5):
    runtime.train(make("killed"))
  never = lambda stage: pytest.fail("the folder has all that it needs")
  _, resumed, resumed_host = run(make("killed", start=never))
  assert_identical(whole, resumed)
  assert resumed_host["ledger"] == host["ledger"]


@pytest.mark.slow
def test_an_asynchronous_run_can_be_replayed(tmp_path):
  options = dict(steps=6, max_lag=2, decode_chunk=2)
  summary, state, _ = run(tiny_lora(tmp_path / "async", mode="async", **options))
  _, replayed, _ = run(tiny_lora(tmp_path / "replay", lag=str(summary.folder.schedule), **options))
  assert_identical(state.params, replayed.params)


def test_a_resume_on_another_base_is_refused(tmp_path):
  make = lambda name, **options: tiny_lora(tmp_path / name, **{"steps": 1} | options)
  runtime.train(make("mine"))
  runtime.train(make("other", start=None))
  shutil.move(tmp_path / "mine" / "base", tmp_path / "kept")
  with pytest.raises(recording.CheckpointError, match="were trained on are missing: restore .*base"):
    runtime.train(make("mine", steps=2))
  shutil.copytree(tmp_path / "other" / "base", tmp_path / "mine" / "base")
  with pytest.raises(recording.CheckpointError, match=r"adapters of other weights than those in .*base \(checksum"):
    runtime.train(make("mine", steps=2))
  shutil.rmtree(tmp_path / "mine" / "base")
  shutil.move(tmp_path / "kept", tmp_path / "mine" / "base")
  assert runtime.train(make("mine", steps=2)).version == 2
  with pytest.raises(recording.RunFolderError, match=r"alpha: 8.0 -> 4.0"):
    runtime.train(make("mine", steps=3, alpha=4.0))
  with pytest.raises(recording.CheckpointError, match="another model .*lora: {.*} -> None"):
    runtime.train(make("mine", steps=3, policy=tiny.tiny().policy))


def test_supervised_training_of_adapters_lowers_the_loss(tmp_path, capsys):
  start = runtime.SupervisedStage(60, 3e-2, start=start_without_adapters, sequences=16, check_every=20)
  with stage_inputs(tiny_lora(tmp_path, max_completion_tokens=24)) as stage:
    before, params = jax.device_get(start_without_adapters(stage)), start(stage)
    state = stage.learner.init(jax.random.key(0), params)  # as a run does with what its start returns
  losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
  assert losses[-1] < losses[0] - 0.2
  assert_identical(models.split_trainable(jax.device_get(params))[1], before)
  assert_identical(jax.device_get(state.params), jax.device_get(params))
