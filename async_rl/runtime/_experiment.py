"""An experiment: everything that makes a run what it is, composed of real objects."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl._paths import Path
from async_rl._paths import as_path
from async_rl._paths import resolve
from async_rl._validation import check_number
from async_rl.recording._checkpoint import Checkpointer
from async_rl.rollout._mesh import Meshes
from async_rl.rollout._mesh import make_mesh
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._mesh import takes_programs
from async_rl.rollout._prompts import PromptEncoder
from async_rl.rollout._schedule import LAG_KINDS
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._options import RESUMABLE
from async_rl.runtime._options import Devices
from async_rl.runtime._options import Options
from async_rl.runtime._options import check_types
from async_rl.runtime._options import flatten
from async_rl.runtime._stages import RunStage
from async_rl.runtime._stages import ScorerStage
from async_rl.runtime._stages import Stage
from async_rl.runtime._stages import StageInputs
from async_rl.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """A reinforcement-learning run, composed of the objects that it is made of.

  Attributes:
    name: the name of the config, or the path of its file, by which the run can be evaluated and exported later.
    options: the options of the command line, in parts (see `Options`); all of them are recorded, and those outside of
      `RESUMABLE` parts must be the same when the run is resumed.
    task: the prompts and the rewards.
    tokenizer: the policy's tokenizer.
    policy: the architecture; its vocabulary is cut to the tokenizer's. With `lora`, adapters are trained in place of
      its weights.
    optimizer: the stabilizers and the optimizer, in the order in which they apply.
    objective: the loss, the advantages and the aggregation.
    start: the stage that makes the first parameters; `None` starts from random ones.
    scorer: the stage that makes the scorer of training samples, such as a reward model. `None` uses the task's reward,
      which evaluations always use.
    sampler: the constructor of the samplers.

  Raises:
    ValueError: if options contradict each other.
  """

  name: str
  options: Options
  task: tasks.Task
  tokenizer: models.Tokenizer
  policy: models.Policy
  optimizer: optax.GradientTransformation
  objective: learning.Objective
  start: Stage | None = None
  scorer: ScorerStage | None = None
  sampler: sampling.SamplerFactory = sampling.Engine

  def __post_init__(self):
    object.__setattr__(self, "policy", models.limit_vocabulary(self.policy, self.tokenizer.vocab_size))
    check_types(self.options)
    _check_numbers(flatten(self.options))
    _check_together(self.options, self.objective)
    _check_other_folder(self.options)

  # What follows from the parts.

  def fingerprint(self) -> dict[str, Any]:
    """Returns the options that make two runs the same."""
    return {"config": pathlib.Path(self.name).stem, **flatten(self.options, skip=RESUMABLE)}

  @property
  def first_stage(self) -> Stage | None:
    """Returns the stage that makes the first parameters: `start`, or another run if the options name one."""
    source = self.options.training.init_from
    return self.start if source is None else RunStage(source, self.make_checkpointer)

  @property
  def keeps_reference(self) -> bool:
    """Returns whether the run has a reference policy."""
    return self.options.training.reference or self.objective.needs_reference

  @property
  def encoder(self) -> PromptEncoder:
    """Returns the encoder of prompts and tool answers."""
    limits = self.options.rollout
    return PromptEncoder(self.task, self.tokenizer, limits.max_prompt_tokens, limits.max_turns, limits.tool_role)

  @property
  def batch_shape(self) -> learning.BatchShape:
    """Returns the static shape of a training batch."""
    training, limits, devices = self.options.training, self.options.rollout, self.options.devices
    sequences, longest = training.groups * training.samples, limits.max_prompt_tokens + limits.max_completion_tokens
    return learning.BatchShape(
      sequences=sequences,
      row_tokens=min(devices.row_tokens or longest, sequences * longest),  # a whole batch fills no longer row
      rows=devices.rows,
      completion_tokens=limits.max_completion_tokens,
      prompt_tokens=limits.max_prompt_tokens,
      row_sequences=devices.row_sequences or None,
    )

  @property
  def sampler_config(self) -> sampling.SamplerConfig:
    """Returns the sizes and the distribution with which training samples are drawn."""
    rollout, training = self.options.rollout, self.options.training
    return sampling.SamplerConfig(
      slots=rollout.slots,
      group_size=training.samples,
      max_prompt_tokens=rollout.max_prompt_tokens,
      max_new_tokens=rollout.max_completion_tokens,
      chunk=rollout.decode_chunk,
      temperature=rollout.temperature,
      on_update=rollout.on_update,
      seed=training.seed,
      length_buckets=rollout.length_buckets,
      slot_buckets=rollout.slot_buckets,
      shared_prompts=rollout.shared_prompts,
      prefill_tokens=rollout.prefill_tokens,
    )

  @property
  def evaluation_config(self) -> sampling.SamplerConfig:
    """Returns the same for evaluations, which draw one sample of each held-out prompt."""
    temperature = self.options.output.eval_temperature
    if temperature is None:
      temperature = self.options.rollout.temperature
    return dataclasses.replace(self.sampler_config, group_size=1, temperature=temperature)

  # What is made on devices and in folders.

  def make_meshes(self, devices: Sequence[jax.Device] | None = None) -> Meshes:
    """Splits the devices into a generation mesh and a learner mesh.

    Args:
      devices: all devices of all processes; the default is `jax.devices()`.
    """
    split = self.options.devices
    shared = self.options.schedule.mode == "sync"
    return make_meshes(
      0 if shared else split.generation_devices,
      hosts=split.generation_hosts,
      fsdp=split.fsdp,
      tensor=split.tensor,
      generation_tensor=split.generation_tensor,
      devices=devices,
    )

  def make_learner(self, mesh: jax.sharding.Mesh) -> learning.Learner:
    """Makes the learner on the learner mesh."""
    return learning.Learner(
      self.policy,
      self.optimizer,
      self.objective,
      self.batch_shape,
      mesh,
      temperature=self.options.rollout.temperature,
      max_lag=self.options.schedule.lag_bound,
      exact_norms=self.options.devices.exact_norms,
    )

  def make_sampler(self, config: sampling.SamplerConfig, mesh: jax.sharding.Mesh) -> sampling.Sampler:
    """Makes a sampler of the policy: engines of one device each where the compiler takes no program of several.

    Raises:
      ValueError: if the policy's attention does not run on the mesh's devices.
    """
    models.check_backend(self.policy.attention, mesh.devices.flat[0], self.policy.config.head_dim)
    pooled = self.sampler is sampling.Engine and not takes_programs(mesh)
    make = sampling.EnginePool if pooled else self.sampler
    return make(self.policy, config, self.tokenizer.stop_ids, self.tokenizer.pad_id, mesh)

  def make_evaluator(self, learner_mesh: jax.sharding.Mesh) -> sampling.Sampler:
    """Makes a sampler for evaluations on the learner's devices, so that generation goes on and the weights stay put.

    Weights are split as on generation meshes, as far as the number of devices allows. Slots are rounded up to it.
    """
    return self.make_sampler(*self.evaluation_setup(learner_mesh))

  def make_stage_sampler(self, learner_mesh: jax.sharding.Mesh) -> sampling.Sampler:
    """Makes a sampler of training samples on the learner's devices, for stages where those that generate are remote."""
    return self.make_sampler(*_fit_learner(self.sampler_config, learner_mesh, self.options.devices))

  def evaluation_setup(self, learner_mesh: jax.sharding.Mesh) -> tuple[sampling.SamplerConfig, jax.sharding.Mesh]:
    """Returns the sizes and the mesh of the sampler of evaluations."""
    return _fit_learner(self.evaluation_config, learner_mesh, self.options.devices)

  def make_stage_inputs(self, rewards: tasks.RewardPool, hosts: Hosts | None = None) -> StageInputs:
    """Makes the objects of a run that stages may use.

    Args:
      rewards: the pool that asks the task.
      hosts: the processes of the run; `None` for this one alone.
    """
    meshes, training = self.make_meshes(), self.options.training
    prompts = self.task.prompts("train")
    return StageInputs(
      encoder=self.encoder,
      prompts=prompts,
      prompt_check=self._check(prompts),
      held_out=self._held_out(),
      learner=self.make_learner(meshes.learner),
      sampler=self.make_sampler(self.sampler_config, meshes.generation),
      meshes=meshes,
      rewards=rewards,
      hosts=hosts or Hosts(),
      samples=training.samples,
      seed=training.seed,
    )

  def _check(self, prompts: Sequence[Prompt]) -> tasks.PromptCheck:
    return self.encoder.check(prompts, skip=self.options.rollout.skip_bad_prompts)

  def _held_out(self) -> Sequence[Prompt]:
    """Returns the prompts of evaluations."""
    count = self.options.output.eval_prompts
    prompts = self.task.prompts("test")[:count] if count else []
    if count and not prompts:
      raise ValueError(
        f"Task {self.task.name!r} has no test prompts, got eval_prompts={count}; add some, or set it to 0 for no "
        "evaluation."
      )
    return self._check(prompts).select(prompts)

  def make_checkpointer(
    self, folder: Path | str, *, read_only: bool = False, processes: Collection[int] | None = None
  ) -> Checkpointer:
    """Opens the checkpoints in `folder`, which are refused if they are of another model; see `Checkpointer`."""
    lora = self.policy.lora
    model = {"model": dataclasses.asdict(self.policy.config), "lora": lora and dataclasses.asdict(lora)}
    keep = self.options.output.keep
    return Checkpointer(folder, keep=keep, fingerprint=model, read_only=read_only, processes=processes)


def _fit_learner(
  config: sampling.SamplerConfig, learner_mesh: jax.sharding.Mesh, devices: Devices
) -> tuple[sampling.SamplerConfig, jax.sharding.Mesh]:
  """Returns the sizes and the mesh of a sampler on the learner's devices of this process."""
  local = [d for d in learner_mesh.devices.flat if d.process_index == jax.process_index()]
  mesh = make_mesh(local, tensor=math.gcd(len(local), devices.generation_tensor or devices.tensor))
  data = mesh.shape["data"]
  return dataclasses.replace(config, slots=-(-config.slots // data) * data), mesh


def _check_numbers(options: dict[str, Any]) -> None:
  """Refuses numbers that no option can mean, also among those that the config itself defines."""
  for name, value in options.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f"*{name}* must be a finite number, got {name}={value!r}.")
    if name.endswith("_rate") and value is not None:
      check_number(name, value, above=0)


def _check_together(options: Options, objective: learning.Objective) -> None:
  """Refuses options that contradict each other."""
  training, rollout, schedule, devices = options.training, options.rollout, options.schedule, options.devices
  if rollout.slots < training.samples:
    raise ValueError(
      f"*slots* must be at least samples, got slots={rollout.slots}, samples={training.samples}; a group needs all its "
      "slots at once."
    )
  longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
  if 0 < devices.row_tokens < longest:
    raise ValueError(
      f"*row_tokens* must be at least max_prompt_tokens + max_completion_tokens={longest}, got "
      f"row_tokens={devices.row_tokens}; 0 stands for that many."
    )
  if schedule.mode == "async" and devices.generation_devices == 0 and schedule.max_lag == 0:
    raise ValueError("max_lag=0 on shared devices leaves nothing to overlap; use mode='sync', or raise max_lag.")
  if training.samples == 1 and not _rewards_one_sample(objective):
    raise ValueError(
      "*samples* must be at least 2 with these advantages, which compare the samples of a group, got samples=1."
    )


def _check_other_folder(options: Options) -> None:
  """Refuses to take parameters or a schedule from the run's own folder, which `overwrite` would delete first."""
  lag, run_dir = options.schedule.lag, options.output.run_dir
  for name, source in {"init_from": options.training.init_from, "lag": None if lag in LAG_KINDS else lag}.items():
    if source and resolve(as_path(source, name)).is_relative_to(resolve(as_path(run_dir, "run_dir"))):
      raise ValueError(
        f"*{name}* must be of another folder than run_dir, got {name}={source!r} and run_dir={run_dir!r}; choose a "
        "new run_dir."
      )


def _rewards_one_sample(objective: learning.Objective) -> bool:
  """Returns whether the advantages of groups of one sample depend on the rewards."""
  zeros = jnp.zeros((2, 1))

  def advantages(rewards):
    quantities = learning.BatchQuantities(
      rewards=jnp.asarray(rewards),
      groups=jnp.arange(2),
      mask=jnp.ones((2, 1), bool),
      behavior=zeros,
      lag=jnp.zeros((2, 1), jnp.int32),
      stats=models.TokenStats(zeros, zeros, zeros, zeros),
      reference=zeros,
      squared_norms=jnp.ones(2),
    )
    return np.asarray(objective.make_advantages(quantities))

  return not np.allclose(advantages([0.0, 1.0]), advantages([1.0, 0.0]))
