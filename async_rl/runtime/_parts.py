"""The parts of a run, built once from an experiment."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl.recording._checkpoint import Checkpointer
from async_rl.rollout._mesh import make_mesh
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._prompts import PromptEncoder
from async_rl.rollout._prompts import PromptStream
from async_rl.rollout._weight_store import WeightStore
from async_rl.runtime._experiment import Experiment
from async_rl.types import Prompt


class Parts:
  """Task, tokenizer, policy, meshes, learner, sampler and evaluator of a run.

  Attributes:
    experiment: where they come from.
    meshes: generation and learner mesh.
    task: the task.
    tokenizer: the tokenizer.
    policy: the architecture, its vocabulary cut to the tokenizer's.
    encoder: encodes prompts and tool answers, decodes completions.
    prompts: the stream of training prompts.
    held_out: prompts of evaluations.
    learner: the learner step.
    engine: the sampler, on the generation mesh.
  """

  def __init__(self, experiment: Experiment):
    if jax.process_count() > 1:
      raise NotImplementedError(f"Runs on several hosts are not supported yet, got {jax.process_count()} processes.")
    self.experiment = experiment
    in_turn = experiment.mode == "sync"
    self.meshes = make_meshes(
      0 if in_turn else experiment.generation_devices, fsdp=experiment.fsdp, tensor=experiment.tensor
    )
    self.task, self.tokenizer = experiment.task(), experiment.tokenizer()
    self.policy = models.limit_vocabulary(experiment.policy(), self.tokenizer.vocab_size)
    self.encoder = PromptEncoder(
      self.task, self.tokenizer, experiment.max_prompt_tokens, experiment.max_turns, experiment.tool_role
    )
    self.prompts = PromptStream(self.encoder, self.task.prompts("train"), experiment.seed, experiment.epochs)
    self.held_out = self._held_out()
    self.learner = learning.Learner(
      self.policy,
      experiment.optimizer(),
      experiment.objective(),
      experiment.batch_shape(),
      self.meshes.learner,
      temperature=experiment.temperature,
      max_lag=experiment.lag_bound,
    )
    self.engine = self.make_engine(experiment.sampler_config(), self.meshes.generation)

  def _held_out(self) -> list[Prompt]:
    if not self.experiment.eval_prompts:
      return []
    prompts = self.task.prompts("test")
    return [prompts[i] for i in range(min(self.experiment.eval_prompts, len(prompts)))]

  @functools.cached_property
  def evaluator(self) -> sampling.Sampler:
    """A sampler for evaluations. It runs on the learner's devices: generation goes on, and the weights stay put."""
    local = [d for d in self.meshes.learner.devices.flat if d.process_index == jax.process_index()]
    tensor = self.meshes.learner.shape["tensor"]
    return self.make_engine(self.experiment.evaluation_config(), make_mesh(local, tensor=tensor, role="evaluation"))

  def make_engine(self, config: sampling.SamplerConfig, mesh: jax.sharding.Mesh) -> sampling.Sampler:
    """A sampler of this run's policy and tokenizer."""
    return sampling.Engine(self.policy, config, self.tokenizer.stop_ids, self.tokenizer.pad_id, mesh)

  def make_checkpointer(self, folder: pathlib.Path) -> Checkpointer:
    """The checkpoints in `folder`, of this run's model."""
    config, lora = self.policy.config, self.policy.lora
    model = {"model": dataclasses.asdict(config), "lora": lora and dataclasses.asdict(lora)}
    return Checkpointer(folder, keep=self.experiment.keep, fingerprint=model)

  def make_store(self) -> WeightStore:
    """A weight store from the learner mesh to the generation mesh."""
    prepare = functools.partial(sampling.prepare_weights, self.policy)
    return WeightStore(prepare, self.engine.weight_shardings, self.meshes.learner)
