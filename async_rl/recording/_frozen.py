"""The frozen parameters of a run with adapters: written once, beside the checkpoints that were trained on them."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from async_rl._arrays import sum_of_bits
from async_rl._paths import Path

#: Orbax makes the folders of a checkpoint before it writes into them, and not meanwhile, in a thread: the processes
#: would find the signal that a folder is there by the number of their saves so far, which differs after a run that only
#: some of them saved.
ASYNC_OPTIONS = ocp.options.AsyncOptions(create_directories_asynchronously=False)


def save_frozen(folder: Path, params: Any, processes: ocp.options.MultiprocessingOptions) -> str:
  """Writes `params` in place of what `folder` holds, all or nothing; returns their `checksum`."""
  with ocp.StandardCheckpointer(multiprocessing_options=processes, async_options=ASYNC_OPTIONS) as checkpointer:
    checkpointer.save(folder, params, force=True)
  return checksum(params)


def restore_frozen(folder: Path, abstract: Any, processes: ocp.options.MultiprocessingOptions) -> tuple[Any, str]:
  """Reads parameters into the shardings of `abstract`; returns them and their `checksum`."""
  with ocp.StandardCheckpointer(multiprocessing_options=processes) as checkpointer:
    params = checkpointer.restore(folder, abstract)
  return params, checksum(params)


def checksum(params: Any) -> str:
  """A digest of names, shapes, dtypes and every bit of the values, whatever devices they are on."""
  sums = jax.device_get(jax.jit(lambda tree: jax.tree.map(sum_of_bits, tree))(params))
  leaves = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(sums), strict=True)
  text = [f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape} {int(value)}" for (path, x), value in leaves]
  return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]
