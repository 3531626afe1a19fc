"""Trees of numpy arrays and JSON values as bytes, in checkpoints and between processes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_archive(tree: Any) -> bytes:
  """Returns the arrays of a tree as a numpy archive, with the tree around them as JSON. Nothing is pickled.

  Args:
    tree: nested dicts and lists of numpy arrays, numbers, strings, booleans and None.
  """
  arrays: dict[str, np.ndarray] = {}

  def encode(node: Any) -> Any:
    if isinstance(node, np.ndarray):
      name = str(len(arrays))
      # numpy does not know the types that JAX adds, such as bfloat16: their bits are kept, and their name.
      arrays[name] = node.view(f"u{node.itemsize}") if node.dtype.kind == "V" else node
      return {"array": name, "dtype": node.dtype.name}
    if isinstance(node, Mapping):
      return {"dict": {key: encode(value) for key, value in node.items()}}
    if isinstance(node, list | tuple):
      return [encode(value) for value in node]
    return node.item() if isinstance(node, np.generic) else node

  text = json.dumps(encode(tree)).encode()
  archive = io.BytesIO()
  np.savez(archive, tree=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]
  return archive.getvalue()


def from_archive(archive: bytes) -> Any:
  """Returns the tree of an archive: tuples have become lists, and numpy scalars Python's."""
  with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:

    def decode(node: Any) -> Any:
      if isinstance(node, list):
        return [decode(value) for value in node]
      if isinstance(node, dict) and "array" in node:
        return arrays[node["array"]].view(np.dtype(node["dtype"]))
      if isinstance(node, dict):
        return {key: decode(value) for key, value in node["dict"].items()}
      return node

    return decode(json.loads(arrays["tree"].tobytes()))
