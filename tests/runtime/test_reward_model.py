"""Reward models: what they learn, their scorer, and runs that are rewarded by one."""

import concurrent.futures
import dataclasses
import fcntl
import functools
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from runtime_helpers import first_values
from runtime_helpers import killed_at
from runtime_helpers import stage_inputs

from async_rl import learning
from async_rl import models
from async_rl import recording
from async_rl import runtime
from async_rl import tasks
from async_rl.rollout import _scorer
from async_rl.runtime import _reward_model_stage
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Prompt

pytestmark = pytest.mark.usefixtures("four_devices")


@dataclasses.dataclass(frozen=True)
class Options(tiny.Options):
  """Those of the smallest experiment, and one of its policy."""

  lora_rank: int = 0


def build(options):
  """Key words; a reward model with random values; the distance to the reference in the reward."""
  task = tasks.KeyWords(letters=4, words=4, keys=2, train=2048, test=256)
  config = models.ModelConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, d_ff=64)
  lora = models.LoRA(options.lora_rank) if options.lora_rank else None
  return runtime.Experiment(
    name="words",
    options=options,
    task=task,
    tokenizer=tiny.make_tokenizer(task.corpus),
    policy=models.Policy(config, dtype="float32", lora=lora),
    objective=OBJECTIVE,
    optimizer=make_adam(options.learning_rate),
    scorer=lambda stage: runtime.make_scorer(stage, random_values(stage), rows=4, missing_end=-0.5),
  )


OBJECTIVE = learning.rlhf_objective("online_dpo")
make_adam = functools.cache(optax.adam)  # the same object for the same rate, so that programs are shared


def words(folder="reward_model", **given):
  sizes = dict(max_prompt_tokens=12, max_completion_tokens=12, generation_devices=2, learning_rate=1e-3)
  defaults = runtime.override(Options(), eval_temperature=None, reference=True, **sizes)
  return tiny.tiny(defaults, build, run_dir=str(folder), **given)


def random_values(stage, seed=5):
  model = models.RewardModel.of(dataclasses.replace(stage.learner.policy, mesh=None))
  params = first_values(model, seed)
  kernel = jax.random.normal(jax.random.key(seed), params["value_head"]["kernel"].shape)
  return params | {"value_head": {"kernel": kernel, "bias": jnp.float32(0.5)}}


@pytest.fixture(scope="module")
def stage():
  with stage_inputs(words(rows=16, row_tokens=48)) as stage:
    yield stage


def direct_value(stage, params, prompt, text):
  """One text alone, without padding."""
  tokenizer, policy = stage.encoder.tokenizer, dataclasses.replace(stage.learner.policy, mesh=None)
  tokens = [*tokenizer.encode_prompt(prompt), *tokenizer.encode(text), tokenizer.stop_ids[0]]
  ids = jnp.asarray(tokens)[None]
  hidden = policy.hidden(params, ids, jnp.ones_like(ids), jnp.arange(len(tokens))[None])[0, -1]
  return float(hidden @ params["value_head"]["kernel"] + params["value_head"]["bias"])


def rows(summary):
  return list(recording.read_metrics(summary.folder.metrics))


def test_values_are_those_of_one_text_alone_whatever_stands_beside_it(stage):
  params, rng = random_values(stage), np.random.default_rng(0)
  prompt = Prompt(0, "aBCd:", None)
  texts = ["", "a", "BC", *("".join(rng.choice(list("abcdABCD"), n)) for n in rng.integers(0, 11, 40))]
  found = []
  for order in (np.arange(len(texts)), rng.permutation(len(texts))):
    with runtime.make_scorer(stage, params, rows=4) as scorer:
      futures = {int(i): scorer.submit(prompt, texts[i], STOP) for i in order}
      found.append([futures[i].result().value for i in range(len(texts))])
  assert found[0] == found[1]  # bit for bit
  expected = [direct_value(stage, params, prompt.text, text) for text in texts[:8]]
  np.testing.assert_allclose(found[0][:8], expected, atol=1e-5)
  assert len(set(found[0])) > 10


def test_texts_that_come_one_by_one_are_scored_together(stage, monkeypatch):
  monkeypatch.setattr(_scorer, "_FILL_SECONDS", 60.0)
  batches, prompt = [], Prompt(0, "aBCd:", None)
  with runtime.make_scorer(stage, random_values(stage), rows=4) as scorer:
    values = scorer._values
    monkeypatch.setattr(scorer, "_values", lambda texts, length: batches.append(len(texts)) or values(texts, length))
    futures = []
    for _ in range(4):
      futures.append(scorer.submit(prompt, "BC", STOP))
      time.sleep(0.02)  # time for the thread to take it
    concurrent.futures.wait(futures, timeout=30)
  assert batches == [4]


def test_shapes_are_compiled_once(stage, compilations):
  with runtime.make_scorer(stage, random_values(stage), rows=4) as scorer:
    assert len(scorer.lengths) == 4
    compilations.clear()
    futures = [scorer.submit(Prompt(0, "a" * n + ":", None), "b" * k, STOP) for n in range(1, 10) for k in range(11)]
    assert np.isfinite([f.result().value for f in futures]).all()
  assert not compilations


def test_a_missing_end_long_texts_and_failures(stage):
  prompt = Prompt(3, "aBCd:", None)
  params = random_values(stage)
  with runtime.make_scorer(stage, params, missing_end=-7.0) as scorer:
    assert scorer.submit(prompt, "BC", LENGTH).result() == tasks.RewardResult(-7.0)
    cut = scorer.submit(prompt, "a" * 30, STOP).result()
    assert cut == scorer.submit(prompt, "a" * 11, STOP).result()
    assert scorer.failures == {}
    with pytest.raises(ValueError, match="Prompt 3 has 32 tokens .* takes 12; raise max_prompt_tokens"):
      scorer.submit(Prompt(3, "a" * 30 + ":", None), "a", STOP)
  with pytest.raises(RuntimeError, match="closed"):
    scorer.submit(prompt, "BC", STOP)
  broken = params | {"value_head": params["value_head"] | {"bias": jnp.float32(jnp.nan)}}
  with runtime.make_scorer(stage, broken) as scorer:
    assert scorer.submit(prompt, "BC", STOP).result() == tasks.RewardResult(0.0, True, "non-finite reward nan")
    assert scorer.failures == {"non-finite": 1}
  with pytest.raises(ValueError, match="rows=0"):
    runtime.make_scorer(stage, params, rows=0)


def test_an_error_of_the_model_reaches_everybody_who_waits(stage, monkeypatch):
  prompt = Prompt(0, "aBCd:", None)
  with runtime.make_scorer(stage, random_values(stage), rows=1) as scorer:
    started, go_on = threading.Event(), threading.Event()

    def fails(*_):
      started.set()
      go_on.wait(30)
      raise MemoryError("on the device")

    monkeypatch.setattr(scorer, "_values", fails)
    futures = [scorer.submit(prompt, text, STOP) for text in ("a", "b", "abcdabcdab")]
    assert started.wait(30)
    go_on.set()
    for future in futures:
      with pytest.raises(MemoryError, match="on the device"):
        future.result(timeout=30)
    with pytest.raises(RuntimeError, match="The reward model failed: on the device"):
      scorer.submit(prompt, "a", STOP)


def test_gradient_is_that_of_the_pair_loss(stage):
  """A step of gradient descent against the loss over pairs, each text alone in its row."""
  count = 8
  policy, params = dataclasses.replace(stage.learner.policy, mesh=None), random_values(stage)
  pairs, tokenizer = stage.encoder.task.preferences("train")[:count], stage.encoder.tokenizer
  learner = _reward_model_stage.make_pair_learner(stage.learner, 1.0, count)
  groups = [next(_reward_model_stage.pair_groups(tokenizer, [pair], np.random.default_rng(0))) for pair in pairs]
  shape = dataclasses.replace(learner.shape, rows=4, row_tokens=24)
  sgd = learning.PairLearner(models.RewardModel.of(policy), optax.sgd(1.0), shape, stage.meshes.learner)
  batch = learning.pack(groups, shape)
  assert batch.used > 1
  state, metrics = sgd.step(sgd.init(jax.random.key(0), params), sgd.put(batch))
  found = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, jax.device_get(state.params))

  texts = [[*g.request.tokens, *c.tokens] for g in groups for c in g.completions]
  ids = jnp.asarray([text + [0] * (24 - len(text)) for text in texts])
  last = jnp.asarray([len(text) - 1 for text in texts])

  def loss(params):
    positions = jnp.broadcast_to(jnp.arange(24), ids.shape)
    hidden = policy.hidden(params, ids, jnp.ones_like(ids), positions)
    head = params["value_head"]
    values = hidden[jnp.arange(len(texts)), last] @ head["kernel"] + head["bias"]
    margins = values[::2] - values[1::2]
    return -jnp.mean(jnp.log(jax.nn.sigmoid(margins))), jnp.mean(margins > 0)

  (expected_loss, accuracy), expected = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
  assert float(metrics["loss"]) == pytest.approx(float(expected_loss), rel=1e-5)
  assert float(metrics["accuracy"]) == float(accuracy)
  assert np.abs(expected["value_head"]["kernel"]).max() > 1e-2
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_a_reward_model_learns_the_comparisons_and_is_kept(stage, tmp_path):
  train = runtime.RewardModelStage(60, 5e-3, pairs=32, check_every=60)
  keep = lambda make, options: runtime.KeptStage(make, str(tmp_path / "stage"), options, runtime.abstract_reward_model)
  keep(train, {"steps": 60})(stage)
  never = lambda stage: pytest.fail("they are there")
  restored = keep(never, {"steps": 60})(stage)
  task = stage.encoder.task
  with runtime.make_scorer(stage, restored) as scorer:
    assert runtime.pair_accuracy(scorer, task.preferences("test")) > 0.8
    values = np.array(_reward_model_stage.pair_values(scorer, task.preferences("train")[:256]))
  assert values[:, 0].mean() == pytest.approx(0.0, abs=1e-3)
  assert values.std() == pytest.approx(1.0, abs=1e-3)
  with pytest.raises(recording.CheckpointError, match="steps: 60 -> 61"):
    keep(never, {"steps": 61})(stage)


def test_of_runs_that_begin_together_one_makes_a_kept_stage(stage, tmp_path, capsys, monkeypatch):
  made, other_waits, flock = [], threading.Event(), fcntl.flock

  def watched(file, operation):
    try:
      flock(file, operation)
    except BlockingIOError:
      other_waits.set()
      raise

  def make(run):
    made.append(run)
    assert other_waits.wait(60)
    return run.learner.init(jax.random.key(len(made))).params

  monkeypatch.setattr(fcntl, "flock", watched)
  kept = runtime.KeptStage(make, str(tmp_path / "stages" / "first"), {})
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first, second = pool.map(kept, [stage, stage])
  assert len(made) == 1
  assert "waiting for another run that has " in capsys.readouterr().out
  jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_stage_without_parameters_has_nothing_to_keep(stage, tmp_path):
  with pytest.raises(ValueError, match="no parameters to keep"):
    runtime.KeptStage(lambda stage: None, str(tmp_path / "stage"), {})(stage)


def test_no_steps_and_pairs_that_do_not_fit_are_errors():
  with pytest.raises(ValueError, match="steps=0"):
    runtime.RewardModelStage(steps=0, learning_rate=1e-3)
  with pytest.raises(ValueError, match="learning_rate=nan"):
    runtime.RewardModelStage(steps=1, learning_rate=float("nan"))
  train = runtime.RewardModelStage(steps=1, learning_rate=1e-3)
  with stage_inputs(words(max_completion_tokens=1)) as stage:
    with pytest.raises(ValueError, match="None of 2048 pairs fits .*max_completion_tokens=1"):
      train(stage)


@pytest.mark.slow
def test_a_run_rewarded_by_a_model_is_killed_and_resumed_bit_for_bit(tmp_path):
  make = lambda name: words(
    tmp_path / name, lag="rounds", max_lag=3, checkpoint_every=2, steps=7, eval_prompts=8, eval_every=4
  )
  whole = runtime.train(make("whole"))
  with killed_at(5):
    runtime.train(make("killed"))
  resumed = runtime.train(make("killed"))
  reported = ("reward/mean", "kl/reference", "loss", "eval/proxy", "eval/accuracy", "eval/kl_reference")
  wanted = [{name: row[name] for name in ("step", *reported) if name in row} for row in rows(whole)]
  assert [{name: row[name] for name in ("step", *reported) if name in row} for row in rows(resumed)] == wanted
  steps = [row for row in rows(whole) if "reward/mean" in row]
  assert [row["staleness/max"] for row in steps] == [0, 1, 2, 3, 0, 1, 2]
  assert steps[0]["kl/reference"] == pytest.approx(0.0, abs=1e-4)
  assert abs(steps[-1]["kl/reference"]) > 1e-3
  evaluations = {row["step"]: row for row in rows(whole) if "eval/proxy" in row}
  assert list(evaluations) == [0, 4, 7]
  assert evaluations[0]["eval/kl_reference"] == pytest.approx(0.0, abs=1e-4)
  assert evaluations[7]["eval/kl_reference"] != evaluations[4]["eval/kl_reference"]
  assert len({row["reward/mean"] for row in steps}) > 3
  assert all(row["eval/accuracy"] != row["eval/proxy"] for row in evaluations.values())


@pytest.mark.slow
def test_with_adapters_the_reference_is_kept_as_adapters_and_the_reward_model_has_none(tmp_path):
  make = lambda name, steps: words(tmp_path / name, lora_rank=2, max_lag=0, steps=steps)
  whole = runtime.train(make("whole", 4))
  runtime.train(make("resumed", 2))
  resumed = runtime.train(make("resumed", 4))
  assert [r["kl/reference"] for r in rows(whole)] == [r["kl/reference"] for r in rows(resumed)]
  shutil.rmtree(resumed.folder.reference)
  with pytest.raises(recording.CheckpointError, match="reference policy is missing: restore .*reference, or rerun"):
    runtime.train(make("resumed", 5))
  assert rows(whole)[-1]["kl/reference"] != pytest.approx(0.0, abs=1e-3)
  size = lambda folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
  assert size(whole.folder.reference) < size(whole.folder.path / "base")
  start = lambda stage: stage.learner.init(jax.random.key(0)).params
  with stage_inputs(make("whole", 4)) as stage:
    params = runtime.RewardModelStage(1, 1e-3, start=start, pairs=4, check_pairs=4)(stage)
    assert jax.tree.structure(params) == jax.tree.structure(runtime.abstract_reward_model(stage))
  assert "adapters" not in params


def test_an_asynchronous_run_is_rewarded_by_a_model(tmp_path):
  summary = runtime.train(words(tmp_path, mode="async", max_lag=3, steps=6))
  found = [row for row in rows(summary) if "reward/mean" in row]
  assert [row["step"] for row in found] == list(range(1, 7))
  assert all(row["reward/failures"] == 0 for row in found)
  assert not any(t.name == "reward-model" and t.is_alive() for t in threading.enumerate())
