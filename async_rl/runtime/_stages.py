"""What may come before a run: stages that make its first parameters, and stages that are kept for other runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl import learning
from async_rl import models
from async_rl import sampling
from async_rl import tasks
from async_rl._paths import Path
from async_rl._paths import as_path
from async_rl._paths import make_folder
from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._checkpoint import CheckpointError
from async_rl.recording._checkpoint import processes_of
from async_rl.recording._run_folder import find_checkpoints
from async_rl.recording._run_folder import lock_file
from async_rl.rollout._mesh import Meshes
from async_rl.rollout._prompts import PromptEncoder
from async_rl.runtime._hosts import Hosts
from async_rl.types import Prompt
from async_rl.types import TrainState


@dataclasses.dataclass(frozen=True)
class StageInputs:
  """The objects of a run that a stage may use before the first step.

  Attributes:
    encoder: the encoder of prompts, which also has the task and the tokenizer.
    prompts: the training prompts, by id, those that are left out included.
    prompt_check: the result of the check of `prompts`.
    held_out: the prompts of evaluations.
    learner: the run's learner, for the policy, the meshes and the shape of a batch.
    sampler: the run's sampler, idle; a stage may give it any weights.
    meshes: the generation mesh and the learner mesh.
    rewards: the pool that asks the task for rewards and answers.
    hosts: the processes of the run, which must all do the same in a stage.
    samples: K, the number of samples of a group.
    seed: the run's seed.
  """

  encoder: PromptEncoder
  prompts: Sequence[Prompt]
  prompt_check: tasks.PromptCheck
  held_out: Sequence[Prompt]
  learner: learning.Learner
  sampler: sampling.Sampler
  meshes: Meshes
  rewards: tasks.RewardPool
  hosts: Hosts
  samples: int
  seed: int

  @functools.cached_property
  def usable_prompts(self) -> Sequence[Prompt]:
    """Returns the training prompts that are not left out."""
    return self.prompt_check.select(self.prompts)


#: Makes parameters, on any device; adapters that they lack are newly initialized. `None` stands for random ones.
Stage = Callable[[StageInputs], models.Params | None]
#: Makes the scorer of training samples.
ScorerStage = Callable[[StageInputs], tasks.Scorer]


def abstract_policy(run: StageInputs) -> models.Params:
  """Returns the shapes and shardings of the policy's parameters on the learner mesh."""
  return run.learner.abstract().params


@dataclasses.dataclass(frozen=True)
class KeptStage:
  """A stage whose parameters are made once and kept in a folder, from where later runs restore them.

  Of several runs that begin together, one makes them and the others wait; in a bucket, which has no such locks, start
  the first run alone.

  Attributes:
    stage: the stage that makes the parameters.
    folder: the folder that keeps them.
    options: the options that they depend on, beside the task and the model: a JSON-like mapping.
    abstract: from `StageInputs` to the shapes and shardings of the parameters.
  """

  stage: Stage
  folder: str
  options: Mapping[str, Any]
  abstract: Callable[[StageInputs], models.Params] = abstract_policy

  def __call__(self, run: StageInputs) -> models.Params:
    """Returns the kept parameters, or makes and keeps them.

    Raises:
      CheckpointError: if those in the folder depend on other options; the message names the difference.
    """
    task: Any = run.encoder.task
    fingerprint = {
      "model": dataclasses.asdict(run.learner.policy.config),
      "task": {name: str(value) for name, value in dataclasses.asdict(task).items()},
      "options": dict(self.options),
    }
    with _one_run_at_a_time(as_path(self.folder), run.hosts):
      return restore_or_make(self.folder, self.abstract(run), fingerprint, lambda: self.stage(run))


@contextlib.contextmanager
def _one_run_at_a_time(folder: Path, hosts: Hosts) -> Iterator[None]:
  """Waits until no other run is here with the same local folder; the file that is locked lies beside it."""
  with contextlib.ExitStack() as stack:

    def lock() -> None:
      if hosts.first and isinstance(folder, pathlib.Path):
        make_folder(folder.parent)
        file = folder.with_name(f"{folder.name}.lock")
        stack.enter_context(lock_file(file, f"waiting for another run that has {folder} in hand"))

    hosts.agree(lock)
    yield


@dataclasses.dataclass(frozen=True)
class RunStage:
  """A stage that takes the parameters of another run's newest whole checkpoint, and nothing else of it.

  Attributes:
    run_dir: the folder of the other run.
    open_checkpoints: from a folder of checkpoints to those in it, which are refused if they are of another model.
  """

  run_dir: str
  open_checkpoints: Callable[..., Checkpointer]

  def __call__(self, run: StageInputs) -> models.Params:
    """Returns the parameters, on the learner mesh.

    Raises:
      RunFolderError: if the folder holds no run with a checkpoint.
      CheckpointError: if its checkpoints are of another model, or none of them can be read.
    """
    folder = find_checkpoints(self.run_dir)
    abstract = abstract_policy(run)
    opened = self.open_checkpoints(folder, read_only=True, processes=processes_of(abstract))
    with contextlib.closing(opened) as checkpoints:
      try:
        params = checkpoints.restore_params(abstract)
      except CheckpointError as error:
        raise CheckpointError(f"cannot start from init_from={self.run_dir!r}: {error}") from error
      for damage in checkpoints.skipped.values():
        print(f"damaged: {damage}", flush=True)
      print(f"starting from the parameters of step {checkpoints.restored_step} of {self.run_dir}", flush=True)
    return params


def restore_or_make(
  folder: Path | str,
  abstract: models.Params,
  fingerprint: Mapping[str, Any],
  make: Callable[[], models.Params | None],
) -> models.Params:
  """Restores the parameters kept in `folder`; if there are none yet, makes and keeps them.

  Args:
    folder: the folder of a checkpoint of its own.
    abstract: `jax.ShapeDtypeStruct`s with the wanted shardings.
    fingerprint: a JSON-like mapping of what the parameters depend on.
    make: the function that trains or loads them.

  Raises:
    CheckpointError: if those in the folder have another fingerprint or shape; the message names the difference.
  """
  opened = Checkpointer(folder, keep=1, fingerprint=fingerprint, processes=processes_of(abstract))
  with contextlib.closing(opened) as checkpoints:
    if checkpoints.latest_step is not None:
      return checkpoints.restore_params(abstract)
    params = make()
    if params is None:
      raise ValueError(f"there are no parameters to keep in {folder}; give a stage that makes some.")
    version: Any = np.zeros([], np.int32)  # of no device, since those of `params` may be of several processes
    checkpoints.save(0, TrainState(params, {}, version), {})
    return params
