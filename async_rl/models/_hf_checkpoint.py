"""Hugging Face folders: reading them piece by piece, and writing them back."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from async_rl.models._files import explained
from async_rl.models._files import read_json_object
from async_rl.models._hf_config import read_hf_config
from async_rl.models._hf_config import write_hf_config
from async_rl.models._model_config import ModelConfig
from async_rl.models._param_forms import Params
from async_rl.models._tensor_names import hf_names
from async_rl.models._tensor_names import is_transposed
from async_rl.models._tensor_names import tensors_of
from async_rl.models._tokenizers import Tokenizer

Index = tuple[slice, ...]

_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
# The text model of a multimodal checkpoint sits below one of these.
_TEXT_PREFIX = re.compile(r"^(language_model\.model\.|model\.language_model\.|language_model\.(?=lm_head))")
_NOT_TEXT = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.|rotary_emb\.inv_freq$")


class HFCheckpoint:
  """A folder with config.json and safetensors, read when sliced.

  Attributes:
    config: the architecture.
    names: the tensors' names there, by our parameter paths.
    shapes: the shape of every parameter tensor, by its name there.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    folder = pathlib.Path(folder)
    content = read_json_object(folder / "config.json")
    try:
      self.config = read_hf_config(content)
    except ValueError as error:
      raise ValueError(f"{folder / 'config.json'}: {error}") from error
    self.names = hf_names(self.config)
    self.shapes: dict[str, tuple[int, ...]] = {}
    self._slices: dict[str, Any] = {}
    for file in _weight_files(folder):
      # The handle lives as long as the slices; it maps the file into memory and reads what is asked for.
      with explained(file):
        handle = safetensors.safe_open(file, framework="numpy")
      for stored in handle.keys():  # noqa: SIM118 (it is no dictionary)
        if _NOT_TEXT.search(stored) or (self.config.tie_embeddings and stored.endswith("lm_head.weight")):
          continue
        name = _TEXT_PREFIX.sub(lambda m: "" if m[0] == "language_model." else "model.", stored)
        self._slices[name] = handle.get_slice(stored)
        _check_dtype(stored, self._slices[name].get_dtype(), file)
        self.shapes[name] = tuple(self._slices[name].get_shape())

  def read(self, name: str, index: Index) -> np.ndarray:
    """Returns piece `index` of tensor `name`, in the file's dtype."""
    return self._slices[name][index]


def save_hf(
  folder: str | os.PathLike[str],
  config: ModelConfig,
  params: Params,
  *,
  dtype: str = "bfloat16",
  like: str | os.PathLike[str] | None = None,
  tokenizer: Tokenizer | None = None,
  shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a folder that `transformers` loads; complete or not at all.

  On several hosts all of them must call it; the first one writes.

  Args:
    folder: the folder to write, which must not exist.
    config: the architecture.
    params: the stacked parameters, in any dtype and sharding.
    dtype: the dtype to store, "bfloat16", "float16" or "float32".
    like: the Hugging Face folder that training started from. Its config.json, which knows more than `config`, its
      tokenizer and other small files are copied. Without it, only config.json is written beside the weights.
    tokenizer: the run's tokenizer, whose BOS, end and padding ids are written to config.json unless `like` has them;
      without any, readers assume those of the family's base model.
    shard_bytes: the size of a safetensors file, and of the host memory that is used.

  Raises:
    FileExistsError: if `folder` exists.
    ValueError: if no public architecture fits `config`, it is not that of `like`, or `params` have adapters.
  """
  folder = pathlib.Path(folder)
  if folder.exists():
    raise FileExistsError(f"{folder} exists; choose another folder or remove it.")
  if "adapters" in params:
    raise ValueError("The parameters have adapters, which this format cannot hold; apply merge_adapters first.")
  content = write_hf_config(config) | ({} if tokenizer is None else _special_ids(tokenizer))
  if like is not None:
    theirs = read_json_object(pathlib.Path(like) / "config.json")
    if read_hf_config(theirs) != dataclasses.replace(config, vocab_limit=None):
      raise ValueError(f"The model in {like} has another architecture: {read_hf_config(theirs)}, not {config}.")
    if "text_config" not in theirs:  # of a multimodal model only the text part is written
      theirs.pop("dtype", None)
      content = theirs
  writes = jax.process_index() == 0
  partial = folder.with_name(folder.name + ".partial")
  if writes:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if like is not None:
      _copy_small_files(pathlib.Path(like), partial)
    (partial / "config.json").write_text(json.dumps(content | {"torch_dtype": dtype}, indent=2) + "\n")
  _save_weights(partial, params, hf_names(config), np.dtype(dtype), shard_bytes, writes)
  if writes:
    partial.rename(folder)


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns the entries of config.json that name special tokens; an absent BOS is null, lest readers assume one."""
  stops = list(tokenizer.stop_ids)
  return {
    "bos_token_id": tokenizer.bos_id,
    "eos_token_id": stops if len(stops) > 1 else stops[0],
    "pad_token_id": tokenizer.pad_id,
  }


def _check_dtype(name: str, dtype: str, file: pathlib.Path) -> None:
  if dtype not in _DTYPES:
    raise ValueError(
      f"{name} in {file} has dtype {dtype}, as quantized weights do; use the model's weights in one of "
      f"{', '.join(_DTYPES)}."
    )


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  if (folder / _INDEX).exists():
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
      raise ValueError(f"{folder / _INDEX} lacks weight_map, the file of each tensor; fetch it again.")
    files = sorted(set(weight_map.values()))
  else:
    files = ["model.safetensors"]
  missing = [file for file in files if not (folder / file).is_file()]
  if missing:
    raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; weights must be in safetensors files.")
  return [folder / file for file in files]


def _copy_small_files(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the tokenizer, chat template and generation defaults: everything but weights."""
  for file in source.iterdir():
    if file.is_file() and file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != _INDEX:
      shutil.copyfile(file, target / file.name)


def _save_weights(
  folder: pathlib.Path, params: Params, names: dict[str, str], dtype: np.dtype, shard_bytes: int, writes: bool
) -> None:
  tensors = list(tensors_of(params, names))
  files: list[list[Any]] = [[]]
  used = 0
  for tensor in tensors:
    size = tensor.size * dtype.itemsize
    if files[-1] and used + size > shard_bytes:
      files.append([])
      used = 0
    files[-1].append(tensor)
    used += size
  weight_map = {}
  for number, file in enumerate(files, 1):
    name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
    content = {}
    for tensor in file:
      value = _to_host(tensor.take().astype(dtype))
      content[tensor.stored] = np.ascontiguousarray(value.T if is_transposed(tensor.name) else value)
      weight_map[tensor.stored] = name
    if writes:
      safetensors.numpy.save_file(content, folder / name, metadata={"format": "pt"})
      shutil.copymode(folder / "config.json", folder / name)  # the library writes files that only their owner reads
  if writes and len(files) > 1:
    total = sum(tensor.size for tensor in tensors) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _to_host(array: jax.Array) -> np.ndarray:
  if array.is_fully_addressable:
    return np.asarray(array)
  from jax.experimental import multihost_utils

  return multihost_utils.process_allgather(array, tiled=True)
