"""Asynchronous RLHF, as the configs share it: the method by name, and the two stages before it."""

from __future__ import annotations

import dataclasses

from async_rl import learning
from async_rl._paths import check_path
from async_rl._validation import check_number
from async_rl.runtime import KeptStage
from async_rl.runtime import RewardModelStage
from async_rl.runtime import ScorerStage
from async_rl.runtime import Stage
from async_rl.runtime import SupervisedStage
from async_rl.runtime import abstract_reward_model
from async_rl.runtime import make_scorer


@dataclasses.dataclass(frozen=True)
class RLHF:
  """Supervised fine-tuning, then a reward model, then reinforcement learning against it."""

  #: Method of reinforcement learning.
  method: learning.Method = "online_dpo"
  #: Of online_dpo and ipo: inverse temperature of the implicit reward.
  beta: float = 0.1
  #: Of rloo, proximal_rloo and ppo: weight of the KL to the reference policy.
  kl_coefficient: float = 0.05
  #: Of rloo, proximal_rloo and ppo: place of the KL, in the reward with the sampler's log-probabilities or with current
  #: ones (reward, reward_current), or in the loss.
  kl: learning.KL = "reward"
  gae: learning.GAE = learning.GAE()
  #: Reward of an unfinished completion; the reward model's have mean 0 on preferred completions and deviation 1.
  missing_end: float = -3.0
  #: Folder that keeps the first two stages, from where every later run with the same options takes them.
  stages: str = "runs/stages"
  #: Supervised steps on the task's solutions, 64 each; 0: none.
  supervised_steps: int = 500
  #: Learning rate of supervised training.
  supervised_rate: float = 3e-3
  #: Steps of the reward model, 64 pairs each; 0: no reward model, the task's own reward is trained on.
  reward_model_steps: int = 500
  #: Learning rate of the reward model.
  reward_model_rate: float = 2e-3

  def __post_init__(self):
    for name in ("supervised_steps", "reward_model_steps"):
      check_number(name, getattr(self, name), whole=True, at_least=0)
    for name in ("supervised_rate", "reward_model_rate"):
      check_number(name, getattr(self, name), above=0)
    check_path("stages", self.stages)
    if not self.stages:
      raise ValueError("*stages* must name a folder, got stages=''.")

  def objective(self) -> learning.Objective:
    """Returns the objective of the method."""
    return learning.rlhf_objective(
      self.method, beta=self.beta, kl_coefficient=self.kl_coefficient, kl=self.kl, gae=self.gae
    )

  def start(self, pretrained: Stage | None = None, weights: str = "") -> Stage | None:
    """Returns the supervised stage.

    Args:
      pretrained: the stage that it starts from.
      weights: the name of the pretrained weights, which the kept parameters depend on.
    """
    if not self.supervised_steps:
      return pretrained
    stage = SupervisedStage(self.supervised_steps, self.supervised_rate, start=pretrained)
    return KeptStage(stage, f"{self.stages}/supervised", self._supervised_options(weights))

  def scorer(self, pretrained: Stage | None = None, weights: str = "") -> ScorerStage | None:
    """Returns the reward-model stage, which starts from the supervised one; `None` without a reward model."""
    if not self.reward_model_steps:
      return None
    stage = RewardModelStage(self.reward_model_steps, self.reward_model_rate, start=self.start(pretrained, weights))
    steps = {"reward_model_steps": self.reward_model_steps, "reward_model_rate": self.reward_model_rate}
    options = self._supervised_options(weights) | steps
    kept = KeptStage(stage, f"{self.stages}/reward_model", options, abstract_reward_model)
    return lambda run: make_scorer(run, kept(run), missing_end=self.missing_end)

  def _supervised_options(self, weights: str) -> dict[str, object]:
    named = {"weights": weights} if weights else {}
    return named | {"supervised_steps": self.supervised_steps, "supervised_rate": self.supervised_rate}
