"""Supervised training on a task's solutions: the start of a run whose policy could not yet learn from rewards."""

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
from async_rl.rollout._prompts import PromptEncoder
from async_rl.runtime._evaluation import evaluate
from async_rl.runtime._labeled_training import make_adam
from async_rl.runtime._labeled_training import make_completion
from async_rl.runtime._labeled_training import train_on_groups
from async_rl.runtime._local_sampler import LocalSampler
from async_rl.runtime._stages import Stage
from async_rl.runtime._stages import StageInputs
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt

_CHECK_PROMPTS = 32  # held-out prompts of a check
_MAX_TOO_LONG = 1000  # consecutive solutions that are skipped before it is an error


@dataclasses.dataclass(frozen=True)
class SupervisedStage:
  """Supervised training on `task.solution`s of random training prompts; the task must be a `tasks.SupervisedTask`.

  A warm start of a random policy should stop at an `accuracy` and not after a number of steps, because policies leave
  the phase in which they find out how a task works at very different times. Solutions that exceed the run's limits are
  skipped.

  Attributes:
    steps: the number of optimizer steps; with `accuracy`, the maximum. 0 returns what `start` returns.
    learning_rate: the learning rate of Adam, reached after 20 steps.
    start: the stage that makes the first parameters; `None` starts from random ones.
    accuracy: the mean reward at which to stop, of completions of held-out prompts sampled at the run's temperature.
    sequences: the number of solutions in a batch.
    check_every: the number of steps between checks of the accuracy.
  """

  steps: int
  learning_rate: float
  start: Stage | None = None
  accuracy: float | None = None
  sequences: int = 64
  check_every: int = 50

  def __post_init__(self):
    check_number("steps", self.steps, whole=True, at_least=0)
    check_number("learning_rate", self.learning_rate, above=0)
    check_number("sequences", self.sequences, whole=True, at_least=1)
    check_number("check_every", self.check_every, whole=True, at_least=1)
    if self.accuracy is not None:
      check_number("accuracy", self.accuracy)

  def __call__(self, run: StageInputs) -> models.Params | None:
    """Returns the trained parameters, on the learner mesh.

    Raises:
      RuntimeError: if `accuracy` is not reached in `steps`.
    """
    params = self.start(run) if self.start is not None else None
    if not self.steps:
      return params
    learner = make_likelihood_learner(run.learner, self.learning_rate, self.sequences)
    solutions = sample_solutions(run, np.random.default_rng(run.seed))
    sampler, reached = LocalSampler(run.sampler, run.learner), 0.0
    for step, state, metrics in train_on_groups(learner, params, solutions, self.sequences, self.steps, run.seed):
      if step % self.check_every == 0 or step == self.steps:
        reached = _measure_accuracy(run, sampler, state.params)
        loss = float(metrics["loss"])
        print(f"supervised step {step}: loss {loss:.3f}, accuracy of samples {reached:.2f}", flush=True)
        if self.accuracy is not None and reached >= self.accuracy:
          return state.params
    if self.accuracy is None:
      return state.params
    raise RuntimeError(
      f"Supervised training reached accuracy {reached:.2f} in {self.steps} steps, {self.accuracy} was asked for; "
      "give it more steps, another learning rate or a larger policy."
    )


def make_likelihood_learner(learner: learning.Learner, learning_rate: float, sequences: int) -> learning.Learner:
  """Makes a maximum-likelihood learner of the policy and on the mesh of `learner`."""
  shape = dataclasses.replace(learner.shape, sequences=sequences)
  objective = learning.likelihood_objective()
  return learning.Learner(learner.policy, make_adam(learning_rate), objective, shape, learner.mesh, max_lag=0)


def _measure_accuracy(run: StageInputs, sampler: LocalSampler, params: models.Params) -> float:
  """Returns the mean reward of samples at the run's temperature."""
  prompts = run.held_out[:_CHECK_PROMPTS] or run.usable_prompts[:_CHECK_PROMPTS]
  sampler.set_weights(params, 0)
  metrics, _ = evaluate(sampler.sampler, run.encoder, prompts, run.rewards, run.samples, hosts=run.hosts)
  return metrics["accuracy"]


def sample_solutions(run: StageInputs, rng: np.random.Generator) -> Iterator[Group]:
  """Yields random training prompts with correct completions, as groups of one, without end.

  Raises:
    ValueError: if too many solutions in a row are too long.
  """
  task = cast(tasks.SupervisedTask, run.encoder.task)
  limit, too_long = run.learner.shape.completion_tokens, 0
  while too_long < _MAX_TOO_LONG:
    prompt = run.usable_prompts[int(rng.integers(len(run.usable_prompts)))]
    completion = _encode_solution(run.encoder, prompt, task.solution(prompt, rng))
    too_long = too_long + 1 if len(completion.tokens) > limit else 0
    if not too_long:
      yield Group(run.encoder.encode(UNTRAINED_TICKETS, prompt), (completion,), np.ones(1, np.float32))
  raise ValueError(
    f"{too_long} solutions in a row are longer than max_completion_tokens={limit}, the last one has "
    f"{len(completion.tokens)} tokens; raise max_completion_tokens."
  )


def _encode_solution(encoder: PromptEncoder, prompt: Prompt, solution: str | Sequence[str]) -> Completion:
  """Encodes a solution, to be trained on except for the turns of a tool."""
  tokens: list[int] = []
  mask: list[bool] = []
  for i, text in enumerate([solution] if isinstance(solution, str) else solution):
    by_model = i % 2 == 0
    if by_model:
      tokens += [*encoder.tokenizer.encode(text), encoder.tokenizer.stop_ids[0]]
    else:
      tokens += encoder.encode_answer(prompt, text)
    mask += [by_model] * (len(tokens) - len(mask))
  return make_completion(tokens, mask)
