"""Training of a reward model on preferences (Bradley and Terry): the second stage of RLHF."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence
from typing import cast

import numpy as np

from async_rl import learning
from async_rl import models
from async_rl import tasks
from async_rl._validation import check_number
from async_rl.rollout._prompts import UNTRAINED_TICKETS
from async_rl.rollout._scorer import RewardModelScorer
from async_rl.rollout._scorer import TextLimits
from async_rl.rollout._scorer import encode_text
from async_rl.runtime._labeled_training import make_adam
from async_rl.runtime._labeled_training import make_completion
from async_rl.runtime._labeled_training import train_on_groups
from async_rl.runtime._local_sampler import copy_to_one_device
from async_rl.runtime._stages import Stage
from async_rl.runtime._stages import StageInputs
from async_rl.types import STOP
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request


@dataclasses.dataclass(frozen=True)
class RewardModelStage:
  """Trains a reward model on the task's training preferences; the task must be a `tasks.PreferenceTask`.

  The loss is -log sigmoid(value of the chosen - value of the rejected), averaged over pairs. In the end the values are
  shifted and scaled: over training pairs the chosen completions have mean 0, and all have standard deviation 1. Pairs
  that exceed the run's limits are skipped.

  Attributes:
    steps: the number of optimizer steps.
    learning_rate: the learning rate of Adam, reached after 20 steps.
    start: the stage that makes the policy to start from, usually the supervised one; `None` starts from random
      parameters.
    pairs: the number of pairs in a batch.
    check_every: the number of steps between checks of the accuracy on held-out pairs.
    check_pairs: the number of held-out pairs of a check.
  """

  steps: int
  learning_rate: float
  start: Stage | None = None
  pairs: int = 64
  check_every: int = 50
  check_pairs: int = 256

  def __post_init__(self):
    for name in ("steps", "pairs", "check_every", "check_pairs"):
      check_number(name, getattr(self, name), whole=True, at_least=1)
    check_number("learning_rate", self.learning_rate, above=0)

  def __call__(self, run: StageInputs) -> models.Params:
    """Returns parameters of the reward model of the run's policy, on the learner mesh.

    Raises:
      ValueError: if no pair fits the run's limits.
    """
    task = cast(tasks.PreferenceTask, run.encoder.task)
    train = _select_fitting(run, task.preferences("train"))
    held_out = _select_fitting(run, task.preferences("test"))[: self.check_pairs]
    learner = make_pair_learner(run.learner, self.learning_rate, self.pairs)
    data = pair_groups(run.encoder.tokenizer, train, np.random.default_rng(run.seed))
    for step, state, _ in train_on_groups(learner, self._first(run), data, self.pairs, self.steps, run.seed):
      if step % self.check_every == 0 or step == self.steps:
        with make_scorer(run, state.params) as scorer:
          accuracy = pair_accuracy(scorer, held_out)
        print(f"reward model step {step}: held-out accuracy {accuracy:.3f}", flush=True)
    with make_scorer(run, state.params) as scorer:
      values = np.array(pair_values(scorer, train[: self.check_pairs]))
    shared = np.frombuffer(run.hosts.gather(values.tobytes())[0])  # the same bits in every process
    return _normalize(state.params, shared.reshape(values.shape))

  def _first(self, run: StageInputs) -> models.Params | None:
    """Returns the first parameters: the policy's, adapters merged, with a new head."""
    params = self.start(run) if self.start is not None else None
    if params is None:
      return None
    policy = run.learner.policy
    merged = params if policy.lora is None else models.merge_adapters(policy.lora, params)
    return models.RewardModel.of(policy).with_head(merged)


def abstract_reward_model(run: StageInputs) -> models.Params:
  """Returns the shapes and shardings of what `RewardModelStage` makes."""
  shapes = models.RewardModel.of(run.learner.policy).abstract()
  return models.with_shardings(shapes, models.param_shardings(shapes, run.learner.mesh))


def make_scorer(run: StageInputs, params: models.Params, **options) -> RewardModelScorer:
  """Makes a scorer of reward-model parameters within the limits of a run, on its first device that samples.

  Args:
    run: the objects of the run.
    params: the parameters that `RewardModelStage` made.
    **options: options of `RewardModelScorer`.
  """
  limits = TextLimits(run.encoder.max_prompt_tokens, run.learner.shape.completion_tokens)
  model = models.RewardModel.of(dataclasses.replace(run.learner.policy, mesh=None))
  device = run.meshes.generation.devices.flat[0]
  if run.learner.mesh.is_multi_process:
    params = copy_to_one_device(params, run.learner.mesh)
  return RewardModelScorer(model, params, run.encoder.tokenizer, limits, device=device, **options)


def pair_accuracy(scorer: tasks.Scorer, pairs: Sequence[tasks.Preference]) -> float:
  """Returns the share of pairs whose chosen completion scores higher."""
  return float(np.mean([chosen > rejected for chosen, rejected in pair_values(scorer, pairs)]))


def pair_values(scorer: tasks.Scorer, pairs: Sequence[tasks.Preference]) -> list[tuple[float, float]]:
  """Returns the scores of the chosen and the rejected completion of each pair."""

  def submit(pair, text):
    return scorer.submit(Prompt(0, pair.prompt, None), text, STOP)

  futures = [(submit(pair, pair.chosen), submit(pair, pair.rejected)) for pair in pairs]
  return [(chosen.result().value, rejected.result().value) for chosen, rejected in futures]


def make_pair_learner(learner: learning.Learner, learning_rate: float, pairs: int) -> learning.PairLearner:
  """Makes a learner of the pair loss, with a reward model of the policy and on the mesh of `learner`."""
  shape = dataclasses.replace(learner.shape, sequences=2 * pairs)
  return learning.PairLearner(models.RewardModel.of(learner.policy), make_adam(learning_rate), shape, learner.mesh)


def pair_groups(
  tokenizer: models.Tokenizer, pairs: Sequence[tasks.Preference], rng: np.random.Generator
) -> Iterator[Group]:
  """Yields random pairs as groups of two, without end; the last token of each completion is to be trained."""
  while True:
    pair = pairs[int(rng.integers(len(pairs)))]
    encoded = [encode_text(tokenizer, pair.prompt, text) for text in (pair.chosen, pair.rejected)]
    request = Request(UNTRAINED_TICKETS, np.asarray(encoded[0][0], np.int32), Prompt(0, "", None))
    completions = tuple(
      make_completion(tokens, [False] * (len(tokens) - 1) + [True], sample)
      for sample, (_, tokens) in enumerate(encoded)
    )
    yield Group(request, completions, np.array([1.0, 0.0], np.float32))


def _select_fitting(run: StageInputs, pairs: Sequence[tasks.Preference]) -> list[tasks.Preference]:
  """Returns the pairs within the run's limits."""
  max_prompt, max_completion = run.encoder.max_prompt_tokens, run.learner.shape.completion_tokens

  def fits(pair):
    encoded = [encode_text(run.encoder.tokenizer, pair.prompt, text) for text in (pair.chosen, pair.rejected)]
    return all(len(prompt) <= max_prompt and len(tokens) <= max_completion for prompt, tokens in encoded)

  fitting = [pair for pair in pairs if fits(pair)]
  if not fitting:
    raise ValueError(
      f"None of {len(pairs)} pairs fits max_prompt_tokens={max_prompt} and max_completion_tokens={max_completion}; "
      "raise them."
    )
  return fitting


def _normalize(params: models.Params, values: np.ndarray) -> models.Params:
  """Shifts and scales the head by its values of pairs, [N, 2], chosen first."""
  shift, scale = np.float32(values[:, 0].mean()), np.float32(1 / max(values.std(), 1e-6))
  head = params["value_head"]
  return params | {"value_head": {"kernel": head["kernel"] * scale, "bias": (head["bias"] - shift) * scale}}
