"""Evaluation of a run's versions on its held-out prompts."""

from __future__ import annotations

import functools

from async_rl import models
from async_rl import tasks
from async_rl.runtime._evaluation import evaluate
from async_rl.runtime._evaluation import measure_distance
from async_rl.runtime._experiment import Experiment
from async_rl.runtime._local_sampler import LocalSampler
from async_rl.runtime._stages import StageInputs


class HeldOutEvaluator:
  """Measures parameters of the policy on the run's held-out prompts, with a sampler on the learner's devices.

  Args:
    experiment: the experiment.
    inputs: the objects of the run.
    scorer: the scorer of training samples that replaces the task's reward, such as a reward model; `None` for none.

  Attributes:
    has_prompts: whether there is anything to measure.
  """

  def __init__(self, experiment: Experiment, inputs: StageInputs, scorer: tasks.Scorer | None):
    self.has_prompts = bool(inputs.held_out)
    self._experiment = experiment
    self._inputs = inputs
    self._scorer = scorer

  def measure(self, params: models.Params, version: int) -> dict[str, float]:
    """Returns the metrics of `evaluate`, and `kl_reference` if the run has a reference and samples as it trains.

    All processes must call it together.

    Args:
      params: the parameters of the policy, on the learner mesh.
      version: the number of optimizer steps that made them.

    Raises:
      StopRequested: if a signal asked the run to end.
    """
    experiment, inputs = self._experiment, self._inputs
    self._sampler.set_weights(params, version)
    metrics, groups = evaluate(
      self._sampler.sampler,
      inputs.encoder,
      inputs.held_out,
      inputs.rewards,
      proxy=self._scorer,
      between_chunks=inputs.hosts.stop.check,
      hosts=inputs.hosts,
    )
    # Samples at another temperature, such as greedy ones, say nothing about the distance to the reference.
    same_temperature = experiment.evaluation_config.temperature == experiment.options.rollout.temperature
    if experiment.keeps_reference and same_temperature:
      metrics["kl_reference"] = measure_distance(inputs.learner, params, groups)
    return metrics

  @functools.cached_property
  def _sampler(self) -> LocalSampler:
    return LocalSampler(self._experiment.make_evaluator(self._inputs.meshes.learner), self._inputs.learner)
