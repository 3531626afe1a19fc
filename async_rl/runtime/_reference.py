"""The reference policy of a run: its starting weights, kept beside its checkpoints."""

from __future__ import annotations

import dataclasses

from async_rl import learning
from async_rl import models
from async_rl._paths import Path
from async_rl.recording._checkpoint import CheckpointError
from async_rl.runtime._stages import restore_or_make


def set_starting_reference(learner: learning.Learner, folder: Path, params: models.Params | None) -> None:
  """Gives the learner the run's starting weights as its reference policy.

  Args:
    learner: the run's learner.
    folder: the folder of the reference alone.
    params: the policy's parameters at the start of the run, to be kept in `folder`; `None`, on a resume, restores those
      kept there.

  Raises:
    CheckpointError: on a resume, if `folder` holds none.
  """

  def starting_params() -> models.Params:
    if params is None:
      raise CheckpointError(f"the run's reference policy is missing: restore {folder}, or rerun with --overwrite")
    return models.split_trainable(params)[0]

  abstract = models.split_trainable(learner.abstract().params)[0]
  fingerprint = {"model": dataclasses.asdict(learner.policy.config)}
  learner.set_reference(restore_or_make(folder, abstract, fingerprint, starting_params))
