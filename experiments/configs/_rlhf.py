"""What the experiments with Asynchronous RLHF share: three stages, and the method by name."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl.runtime import Experiment
from async_rl.runtime import Parts
from async_rl.runtime import abstract_reward_model
from async_rl.runtime import make_scorer
from async_rl.runtime import restore_or_make
from async_rl.runtime import train_reward_model
from async_rl.runtime import train_supervised

#: The options that each stage depends on, beside model and task; those that a config lacks do not count.
_SUPERVISED = ("weights", "supervised_steps", "supervised_rate")
_REWARD_MODEL = (*_SUPERVISED, "reward_model_steps", "reward_model_rate")


@dataclasses.dataclass(frozen=True)
class RLHFExperiment(Experiment):
  """Supervised fine-tuning, then a reward model, then reinforcement learning against it.

  The first two stages are made once and kept in `stages`; every later run with the same options takes them from there.
  Held-out prompts are sampled, not answered greedily, so that the distance to the reference policy can be measured.
  """

  samples: int = 2
  reference: bool = True

  #: online_dpo, ipo, rloo, proximal_rloo or best_of_n.
  method: learning.Method = "online_dpo"
  #: Of online_dpo and ipo: scale of the implicit reward.
  beta: float = 0.1
  #: Of rloo and proximal_rloo: weight of the KL to the reference policy.
  kl_coefficient: float = 0.05
  #: Of rloo and proximal_rloo: the KL is in the reward, with the sampler's log-probabilities or with current ones
  #: (reward, reward_current), or a term of the loss.
  kl: learning.KL = "reward"
  #: Reward of a summary that did not end; the reward model's own have mean 0 on preferred ones and deviation 1.
  missing_end: float = -3.0
  #: Folder of the first two stages.
  stages: str = "runs/stages"
  #: Supervised steps on the task's summaries, 64 each; 0: none, as for weights that can summarize already.
  supervised_steps: int = 500
  #: Their learning rate.
  supervised_rate: float = 3e-3
  #: Steps of the reward model, 64 pairs each; 0: the task's own reward is trained on.
  reward_model_steps: int = 500
  #: Its learning rate.
  reward_model_rate: float = 2e-3

  def __post_init__(self):
    super().__post_init__()
    if self.samples < 2:
      raise ValueError(f"samples must be at least 2, since they are compared, got samples={self.samples}.")

  def objective(self) -> learning.Objective:
    return learning.rlhf_objective(self.method, beta=self.beta, kl_coefficient=self.kl_coefficient, kl=self.kl)

  def evaluation_config(self) -> sampling.SamplerConfig:
    return dataclasses.replace(self.sampler_config(), group_size=1)

  def pretrained(self, parts: Parts) -> models.Params | None:
    """What supervised fine-tuning starts from; `None`: random parameters."""
    del parts
    return None

  def start(self, parts: Parts) -> models.Params | None:
    steps, rate = self.supervised_steps, self.supervised_rate
    if not steps:
      return self.pretrained(parts)
    make = lambda: train_supervised(parts, self.pretrained(parts), steps=steps, learning_rate=rate)
    return self._stage(parts, "supervised", parts.learner.abstract().params, _SUPERVISED, make)

  def scorer(self, parts: Parts) -> tasks.Scorer | None:
    steps, rate = self.reward_model_steps, self.reward_model_rate
    if not steps:
      return None
    make = lambda: train_reward_model(parts, self.start(parts), steps=steps, learning_rate=rate)
    params = self._stage(parts, "reward_model", abstract_reward_model(parts), _REWARD_MODEL, make)
    return make_scorer(parts, params, missing_end=self.missing_end)

  def _stage(
    self, parts: Parts, name: str, abstract: models.Params, depends: tuple[str, ...], make: Callable[[], models.Params]
  ) -> models.Params:
    task: Any = parts.task
    fingerprint = {
      "model": dataclasses.asdict(parts.policy.config),
      "task": {key: str(value) for key, value in dataclasses.asdict(task).items()},
      "options": {field: value for field, value in dataclasses.asdict(self).items() if field in depends},
    }
    return restore_or_make(pathlib.Path(self.stages) / name, abstract, fingerprint, make)
