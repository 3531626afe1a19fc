"""Runs of a task with a tool: whole ones, repeated ones, and ones whose tool misbehaves."""

import dataclasses
import itertools
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
import runtime_helpers
from runtime_helpers import assert_identical
from runtime_helpers import killed_at
from talking import Talking
from tiny import sums
from tiny import tiny

from async_rl import learning
from async_rl import models
from async_rl import recording
from async_rl import rollout
from async_rl import runtime
from async_rl import sampling
from async_rl import tasks
from async_rl.runtime import _supervised
from async_rl.types import FAILED
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Group
from async_rl.types import Prompt
from experiments import evaluate

pytestmark = pytest.mark.usefixtures("two_devices")


def talk(folder, misbehaves=(), **options):
  """Conversations of up to three turns; a random policy ends most of its turns early."""
  experiment = tiny(run_dir=str(folder), max_completion_tokens=28, max_turns=3, **options)
  return dataclasses.replace(experiment, task=sums(experiment.options, Talking, **dict(misbehaves)))


def run(experiment):
  """Metrics of the steps, final state and the host's."""
  summary = runtime.train(experiment)
  return runtime_helpers.rows(summary), *runtime_helpers.params_of(summary, experiment)


class Parts(NamedTuple):
  """What the tests of conversations share."""

  task: Talking
  tokenizer: models.Tokenizer
  encoder: rollout.PromptEncoder
  prompts: rollout.PromptStream
  learner: learning.Learner
  sampler: sampling.Sampler


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
  """Parts with a sampler of random weights; every test leaves it idle."""
  experiment = talk(tmp_path_factory.mktemp("tools") / "run")
  with runtime_helpers.stage_inputs(experiment) as stage:
    stage.sampler.set_weights(stage.learner.init(jax.random.key(0)).params, 0)
    prompts = rollout.PromptStream(stage.encoder, stage.prompts, seed=0)
    return Parts(experiment.task, experiment.tokenizer, stage.encoder, prompts, stage.learner, stage.sampler)


def complete(parts, count=8, **options):
  """Groups of two samples, with a tool in this process."""
  with tasks.RewardPool(dataclasses.replace(parts.task, **options), workers=0, failure_value=-1.0) as pool:
    return runtime.complete(parts.sampler, parts.encoder, [parts.prompts.request(t) for t in range(count)], 2, pool)


@pytest.mark.slow
def test_simulated_at_lag_zero_is_sync_bit_for_bit(tmp_path):
  shared = dict(generation_devices=0, max_lag=0, steps=4, eval_prompts=4)
  experiment = talk(tmp_path / "simulated", reward_workers=1, **shared)
  rows, simulated, host = run(experiment)
  assert_identical(simulated, run(talk(tmp_path / "sync", mode="sync", **shared))[1])
  assert host["ledger"]["ended"]["trained"] == host["ledger"]["generated"] > 0
  assert host["ledger"]["generated"] == sum(r["tokens/trained"] for r in rows)
  assert all(r["logprob_difference/lag_zero"] < 1e-5 for r in rows)
  assert all(1 < r["tools/turns"] < 3 for r in rows)
  assert all(r["tools/calls"] == 8 * (r["tools/turns"] - 1) for r in rows)
  assert rows[-1]["tools/failures"] == 0
  last = list(recording.read_metrics(tmp_path / "simulated" / "metrics.jsonl"))[-1]
  rewards, _ = evaluate.score(experiment, simulated.params, experiment.task.prompts("test")[:4], 1, temperature=0.0)
  np.testing.assert_allclose(rewards.mean(), last["eval/accuracy"], rtol=1e-6)


def test_killed_and_resumed_is_as_if_nothing_had_happened(tmp_path):
  make = lambda name: talk(tmp_path / name, lag="heavy", max_lag=3, checkpoint_every=2)
  rows, whole, host = run(make("whole"))
  with killed_at(5):
    runtime.train(make("killed"))
  resumed_rows, resumed, resumed_host = run(make("killed"))
  assert_identical(whole, resumed)
  assert resumed_host["ledger"] == host["ledger"]
  assert [r["tools/turns"] for r in resumed_rows] == [r["tools/turns"] for r in rows]


def test_async_bounds_the_lag_balances_and_can_be_replayed(tmp_path):
  options = dict(steps=8, max_lag=2, decode_chunk=2)
  rows, state, host = run(talk(tmp_path / "async", mode="async", reward_workers=1, **options))
  assert max(r["staleness/max"] for r in rows) <= 2
  assert host["ledger"]["ended"]["trained"] == sum(r["tokens/trained"] for r in rows)
  schedule = str(tmp_path / "async" / "schedule.jsonl")
  assert sum(event[0] == "answer" for event in rollout.read_schedule(schedule)) > 8
  _, replayed, _ = run(talk(tmp_path / "replay", lag=schedule, **options))
  assert_identical(state.params, replayed.params)


@pytest.fixture
def recorder(tmp_path):
  recorder = rollout.ScheduleRecorder(tmp_path / "schedule.jsonl")
  yield recorder
  recorder.close()


def actor_of(parts, pool, recorder):
  buffer = rollout.RolloutBuffer(4, max_lag=2)
  conversations = rollout.Conversations(parts.sampler, parts.encoder, pool, samples=2)
  return rollout.Actor(parts.sampler, conversations, parts.prompts, buffer, rollout.Ledger(), recorder), buffer


def test_a_checkpoint_holds_samples_that_wait_for_their_tool(parts, recorder):
  slow = dataclasses.replace(parts.task, slow=tuple(range(8)))
  with tasks.RewardPool(slow, workers=2) as pool, tasks.RewardPool(parts.task, workers=0) as quick:
    (actor, buffer), before = actor_of(parts, pool, recorder), parts.sampler.counters.tokens
    for _ in range(4):
      actor.submit(buffer.try_submit(0))
    asked = lambda: [answer for group in actor.conversations._open.values() for answer in group.answers.values()]
    for _ in range(2):  # twice, so that the task will want to see the texts before
      while not asked():
        actor.decode_chunk()
      actor.resume_answered(wait=True)
    while not asked():
      actor.decode_chunk()
    state, groups, held = actor.state(), buffer.state(), actor.held_tokens()
    assert held + sum(map(rollout.drawn_tokens, buffer.groups())) == parts.sampler.counters.tokens - before
    assert not any(answer.done() for answer in asked())
    with pytest.raises(ValueError, match="Sample 5 of group 0 has not called the tool"):
      actor.resume_answered(only=(0, 5))
    assert state["turns"]
    assert len(state["finished"]["ticket"])
    assert len(state["unfinished"]["tickets"])
    actor.finish_groups()
    expected = buffer.groups()
    other, restored = actor_of(parts, quick, recorder)
    restored.restore(groups, parts.prompts.prompts, state["tickets"].tolist())
    other.restore(state)
    assert other.held_tokens() == held
    other.finish_groups()
  assert len(expected) == 4
  for a, b in zip(expected, restored.groups(), strict=True):
    # The caches of the restored samples were filled by a program of another shape, which rounds in its own way.
    for x, y in zip(a.completions, b.completions, strict=True):
      np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=1e-5)
      assert_identical(x._replace(logprobs=0), y._replace(logprobs=0))
    np.testing.assert_array_equal(a.rewards, b.rewards)


def test_others_go_on_while_a_tool_hangs(parts, recorder):
  kinds = [parts.prompts.request(ticket).prompt.id % 8 for ticket in range(8)]
  hanging = dataclasses.replace(parts.task, hangs=(kinds[0],))
  with tasks.RewardPool(hanging, workers=2 + kinds.count(kinds[0]), timeout_s=300) as pool:
    actor, buffer = actor_of(parts, pool, recorder)
    for _ in range(8):
      actor.submit(buffer.try_submit(0))
    deadline = time.monotonic() + 60
    while buffer.count_groups()["complete"] < 8 - kinds.count(kinds[0]) and time.monotonic() < deadline:
      actor.resume_answered()
      if not actor.decode_chunk():
        time.sleep(0.01)
    assert buffer.count_groups()["complete"] >= 8 - kinds.count(kinds[0])
    assert 0 not in {g.request.ticket for g in buffer.groups()}
    assert parts.sampler.idle


@pytest.mark.parametrize("mode", ["async", "simulated"])
def test_a_tool_that_hangs_or_raises_does_not_stop_the_run(tmp_path, mode):
  options = dict(reward_workers=2, reward_timeout=0.3, steps=4)
  rows, _, host = run(talk(tmp_path, dict(hangs=(0,), raises=(1, 2, 3)), mode=mode, **options))
  assert len(rows) == 4
  assert rows[-1]["tools/failures"] > 0
  ended = host["ledger"]["ended"]
  assert ended["trained"] == sum(r["tokens/trained"] for r in rows)
  assert host["ledger"]["generated"] == sum(ended.values()) + sum(
    int(np.count_nonzero(part["mask"])) for part in (host["actor"]["finished"], host["buffer"]["groups"]["completions"])
  ) + int(np.count_nonzero(host["actor"]["unfinished"]["versions"] >= 0))


def test_a_failed_call_ends_its_sample_with_a_stand_in(parts):
  groups = complete(parts, raises=tuple(range(8)))
  pairs = [(c, r) for g in groups for c, r in zip(g.completions, g.results, strict=True)]
  assert {c.finish for c, _ in pairs} == {FAILED, LENGTH}
  for completion, result in pairs:
    assert completion.mask.all()
    assert result.failed == (completion.finish == FAILED)
    if result.failed:
      assert result == tasks.RewardResult(-1.0, True, "tool call raised ZeroDivisionError: by zero")


def turns_of(parts, completion):
  return 1 + int((completion.mask & (completion.tokens == parts.tokenizer.stop_ids[0]))[:-1].sum())


@pytest.mark.parametrize("most", [1, 2, 3])
def test_turns_are_bounded(parts, most):
  parts = parts._replace(encoder=dataclasses.replace(parts.encoder, max_turns=most))
  completions = [c for g in complete(parts) for c in g.completions]
  assert max(turns_of(parts, c) for c in completions) == most
  assert {c.finish for c in completions} == {STOP, LENGTH}
  assert all(c.mask.all() for c in completions) == (most == 1)


def test_an_answer_that_does_not_fit_ends_the_sample(parts):
  completions = [c for g in complete(parts, says="7" * 27) for c in g.completions]
  assert {c.finish for c in completions} == {LENGTH}
  assert all(c.mask.all() for c in completions)
  assert min(len(c.tokens) for c in completions) < 28


def test_the_reward_is_of_the_last_turn(parts):
  for group in complete(parts):
    for completion, result in zip(group.completions, group.results, strict=True):
      last = max([-1, *np.flatnonzero(~completion.mask)]) + 1
      text = parts.tokenizer.decode(completion.tokens[last:].tolist())
      assert result.value == parts.task.reward(group.request.prompt, text, completion.finish)


def test_what_is_recorded_beside_a_tools_tokens_changes_no_update(parts):
  groups = [Group(g.request, g.completions, np.array([r.value for r in g.results])) for g in complete(parts, 4)]
  assert any(not c.mask.all() for g in groups for c in g.completions)

  def step(change):
    changed = [g._replace(completions=tuple(map(change, g.completions))) for g in groups]
    state = parts.learner.init(jax.random.key(1))
    return jax.device_get(parts.learner.step(state, parts.learner.put(learning.pack(changed, parts.learner.shape))))

  def beside(c):
    return c._replace(logprobs=np.where(c.mask, c.logprobs, -3.0), versions=np.where(c.mask, c.versions, 7))

  state, metrics = step(lambda c: c)
  assert_identical((state, metrics), step(beside))
  assert metrics["tokens/trained"] == sum(c.mask.sum() for g in groups for c in g.completions)
  drawn, _ = step(lambda c: c._replace(logprobs=c.logprobs - 0.5 * c.mask))
  with pytest.raises(AssertionError):
    assert_identical(state.params, drawn.params)


def test_supervised_solutions_mask_the_tools_turns(parts, tmp_path):
  with runtime_helpers.stage_inputs(talk(tmp_path)) as stage:
    solutions = list(itertools.islice(_supervised.sample_solutions(stage, np.random.default_rng(0)), 5))
  for group in solutions:
    (c,) = group.completions
    assert turns_of(parts, c) == 2
    drawn, answer = (parts.tokenizer.decode(c.tokens[mask].tolist()) for mask in (c.mask, ~c.mask))
    assert answer == "3="
    assert tasks.Sums.reward(parts.task, group.request.prompt, drawn, STOP) == 1.0
    assert c.tokens[3] == c.tokens[-1] == parts.tokenizer.stop_ids[0]


def test_a_chat_template_without_tools_names_the_option(parts):
  refuses = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
  source = refuses + "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
  model = models.train_sentencepiece([parts.task.corpus])
  encoder = dataclasses.replace(parts.encoder, tokenizer=models.SentencePieceTokenizer(model, chat_template=source))
  chat = Prompt(0, [{"role": "user", "content": "1"}], None)
  with pytest.raises(ValueError, match="tool_role='tool', try another: .*no tools"):
    encoder.encode_answer(chat, "12")
  assert dataclasses.replace(encoder, tool_role="user").encode_answer(chat, "12") == parts.tokenizer.encode("12")
