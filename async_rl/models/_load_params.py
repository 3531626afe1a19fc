"""Loading public checkpoints into the policy's parameters, each device's shard by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any
from typing import Protocol

import jax
import numpy as np
import tqdm

from async_rl._buckets import cache_folder
from async_rl._buckets import copy_to_disk
from async_rl._paths import as_path
from async_rl.models._gguf_checkpoint import GGUFCheckpoint
from async_rl.models._gguf_checkpoint import packaged_gguf
from async_rl.models._hf_checkpoint import HFCheckpoint
from async_rl.models._model_config import ModelConfig
from async_rl.models._param_forms import Params
from async_rl.models._policy import Policy
from async_rl.models._sharding import path_name
from async_rl.models._tensor_names import is_stacked
from async_rl.models._tensor_names import is_transposed
from async_rl.models._tensor_names import tensors_of

Index = tuple[slice, ...]


class Checkpoint(Protocol):
  """Gives the weights of some file format by their names there.

  Attributes:
    config: the architecture.
    names: the format's tensor names, by our parameter paths; "{}" stands for the layer's number.
    shapes: the shape of every parameter tensor, by its name; matrices are [out, in].
  """

  config: ModelConfig
  names: dict[str, str]
  shapes: dict[str, tuple[int, ...]]

  def read(self, name: str, index: Index) -> np.ndarray:
    """Returns a piece of one tensor, reading no more of the file than it needs."""


def weights_cache() -> pathlib.Path:
  """Returns the folder of fetched weights: `weights` in $ASYNC_RL_CACHE, by default in ~/.cache/async_rl."""
  return cache_folder() / "weights"


def find_weights(name: str | os.PathLike[str]) -> pathlib.Path:
  """Finds weights by a path or by the name under which `python -m experiments.fetch_weights` fetched them.

  Args:
    name: a Hugging Face folder or a GGUF file, on a disk or in a bucket, the name of fetched weights (see
      `weights_cache`), or an installed distribution that carries a GGUF file (see `packaged_gguf`).

  Returns:
    The path of the folder or file on the disk, for `open_checkpoint`; what was in a bucket is copied to the disk.

  Raises:
    FileNotFoundError: if there is no such folder or file, and no weights of this name.
  """
  path = copy_to_disk(as_path(name, "weights"))
  if path.exists():
    return path
  if len(path.parts) > 2 or path.is_absolute() or ".." in path.parts or path.suffix == ".gguf":
    raise FileNotFoundError(f"There are no weights at {path}: no such file or folder.")
  fetched = weights_cache() / path
  if fetched.is_dir():
    return next(fetched.glob("*.gguf"), fetched)
  with contextlib.suppress(FileNotFoundError):
    return packaged_gguf(str(name))
  raise FileNotFoundError(
    f"There are no weights {str(name)!r}: no such file or folder, and none of this name were fetched; "
    f"run `python -m experiments.fetch_weights {name}`."
  )


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
  """Opens a Hugging Face folder or a GGUF file for `load_params`; reads the architecture, no weights yet.

  Raises:
    ValueError: if `path` is no checkpoint, or of an architecture that is not supported.
  """
  path = pathlib.Path(path)
  if path.suffix == ".gguf":
    return GGUFCheckpoint(path)
  if (path / "config.json").is_file():
    return HFCheckpoint(path)
  raise ValueError(f"{path} is no checkpoint: expected a .gguf file, or a folder with config.json and safetensors.")


def load_params(
  checkpoint: Checkpoint, shardings: Any = None, *, dtype: str = "float32", progress: bool | None = None
) -> Params:
  """Loads the checkpoint's weights as parameters of `Policy(checkpoint.config)`, layers stacked.

  Each device's shard is read by itself, so that host memory holds one shard of one parameter at a time and no
  device holds more than its shards.

  Args:
    checkpoint: the checkpoint, from `open_checkpoint`.
    shardings: the tree of shardings, such as `param_shardings(Policy.abstract())`, with adapters or without; `None`
      puts everything on the first device.
    dtype: the dtype of the parameters.
    progress: whether to show a progress bar; `None` shows it on a terminal.

  Raises:
    ValueError: if tensors are missing, left over or misshapen; the message names them.
  """
  abstract = Policy(checkpoint.config).abstract()
  if shardings is None:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: here, abstract)
  check_tensors(checkpoint, abstract)
  total = sum(leaf.size for leaf in jax.tree.leaves(abstract)) * np.dtype(dtype).itemsize
  disable = None if progress is None else not progress
  with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=disable) as bar:

    def load(path, leaf, sharding):
      read = _reader(checkpoint, path_name(path), leaf.shape, np.dtype(dtype))
      array = jax.block_until_ready(jax.make_array_from_callback(leaf.shape, sharding, read))
      bar.update(array.nbytes)
      return array

    return jax.tree_util.tree_map_with_path(load, abstract, {part: shardings[part] for part in abstract})


def check_tensors(checkpoint: Checkpoint, params: Params) -> None:
  """Raises a ValueError that names the tensors which are missing, left over or of another shape than `params`."""
  expected = {tensor.stored: tensor.shape for tensor in tensors_of(params, checkpoint.names)}
  found = checkpoint.shapes
  problems = [f"missing {name} {expected[name]}" for name in expected if name not in found]
  problems += [f"left over {name} {found[name]}" for name in found if name not in expected]
  problems += [
    f"{name} is {found[name]}, expected {shape}" for name, shape in expected.items() if found.get(name, shape) != shape
  ]
  if problems:
    shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
    raise ValueError(f"The checkpoint's tensors do not fit its architecture: {shown}.")


def _reader(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Any], np.ndarray]:
  """Returns a function from an index into our parameter `name` to the values there."""
  template = checkpoint.names[name]
  transposed = is_transposed(name)

  def read_one(tensor: str, index: Index) -> np.ndarray:
    piece = checkpoint.read(tensor, index[::-1] if transposed else index)
    values = (piece.T if transposed else piece).astype(dtype)
    if not np.isfinite(values).all():
      raise ValueError(f"{tensor} holds values that are not finite in {dtype}; use other weights.")
    return values

  def read_stack(index: Index) -> np.ndarray:
    layers = range(shape[0])[index[0]]
    out = np.empty([len(range(size)[i]) for size, i in zip(shape, index, strict=True)], dtype)
    for i, layer in enumerate(layers):
      out[i] = read_one(template.format(layer), index[1:])
    return out

  return read_stack if is_stacked(name) else functools.partial(read_one, template)
