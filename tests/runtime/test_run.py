"""Whole runs: the three ways agree, any interruption can be undone, nothing is lost, everything ends."""

import dataclasses
import resource
import threading
import time

import jax
import numpy as np
import optax
import pytest
from runtime_helpers import assert_identical
from runtime_helpers import killed_at
from runtime_helpers import rows
from runtime_helpers import run
from runtime_helpers import with_options
from tiny import DigitSums
from tiny import sums
from tiny import tiny

from async_rl import models
from async_rl import recording
from async_rl import rollout
from async_rl import runtime
from async_rl import stabilizers
from async_rl.learning import Learner
from async_rl.recording import Checkpointer
from async_rl.runtime import _held_out
from async_rl.runtime import _session
from async_rl.sampling import Engine

pytestmark = pytest.mark.usefixtures("four_devices")


def test_simulated_at_lag_zero_is_sync_bit_for_bit(tmp_path):
  shared = dict(generation_devices=0, max_lag=0, steps=4)
  _, simulated, _ = run(tiny(run_dir=str(tmp_path / "simulated"), **shared))
  summary, sync, host = run(tiny(run_dir=str(tmp_path / "sync"), mode="sync", **shared))
  assert_identical(simulated, sync)
  assert summary.version == 4
  assert host["ledger"]["ended"]["trained"] == host["ledger"]["generated"] > 0
  assert all(r["staleness/max"] == 0 for r in rows(summary))
  assert all(r["logprob_difference/lag_zero"] < 1e-5 for r in rows(summary))


def test_samplers_draw_with_leading_weights_and_record_their_logprobs(tmp_path):
  shared = dict(generation_devices=0, max_lag=0, steps=3, mode="sync")
  optimizer = stabilizers.lead_by_momentum(optax.adam(1e-2, b1=0.9), lag=2)
  first, *later = rows(runtime.train(tiny(run_dir=str(tmp_path / "run"), optimizer=optimizer, **shared)))
  assert first["logprob_difference/lag_zero"] < 1e-5  # no step has been taken yet
  assert min(r["logprob_difference/lag_zero"] for r in later) > 1e-3


@pytest.mark.parametrize("lag", ["fixed", "heavy"])
def test_killed_and_resumed_is_as_if_nothing_had_happened(tmp_path, lag):
  make = lambda name, **options: tiny(run_dir=str(tmp_path / name), lag=lag, checkpoint_every=2, **options)
  summary, whole, host = run(make("whole"))
  if lag == "fixed":
    assert rows(summary)[-1]["staleness/max"] == 2
  with killed_at(5):
    runtime.train(make("killed"))
  resumed_summary, resumed, resumed_host = run(make("killed"))
  assert_identical(whole, resumed)
  assert resumed_host["ledger"] == host["ledger"]
  assert [r["reward/mean"] for r in rows(resumed_summary)] == [r["reward/mean"] for r in rows(summary)]


def test_the_sampler_is_compiled_while_the_first_checkpoint_is_taken(tmp_path, monkeypatch):
  compiling, compiled = threading.Event(), []
  warmup, save, snapshot = Engine.warmup, Checkpointer.save, Engine.snapshot

  def slow_save(self, step, *args):
    assert step or compiling.wait(60)
    save(self, step, *args)

  def noted_warmup(self, resumes=False):
    compiling.set()
    warmup(self, resumes)
    compiled.append(self.compilations)

  def noted_snapshot(self):
    assert compiled or not compiling.is_set()  # a sampler takes one call at a time
    return snapshot(self)

  monkeypatch.setattr(Checkpointer, "save", slow_save)
  monkeypatch.setattr(Engine, "warmup", noted_warmup)
  monkeypatch.setattr(Engine, "snapshot", noted_snapshot)
  summary = runtime.train(tiny(run_dir=str(tmp_path), steps=1))
  assert summary.version == 1
  assert compiled[0] > 0


@pytest.mark.parametrize(("where", "name"), [(Engine, "warmup"), (Checkpointer, "save")])
def test_an_error_beside_the_other_half_of_a_start_ends_it_and_the_next_start_goes_on(
  tmp_path, monkeypatch, where, name
):
  def fail(*_, **__):
    raise MemoryError(name)

  with monkeypatch.context() as patch:
    patch.setattr(where, name, fail)
    with pytest.raises(MemoryError, match=name):
      runtime.train(tiny(run_dir=str(tmp_path / "run"), steps=1))
  assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
  assert runtime.train(tiny(run_dir=str(tmp_path / "run"), steps=1)).version == 1


@pytest.mark.parametrize("lag", ["fixed", "heavy"])
def test_a_signal_in_a_simulated_run_changes_nothing(tmp_path, monkeypatch, lag):
  make = lambda name: tiny(run_dir=str(tmp_path / name), lag=lag)
  _, whole, host = run(make("whole"))
  take = _session.Session.take_batch

  def signalled(self, tickets=None):
    if self.version == 3:
      self.stop.request()
    return take(self, tickets)

  with monkeypatch.context() as patch:
    patch.setattr(_session.Session, "take_batch", signalled)
    with pytest.raises(runtime.Interrupted):
      runtime.train(make("stopped"))
  _, resumed, resumed_host = run(make("stopped"))
  assert_identical(whole, resumed)
  assert resumed_host["ledger"] == host["ledger"]


def test_async_bounds_the_lag_balances_and_can_be_replayed(tmp_path):
  options = dict(steps=8, max_lag=2, decode_chunk=2)
  summary, state, host = run(tiny(run_dir=str(tmp_path / "async"), mode="async", **options))
  assert max(r["staleness/max"] for r in rows(summary)) <= 2
  assert host["ledger"]["ended"]["stale"] == 0
  assert host["ledger"]["ended"]["trained"] == sum(r["tokens/trained"] for r in rows(summary))
  schedule = list(rollout.read_schedule(summary.folder.schedule))
  assert [e[1] for e in schedule if e[0] == "train"] == list(range(8))
  lines = summary.folder.schedule.read_text().splitlines(keepends=True)
  twice = tmp_path / "twice.jsonl"  # a run that was resumed with nothing in flight takes the same weights once more
  twice.write_text("".join(line * 2 if "weights" in line else line for line in lines))
  _, replayed, _ = run(tiny(run_dir=str(tmp_path / "replay"), lag=str(twice), **options))
  assert_identical(state.params, replayed.params)
  part = tmp_path / "part.jsonl"
  part.write_text("".join(lines[: next(i for i, line in enumerate(lines) if "train" in line) + 1]))
  stopped = tiny(run_dir=str(tmp_path / "part"), lag=str(part), **options)
  assert runtime.train(stopped).ended_early
  with pytest.raises(ValueError, match="part of a replay, which cannot be resumed"):
    runtime.train(stopped)
  part.write_text('["resume"]\n' + part.read_text())
  with pytest.raises(ValueError, match="resumed with samples in flight"):
    runtime.train(with_options(stopped, overwrite=True))


def test_async_resumes_with_everything_in_flight(tmp_path):
  make = lambda steps: tiny(run_dir=str(tmp_path), mode="async", steps=steps, max_lag=2, decode_chunk=2)
  _, _, first = run(make(4))
  summary, _, _ = run(make(8))
  assert summary.version == 8
  trained = [t for e in rollout.read_schedule(summary.folder.schedule) if e[0] == "train" for t in e[2]]
  assert len(trained) == len(set(trained)) == 8 * 4
  assert set(trained) >= set(first["actor"]["tickets"].tolist())
  assert max(r["staleness/max"] for r in rows(summary)) <= 2


def tiny_with(task, folder, **options):
  """The experiment with sums of another class."""
  experiment = tiny(run_dir=str(folder), **options)
  return dataclasses.replace(experiment, task=sums(experiment.options, task))


@dataclasses.dataclass(frozen=True)
class Broken(DigitSums):
  def reward(self, prompt, text, finish):
    raise ZeroDivisionError


@dataclasses.dataclass(frozen=True)
class Flaky(DigitSums):
  def reward(self, prompt, text, finish):
    if prompt.id % 5 == 0:
      raise ZeroDivisionError
    return super().reward(prompt, text, finish)


@pytest.mark.parametrize("mode", ["async", "simulated", "sync"])
def test_a_group_whose_rewards_fail_is_replaced(tmp_path, mode):
  summary, _, host = run(tiny_with(Flaky, tmp_path, mode=mode, lag="heavy"))
  assert summary.version == 6
  assert host["ledger"]["ended"]["failed/reward"] > 0
  assert all(r["staleness/max"] <= 2 for r in rows(summary))


@dataclasses.dataclass(frozen=True)
class Halved(DigitSums):
  """Its reward fails on every second prompt."""

  def reward(self, prompt, text, finish):
    if prompt.id % 2:
      raise ZeroDivisionError
    return super().reward(prompt, text, finish)


@pytest.mark.parametrize("mode", ["async", "simulated", "sync"])
def test_failed_groups_at_the_end_of_the_data_cost_no_mode_a_step(tmp_path, mode):
  summary = runtime.train(tiny_with(Halved, tmp_path, mode=mode, steps=100, epochs=2, train_prompts=10))
  assert summary.ended_early
  assert summary.version == 2  # 10 of 20 groups succeed, 4 are a step
  assert all(r["staleness/max"] <= 2 for r in rows(summary))


def test_data_that_give_no_step_end_the_run_with_a_report_that_says_so(tmp_path, draws_pictures):
  summary = runtime.train(tiny_with(Broken, tmp_path, steps=100, epochs=1, train_prompts=8))
  assert summary.ended_early
  assert summary.version == 0
  assert summary.folder.report.exists()


@dataclasses.dataclass(frozen=True)
class Picky(DigitSums):
  """Its reward fails on about half of the completions, so that most groups lose some of their samples."""

  def reward(self, prompt, text, finish):
    if len(text) % 2:
      raise ZeroDivisionError("odd length")
    return super().reward(prompt, text, finish)


def test_samples_whose_rewards_fail_are_not_trained_and_told_once(tmp_path, capfd):
  summary, _, host = run(tiny_with(Picky, tmp_path, samples=4))
  ended = host["ledger"]["ended"]
  assert ended["masked/failed"] > 0
  assert ended["trained"] > 0
  assert sum(r["tokens/trained"] for r in rows(summary)) == ended["trained"]
  assert rows(summary)[-1]["reward/failures"] > 6
  assert capfd.readouterr().err.count("failed reward: raised ZeroDivisionError: odd length") == 1


def start_with_other_weights(stage):
  """Uses the sampler for weights that are not those it returns."""
  first, other = (stage.learner.init(jax.random.key(seed)).params for seed in (0, 1))
  stage.sampler.set_weights(jax.tree.map(lambda x: 10 * x, other), 0)
  return first


@pytest.mark.parametrize("mode", ["async", "simulated"])
def test_the_first_samples_are_of_the_weights_that_start_returns(tmp_path, mode):
  summary = runtime.train(tiny(run_dir=str(tmp_path), mode=mode, steps=1, start=start_with_other_weights))
  assert rows(summary)[0]["logprob_difference/lag_zero"] < 1e-5


def test_supervised_training_without_solutions_that_fit_is_an_error(tmp_path):
  start = runtime.SupervisedStage(steps=1, learning_rate=1e-3)
  with pytest.raises(ValueError, match="max_completion_tokens=3"):
    runtime.train(tiny(run_dir=str(tmp_path), max_completion_tokens=3, start=start))


@pytest.mark.parametrize("mode", ["async", "simulated"])
def test_an_error_of_the_sampler_ends_the_run_with_its_cause(tmp_path, monkeypatch, mode):
  def fails(self, completion):
    raise MemoryError("in the sampler")

  monkeypatch.setattr(rollout.Conversations, "process_completion", fails)
  with pytest.raises(MemoryError, match="in the sampler"):
    runtime.train(tiny(run_dir=str(tmp_path), mode=mode))
  assert not any(t.name == "actor" and t.is_alive() for t in threading.enumerate())


def test_an_error_of_the_sampler_is_not_hidden_by_a_checkpoint(tmp_path, monkeypatch):
  process, learn, failed = rollout.Conversations.process_completion, _session.Session.step, threading.Event()

  def fails(self, completion):
    if completion.ticket >= 6:
      failed.set()
      raise MemoryError("in the sampler")
    process(self, completion)

  def after(self, groups):
    assert failed.wait(60)
    learn(self, groups)

  monkeypatch.setattr(rollout.Conversations, "process_completion", fails)
  monkeypatch.setattr(_session.Session, "step", after)
  with pytest.raises(MemoryError, match="in the sampler"):
    runtime.train(tiny(run_dir=str(tmp_path), mode="async", checkpoint_every=1))


def test_evaluations_are_not_idle_time(tmp_path, monkeypatch):
  def slow(*args, **options):
    time.sleep(1.5)
    return {"accuracy": 0.0}, []

  monkeypatch.setattr(_held_out, "evaluate", slow)
  options = dict(mode="sync", generation_devices=0, steps=4, eval_prompts=1, eval_every=1)
  found = rows(runtime.train(tiny(run_dir=str(tmp_path / "run"), **options)))
  assert min(r["idle/learner"] * r["time/step"] for r in found[1:]) < 1.0
  assert min(r["time/step"] for r in found[1:]) > 1.5


def test_a_task_whose_rewards_all_fail_ends_the_run(tmp_path):
  with pytest.raises(RuntimeError, match="rewards of .* groups in a row failed"):
    runtime.train(tiny_with(Broken, tmp_path, mode="async"))


@pytest.mark.parametrize("mode", ["async", "simulated", "sync"])
def test_the_end_of_the_data_ends_the_run(tmp_path, mode):
  summary = runtime.train(tiny(run_dir=str(tmp_path), mode=mode, steps=100, epochs=1, train_prompts=18, max_lag=1))
  assert summary.ended_early
  assert summary.version == 18 // 4


def test_a_folder_of_another_run_is_left_alone(tmp_path):
  runtime.train(tiny(run_dir=str(tmp_path), steps=1))
  before = (tmp_path / "metrics.jsonl").read_text()
  with pytest.raises(recording.RunFolderError, match="train_prompts: 64 -> 32.*--overwrite"):
    runtime.train(tiny(run_dir=str(tmp_path), steps=1, train_prompts=32))
  assert (tmp_path / "metrics.jsonl").read_text() == before
  assert runtime.train(tiny(run_dir=str(tmp_path), steps=1, train_prompts=32, overwrite=True)).version == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
  runtime.train(tiny(run_dir=str(tmp_path), steps=1))
  wide = dataclasses.replace(tiny().policy.config, d_ff=64)
  with pytest.raises(recording.CheckpointError, match="another model .*d_ff: 32 -> 64"):
    runtime.train(tiny(run_dir=str(tmp_path), steps=2, policy=models.Policy(wide, dtype="float32")))


@pytest.mark.filterwarnings("ignore")  # JAX's compilation cache meets the same limit
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path):
  """The limit on the size of files stands in for a full disk: the same system calls fail."""
  experiment = tiny(run_dir=str(tmp_path), checkpoint_every=2, steps=4)
  runtime.train(experiment)
  size = (tmp_path / "metrics.jsonl").stat().st_size
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
  try:
    with pytest.raises((OSError, recording.CheckpointError), match="(?i)too large|space"):
      runtime.train(with_options(experiment, steps=8))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  summary = runtime.train(with_options(experiment, steps=8))
  assert [r["step"] for r in rows(summary)] == list(range(1, 9))


def test_a_run_resumes_on_other_devices(tmp_path):
  """Half of the devices learn, then all of them, with split parameters: the same updates but for rounding."""
  make = lambda name, **options: tiny(run_dir=str(tmp_path / name), max_lag=0, learning_rate=1e-3, **options)
  _, whole, _ = run(make("whole", steps=4))
  runtime.train(make("moved", steps=2))
  summary, moved, _ = run(make("moved", steps=4, generation_devices=0, fsdp=2))
  assert summary.version == 4
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole.params, moved.params)


@pytest.mark.parametrize("options", [{}, {"reference": True, "generation_devices": 0, "fsdp": 2}], ids=str)
def test_the_step_is_compiled_while_the_first_batch_is_sampled(
  tmp_path, shared_programs, compilations, monkeypatch, options
):
  shared_programs.forget()
  step, new = Learner.step, []

  def watched(self, state, batch):
    before = compilations.count(threading.get_ident())
    result = step(self, state, batch)
    new.append(compilations.count(threading.get_ident()) - before)
    return result

  monkeypatch.setattr(Learner, "step", watched)
  runtime.train(tiny(run_dir=str(tmp_path), mode="async", steps=3, **options))
  assert compilations
  assert new == [0, 0, 0]


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_no_recompilation_after_the_first_steps(tmp_path, shared_programs, compilations, mode):
  """On a mesh for each part and on one for both; simulated runs have the programs of asynchronous ones."""
  shared_programs.forget()
  at = {}

  learn = _session.Session.step

  def watched(self, groups):
    learn(self, groups)
    at[self.version] = len(compilations)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_session.Session, "step", watched)
    runtime.train(tiny(run_dir=str(tmp_path), mode=mode, steps=12, checkpoint_every=5))
  assert at[2] > 0
  assert at[12] == at[2]
