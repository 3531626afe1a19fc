"""The parts of a run, built once from an experiment."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import grain
import jax
import numpy as np

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl.recording._checkpoint import Checkpointer
from async_rl.rollout._mesh import make_mesh
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._weight_store import WeightStore
from async_rl.runtime._experiment import Experiment
from async_rl.types import Prompt
from async_rl.types import Request

#: Tickets of samples that are not trained on start here; their randomness never meets that of training.
UNTRAINED_TICKETS = 2**31


class Parts:
  """Task, tokenizer, policy, meshes, learner, sampler and evaluator of a run.

  Attributes:
    experiment: where they come from.
    meshes: generation and learner mesh.
    task: the task.
    multi_turn: whether it is a `tasks.ToolTask`.
    tokenizer: the tokenizer.
    policy: the architecture, its vocabulary cut to the tokenizer's.
    prompts: training prompts, by id.
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
    self.multi_turn = hasattr(self.task, "respond")
    self.policy = models.limit_vocabulary(experiment.policy(), self.tokenizer.vocab_size)
    self.prompts = self.task.prompts("train")
    if not len(self.prompts):
      raise ValueError(f"Task {self.task.name!r} has no training prompts; check its data folder and split.")
    if self.multi_turn:
      self.encode_turn(self.prompts[0], "?")  # a chat template that has no place for it says so before the run
    self.held_out = self._held_out()
    shuffled = grain.MapDataset.range(len(self.prompts)).seed(experiment.seed).shuffle()
    self._order = shuffled.repeat(experiment.epochs) if experiment.epochs else shuffled.repeat()
    self.learner = learning.Learner(
      self.policy,
      experiment.optimizer(),
      experiment.loss,
      experiment.advantages,
      experiment.batch_shape(),
      self.meshes.learner,
      aggregate=experiment.aggregate,
      temperature=experiment.temperature,
      score_first=experiment.score_first or experiment.exact_norms,
      norm_tokens=experiment.max_prompt_tokens + experiment.max_completion_tokens if experiment.exact_norms else 0,
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

  @property
  def num_tickets(self) -> int | None:
    """How many groups the data gives; `None` if it is repeated without end."""
    return len(self._order) if self.experiment.epochs else None

  def request(self, ticket: int) -> Request:
    """The request with this running number: the prompts in an order shuffled anew in each epoch."""
    return self.encode(ticket, self.prompts[int(self._order[ticket])])

  def encode(self, ticket: int, prompt: Prompt) -> Request:
    """A prompt as a request."""
    tokens = np.asarray(self.tokenizer.encode_prompt(prompt.text), np.int32)
    limit = self.experiment.max_prompt_tokens
    if not 0 < len(tokens) <= limit:
      raise ValueError(
        f"Prompt {prompt.id} of task {self.task.name!r} has {len(tokens)} tokens; the limits are 1 and "
        f"max_prompt_tokens={limit}. Raise max_prompt_tokens or leave such prompts out of the task."
      )
    return Request(ticket, tokens, prompt)

  def encode_turn(self, prompt: Prompt, text: str) -> list[int]:
    """A task's answer as the tokens that follow a turn of the model."""
    if isinstance(prompt.text, str):
      return self.tokenizer.encode(text)
    role = self.experiment.tool_role
    try:
      return self.tokenizer.encode_turn(text, role)
    except ValueError as error:
      raise ValueError(f"A tool cannot answer as tool_role={role!r}, try another: {error}") from error

  def decode(self, tokens: np.ndarray) -> str:
    """Text of a turn, without its stop token."""
    return self.tokenizer.decode(tokens.tolist())
