"""Training of a reward model on preferences (Bradley and Terry): the second stage of RLHF."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import tasks
from async_rl.rollout._prompts import UNTRAINED_TICKETS
from async_rl.rollout._scorer import RewardModelScorer
from async_rl.rollout._scorer import TextLimits
from async_rl.rollout._scorer import encode_text
from async_rl.runtime._fit import adam
from async_rl.runtime._fit import fit
from async_rl.runtime._fit import written
from async_rl.runtime._parts import Parts
from async_rl.types import STOP
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request


def train_reward_model(
  parts: Parts,
  params: models.Params | None,
  *,
  steps: int,
  learning_rate: float,
  pairs: int = 64,
  check_every: int = 50,
  check_pairs: int = 256,
) -> models.Params:
  """Trains a reward model on the task's training preferences.

  The loss is -log sigmoid(value of the chosen - value of the rejected), averaged over pairs. In the end the values are
  shifted and scaled: over training pairs the chosen completions have mean 0, and all have standard deviation 1.

  Args:
    parts: of the run; the task must be a `tasks.PreferenceTask`. Pairs that exceed the run's limits are left out.
    params: of the policy to start from, usually the supervised one; `None`: random ones.
    steps: optimizer steps, at least 1.
    learning_rate: of Adam, reached after 20 steps.
    pairs: in a batch.
    check_every: steps between looks at the accuracy on held-out pairs.
    check_pairs: held-out pairs of a look.

  Returns:
    Parameters of `models.RewardModel.of(parts.policy)`, on the learner mesh.

  Raises:
    ValueError: if no pair fits.
  """
  task, seed = cast(tasks.PreferenceTask, parts.task), parts.experiment.seed
  model = models.RewardModel.of(dataclasses.replace(parts.policy, mesh=parts.meshes.learner))
  train, test = (_fitting(parts, task.preferences(split)) for split in ("train", "test"))
  test = test[:check_pairs]
  if params is not None:
    params = model.with_head(params if parts.policy.lora is None else models.merge_adapters(parts.policy.lora, params))
  learner, data = _make_learner(parts, model, learning_rate, pairs), _batches(parts, train, np.random.default_rng(seed))
  for step, state, _ in fit(learner, params, data, pairs, steps, seed):
    if step % check_every == 0 or step == steps:
      with make_scorer(parts, state.params) as scorer:
        right = pair_accuracy(scorer, test)
      print(f"reward model step {step}: held-out accuracy {right:.3f}", flush=True)
  with make_scorer(parts, state.params) as scorer:
    values = np.array(_values(scorer, train[:check_pairs]))
  shift, scale = np.float32(values[:, 0].mean()), np.float32(1 / max(values.std(), 1e-6))
  head = state.params["value_head"]
  scaled = {"kernel": head["kernel"] * scale, "bias": (head["bias"] - shift) * scale}
  return state.params | {"value_head": scaled}


def abstract_reward_model(parts: Parts) -> models.Params:
  """Shapes and shardings of what `train_reward_model` returns."""
  shapes = models.RewardModel.of(parts.policy).abstract()
  shardings = models.param_shardings(shapes, parts.meshes.learner)
  return jax.tree.map(lambda s, d: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=d), shapes, shardings)


def make_scorer(parts: Parts, params: models.Params, **options) -> RewardModelScorer:
  """A scorer for reward-model parameters within the limits of a run, on its first device that samples.

  Args:
    parts: of the run.
    params: from `train_reward_model`.
    options: of `RewardModelScorer`.
  """
  e = parts.experiment
  limits = TextLimits(e.max_prompt_tokens, e.max_completion_tokens)
  device = parts.meshes.generation.devices.flat[0]
  model = models.RewardModel.of(parts.policy)
  return RewardModelScorer(model, params, parts.tokenizer, limits, device=device, **options)


def pair_accuracy(scorer: tasks.Scorer, pairs: Sequence[tasks.Preference]) -> float:
  """Share of the pairs whose chosen completion scores higher."""
  return float(np.mean([chosen > rejected for chosen, rejected in _values(scorer, pairs)]))


def _values(scorer: tasks.Scorer, pairs: Sequence[tasks.Preference]) -> list[tuple[float, float]]:
  submit = lambda pair, text: scorer.submit(Prompt(0, pair.prompt, None), text, STOP)
  futures = [(submit(pair, pair.chosen), submit(pair, pair.rejected)) for pair in pairs]
  return [(chosen.result().value, rejected.result().value) for chosen, rejected in futures]


def _make_learner(parts: Parts, model: models.RewardModel, learning_rate: float, pairs: int) -> learning.Learner:
  """The values of the last tokens stand in the place of log-probabilities.

  The gradient of the pair loss is a coefficient of each completion, known once all are valued, times the gradient of
  its value; so the two may lie in different micro-batches.
  """

  def score(params, *rows):
    values = model.values(params, *rows)
    return models.TokenStats(values, jnp.zeros_like(values), jnp.zeros_like(values))

  def advantages(rewards, groups, num_groups, *, proximal, mask):
    zeros = jnp.zeros_like(proximal)
    return losses.preference_advantages(
      rewards, groups, num_groups, logprobs=proximal, reference=zeros, mask=mask, beta=1.0
    )

  return learning.Learner(
    model,
    adam(learning_rate),
    learning.Objective(losses.reinforce, advantages, learning.AGGREGATIONS["sum"]),
    dataclasses.replace(parts.experiment.batch_shape(), sequences=2 * pairs),
    parts.meshes.learner,
    max_lag=0,
    score=score,
  )


def _fitting(parts: Parts, pairs: Sequence[tasks.Preference]) -> list[tasks.Preference]:
  """Those within the run's limits."""
  e = parts.experiment

  def fits(pair):
    encoded = [encode_text(parts.tokenizer, pair.prompt, text) for text in (pair.chosen, pair.rejected)]
    return all(len(p) <= e.max_prompt_tokens and len(c) <= e.max_completion_tokens for p, c in encoded)

  fitting = [pair for pair in pairs if fits(pair)]
  if not fitting:
    raise ValueError(
      f"None of {len(pairs)} pairs fits max_prompt_tokens={e.max_prompt_tokens} and "
      f"max_completion_tokens={e.max_completion_tokens}; raise them."
    )
  return fitting


def _batches(parts: Parts, pairs: Sequence[tasks.Preference], rng: np.random.Generator) -> Iterator[Group]:
  """Yields random pairs as groups of two, without end."""
  while True:
    pair = pairs[int(rng.integers(len(pairs)))]
    encoded = [encode_text(parts.tokenizer, pair.prompt, text) for text in (pair.chosen, pair.rejected)]
    request = Request(UNTRAINED_TICKETS, np.asarray(encoded[0][0], np.int32), Prompt(0, "", None))
    last = lambda tokens: [False] * (len(tokens) - 1) + [True]
    completions = tuple(written(tokens, last(tokens), k) for k, (_, tokens) in enumerate(encoded))
    yield Group(request, completions, np.array([1.0, 0.0], np.float32))
