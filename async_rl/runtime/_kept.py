"""Parameters that are kept beside a run: the reference policy, and what earlier stages trained."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from async_rl import models
from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._checkpoint import CheckpointError
from async_rl.runtime._parts import Parts
from async_rl.types import TrainState


def restore_or_make(
  folder: pathlib.Path | str,
  abstract: models.Params,
  fingerprint: Mapping[str, Any],
  make: Callable[[], models.Params],
) -> models.Params:
  """Restores the parameters kept in `folder`; if there are none yet, makes and keeps them.

  Args:
    folder: of a checkpoint of its own.
    abstract: `jax.ShapeDtypeStruct`s with the wanted shardings.
    fingerprint: JSON-like mapping of what the parameters depend on.
    make: trains or loads them.

  Raises:
    CheckpointError: if those in the folder have another fingerprint or shape; the message names the difference.
  """
  with contextlib.closing(Checkpointer(folder, keep=1, fingerprint=fingerprint)) as checkpoints:
    if checkpoints.latest_step is not None:
      return checkpoints.restore_params(abstract)
    params = make()
    checkpoints.save(0, TrainState(params, {}, jnp.zeros([], jnp.int32)), {})
    return params


def set_reference(parts: Parts, folder: pathlib.Path, params: models.Params | None) -> None:
  """Gives the learner the reference policy of a run, if it has one: what it started from.

  Args:
    parts: of the run.
    folder: of the reference alone.
    params: of the policy at the start of the run, to be kept in `folder`; `None`, on a resume: those kept there.

  Raises:
    CheckpointError: on a resume, if `folder` holds none.
  """
  if not parts.experiment.keeps_reference:
    return
  trained = lambda tree: models.split_trainable(tree)[0]

  def start() -> models.Params:
    if params is None:
      raise CheckpointError(f"the run's reference policy is missing: bring {folder} back, or start afresh in its place")
    return trained(params)

  abstract, model = trained(parts.learner.abstract().params), {"model": dataclasses.asdict(parts.policy.config)}
  parts.learner.set_reference(restore_or_make(folder, abstract, model, start))
