"""Checkpoints: everything that a run needs to continue as if it had not been interrupted."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from async_rl._paths import Path
from async_rl._paths import absolute
from async_rl._paths import as_path
from async_rl._paths import delete
from async_rl._paths import list_folder
from async_rl._paths import make_folder
from async_rl._paths import move
from async_rl.models import split_trainable
from async_rl.recording._archive import to_archive
from async_rl.recording._frozen import ASYNC_OPTIONS
from async_rl.recording._frozen import restore_frozen
from async_rl.recording._frozen import save_frozen
from async_rl.recording._host_archives import HostHandler
from async_rl.recording._host_archives import HostRestore
from async_rl.recording._host_archives import HostSave
from async_rl.recording._run_folder import differences
from async_rl.types import TrainState

_WRITE_REMEDY = "free some space or choose another folder"


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or used; the message is one sentence for the user, with the remedy."""


class DamagedCheckpointError(CheckpointError):
  """A checkpoint cannot be read, although it is of the right model."""


class Checkpointer:
  """Saves and restores with Orbax: asynchronously, atomically, onto any number of devices.

  A checkpoint has the items `params`, `optimizer` (optimizer state, version and critic), `host` (a tree of numpy arrays
  and JSON values, one per process) and `meta` (the fingerprint).

  Where the parameters have adapters, `params` are these alone. What they were trained on is written once, to the folder
  `base` beside `folder`; `meta` has its checksum, so that no checkpoint is ever put on another base.

  Args:
    folder: the folder of the checkpoints; made if missing.
    keep: the number of checkpoints to keep, the newest ones.
    fingerprint: a JSON-like mapping that describes the model; checkpoints with another one are refused.
    read_only: whether to make and delete nothing: unfinished saves may be in progress in another process. Otherwise
      they are taken for those of a process that was killed, and deleted.
    processes: the processes of whose devices the state is, 0 among them, see `processes_of`; no other one may use the
      checkpoints. `None`: all of them.

  Attributes:
    restored_step: the step of the checkpoint that was read last.
    skipped: one sentence by step for each damaged checkpoint that was passed over for it.

  Raises:
    CheckpointError: if the folder cannot be made, or is empty or missing and must not be written.
  """

  def __init__(
    self,
    folder: Path | str,
    *,
    keep: int,
    fingerprint: Mapping[str, Any],
    read_only: bool = False,
    processes: Collection[int] | None = None,
  ):
    self.folder = absolute(as_path(folder))
    self._fingerprint = json.loads(json.dumps(fingerprint))
    self._base_folder = self.folder.with_name("base")
    self._base: str | None = None  # checksum of the frozen parameters, once they are written or read
    self.restored_step: int | None = None
    self.skipped: dict[int, str] = {}
    self._processes = _options_of(processes)
    options = ocp.CheckpointManagerOptions(
      preservation_policy=ocp.checkpoint_managers.LatestN(keep),
      cleanup_tmp_directories=not read_only,
      create=False,
      multiprocessing_options=self._processes,
      async_options=ASYNC_OPTIONS,
    )
    handlers = {
      "params": ocp.StandardCheckpointHandler(multiprocessing_options=self._processes),
      "optimizer": ocp.StandardCheckpointHandler(multiprocessing_options=self._processes),
      "host": HostHandler(),
      "meta": ocp.JsonCheckpointHandler(),
    }
    if read_only and not list_folder(self.folder):
      raise CheckpointError(f"{self.folder} has no checkpoint")
    with self._explained("cannot be written", _WRITE_REMEDY):
      make_folder(self.folder)
      self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

  @property
  def latest_step(self) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def save(
    self, step: int, state: TrainState, host: Mapping[str, Any], others: Mapping[int, bytes] | None = None
  ) -> None:
    """Starts saving; returns once the values are copied, so that `state` may be donated.

    Does nothing if `step` is saved already. An error of the save before is raised here, at the latest by `wait`.

    Args:
      step: number of the checkpoint, larger than those before.
      state: arrays on the learner mesh.
      host: state of this process: nested dicts and lists of numpy arrays, numbers, strings, booleans and None.
      others: the same of processes that do not use the checkpoints, by their numbers, as archives (`to_archive`).

    Raises:
      CheckpointError: if it cannot be written, or a parameter is not finite. Earlier checkpoints are not touched.
    """
    if step == self.latest_step:
      return
    self._find_folder(step)
    archives = {jax.process_index(): to_archive(host), **(others or {})}
    trained, frozen = split_trainable(state.params)
    if not jax.device_get(_all_finite((trained, state.critic))):
      newest = "none yet" if self.latest_step is None else self.latest_step
      raise CheckpointError(
        f"the checkpoint of step {step} is not written to {self.folder}, because parameters are not finite; "
        f"the newest good one: {newest}"
      )
    state, first = state._replace(params=trained), bool(frozen) and self._base is None
    size = sum(map(len, archives.values()))
    self._check_space(step, size + sum(x.nbytes for x in jax.tree.leaves((state, frozen if first else {}))))
    state, frozen = _saveable(state), _saveable(frozen if first else {})
    if first:
      with self._explained(f"cannot be written at step {step}", _WRITE_REMEDY):
        self._base = save_frozen(self._base_folder, frozen, self._processes)
    items = ocp.args.Composite(
      params=ocp.args.StandardSave(state.params),
      optimizer=ocp.args.StandardSave(_beside_params(state)),
      host=HostSave(archives),
      meta=ocp.args.JsonSave(self._fingerprint | ({"base": self._base} if self._base else {})),
    )
    with self._explained(f"cannot be written at step {step}", _WRITE_REMEDY):
      if not self._manager.save(step, args=items):
        raise ValueError(f"it is older than the newest, of step {self.latest_step}")

  def _find_folder(self, step: int) -> None:
    """Makes the folder again if it was deleted, but not the one that it lies in, without which there is no run."""
    if not isinstance(self.folder, pathlib.Path) or self.folder.exists():
      return
    if not self.folder.parent.exists():
      raise CheckpointError(
        f"the checkpoint of step {step} is not written, because {self.folder.parent} was moved or deleted: put it "
        "back, then rerun the same command to resume"
      )
    make_folder(self.folder)
    self.reload()

  def _check_space(self, step: int, needed: int) -> None:
    """Raises CheckpointError if the disk has less than `needed` bytes left; a bucket has no end."""
    if not isinstance(self.folder, pathlib.Path):
      return
    free = shutil.disk_usage(self.folder).free
    if free < needed:
      raise CheckpointError(
        f"the checkpoint of step {step} needs {needed / 1e9:.3g} GB, but {self.folder} has {free / 1e9:.3g} GB free; "
        + _WRITE_REMEDY
      )

  def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, list[dict[str, Any]]]:
    """Reads a checkpoint.

    Args:
      abstract: the state as `jax.ShapeDtypeStruct`s with the wanted shardings, whatever they were at the save.
      step: the step of the checkpoint. `None` reads the newest one that is whole, and notes the others in `skipped`.

    Returns:
      The state, and the `host` trees of the processes that made the checkpoint, in their order.

    Raises:
      CheckpointError: if there is none, or it is of another model or on another base.
      DamagedCheckpointError: if it cannot be read.
    """
    targets = {"params": abstract.params, "optimizer": _beside_params(abstract)}
    items = self._restore(step, targets, host=HostRestore())
    return TrainState(items["params"], **items["optimizer"]), items["host"]

  def restore_params(self, abstract: Any, step: int | None = None) -> Any:
    """Reads the parameters alone; arguments and errors as in `restore`."""
    return self._restore(step, {"params": abstract})["params"]

  def set_aside_skipped(self) -> None:
    """Moves the checkpoints in `skipped` to the folder `damaged` beside `folder`, so that their steps can be saved."""
    for step in self.skipped:
      target = self.folder.with_name("damaged") / str(step)
      make_folder(target.parent)
      delete(target)
      move(self.folder / str(step), target)
    self.reload()

  def reload(self) -> None:
    """Looks again for the checkpoints in `folder`."""
    self._manager.reload()

  def wait(self) -> None:
    """Waits until everything saved is on disk; raises CheckpointError if that failed."""
    with self._explained("cannot be written", _WRITE_REMEDY):
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits as `wait` does, and ends the threads."""
    self.wait()
    self._manager.close()

  def _restore(self, step: int | None, targets: dict[str, Any], **others: Any) -> Any:
    steps = sorted(self._manager.all_steps(), reverse=True)
    if step is not None and step not in steps:
      raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has those of {steps}")
    if not steps:
      raise CheckpointError(f"{self.folder} has no checkpoint")
    if step is not None:
      return self._restore_step(step, targets, **others)
    self.skipped = {}
    errors = []
    for newest in steps:
      try:
        return self._restore_step(newest, targets, **others)
      except DamagedCheckpointError as error:
        self.skipped[newest] = str(error)
        errors.append(error)
    if len(errors) == 1:
      raise errors[0]
    raise DamagedCheckpointError(
      f"none of the checkpoints in {self.folder} can be read: restore one from a copy, or start again with "
      f"--overwrite; the newest: {errors[0]}"
    )

  def _restore_step(self, step: int, targets: dict[str, Any], **others: Any) -> Any:
    trained, frozen = split_trainable(targets["params"])
    targets = targets | {"params": trained}
    with self._explained(f"of step {step} cannot be read", "use another checkpoint", DamagedCheckpointError):
      meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
      base = meta.pop("base", None)
      self._check_same(step, list(differences(meta, self._fingerprint)))
      saved = self._manager.item_metadata(step)
      for name, target in targets.items():
        self._check_same(step, list(differences(_shapes(saved[name].tree), _shapes(target))))
      arguments = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
      items = dict(self._manager.restore(step, args=ocp.args.Composite(**arguments, **others)).items())
      if frozen:
        items["params"] |= self._restore_base(step, frozen, base)
      self.restored_step = step
      return items

  def _restore_base(self, step: int, abstract: Any, expected: str) -> Any:
    if not self._base_folder.exists():
      raise CheckpointError(
        f"checkpoint {step} in {self.folder} holds adapters, but the weights that they were trained on are missing: "
        f"restore {self._base_folder}"
      )
    params, found = restore_frozen(self._base_folder, abstract, self._processes)
    if found != expected:
      raise CheckpointError(
        f"checkpoint {step} in {self.folder} holds adapters of other weights than those in {self._base_folder} "
        f"(checksum {expected}, not {found}): restore the right folder"
      )
    self._base = found
    return params

  def _check_same(self, step: int, changes: list[str]) -> None:
    if changes:
      shown = "; ".join(changes[:4]) + (f"; and {len(changes) - 4} more" if len(changes) > 4 else "")
      raise CheckpointError(
        f"checkpoint {step} in {self.folder} is of another model or optimizer ({shown}): "
        "use the configuration it was made with, or another folder"
      )

  @contextlib.contextmanager
  def _explained(self, what: str, remedy: str, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    try:
      yield
    except CheckpointError:
      raise
    except Exception as error:
      reason = (str(error).splitlines() or [type(error).__name__])[0]
      raise kind(f"the checkpoint in {self.folder} {what}: {reason}; {remedy}") from error


class NoCheckpointer(Checkpointer):
  """Saves nothing and finds nothing, in the processes of a run that have no part of its state.

  Args:
    folder: the folder of the checkpoints, which are the other processes' concern.
  """

  def __init__(self, folder: Path | str):
    self.folder = absolute(as_path(folder))
    self.restored_step = None
    self.skipped = {}

  @property
  def latest_step(self) -> int | None:
    """Returns `None`."""
    return None

  def save(
    self, step: int, state: TrainState, host: Mapping[str, Any], others: Mapping[int, bytes] | None = None
  ) -> None:
    """Does nothing."""

  def set_aside_skipped(self) -> None:
    """Does nothing."""

  def reload(self) -> None:
    """Does nothing."""

  def wait(self) -> None:
    """Does nothing."""

  def close(self) -> None:
    """Does nothing."""


def processes_of(abstract: Any) -> set[int]:
  """Returns the processes on whose devices arrays lie, by a tree of them or of ShapeDtypeStructs with shardings."""
  shardings = {x.sharding for x in jax.tree.leaves(abstract) if hasattr(x, "sharding")}
  return {device.process_index for sharding in shardings for device in sharding.device_set}


def _options_of(processes: Collection[int] | None) -> ocp.options.MultiprocessingOptions:
  """Returns options that name the processes, so that these wait for one another over the coordinator.

  Orbax would otherwise have them wait by a program on all devices, also while a thread that samples launches others on
  some of the same.
  """
  count = jax.process_count()
  active = set(range(count) if processes is None else processes)
  prefix = None if len(active) == count else "learners"
  return ocp.options.MultiprocessingOptions(
    active_processes=active if count > 1 else None, barrier_sync_key_prefix=prefix
  )


def _saveable(tree: Any) -> Any:
  """Returns numpy arrays where all arrays are of one process among several, which Orbax refuses to save."""
  alone = jax.process_count() > 1 and len(processes_of(jax.tree.leaves(tree))) == 1
  return jax.tree.map(np.asarray, tree) if alone else tree


@jax.jit
def _all_finite(params: Any) -> jax.Array:
  """bool [], whether every value is finite."""
  finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params)]
  return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


def _beside_params(state: TrainState) -> dict[str, Any]:
  """Returns what a state has beside the policy's parameters, by the names of its fields."""
  kept = {"opt_state": state.opt_state, "version": state.version}
  return kept if state.critic is None else kept | {"critic": state.critic}


def _shapes(tree: Any) -> dict[str, str]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): f"{np.dtype(x.dtype).name}{list(x.shape)}"
    for path, x in leaves
  }
