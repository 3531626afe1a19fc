"""Compiles programs for devices that are not there, and keeps what comes of it: what is counted anew stays compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
from typing import Any

import jax

from async_rl._buckets import cache_folder
from experiments.plan._gpus import compiler_version


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler made of a program.

  Attributes:
    text: the compiled program; `None` if it is one for GPUs, or of a libtpu whose programs this jaxlib cannot read.
    memory: the fields of `Summary` that tell of memory, in bytes.
  """

  text: str | None
  memory: dict[str, float]


class DoesNotFit(RuntimeError):
  """A program needs more memory than its devices have; with the compiler's words."""


def programs_folder() -> pathlib.Path:
  """Returns the folder of compiled programs: `plans` in $ASYNC_RL_CACHE, by default ~/.cache/async_rl."""
  return cache_folder() / "plans"


def compile_program(lowered: jax.stages.Lowered, devices: list[Any]) -> Compiled:
  """Compiles a program for its devices, or takes it from the folder of compiled programs.

  Where that folder cannot be written, programs are compiled anew each time.

  Args:
    lowered: the program.
    devices: the devices of its mesh, in order.

  Raises:
    DoesNotFit: if the memory does not suffice.
    Exception: whatever else the compiler says.
  """
  file = programs_folder() / f"{_key(lowered.as_text(), devices)}.json.gz"
  if file.exists():
    kept = json.loads(gzip.decompress(file.read_bytes()))
  else:
    kept = _compile(lowered, readable=devices[0].platform == "tpu")
    with contextlib.suppress(OSError):
      _write(file, gzip.compress(json.dumps(kept).encode(), 5))
  if "error" in kept:
    raise DoesNotFit(kept["error"])
  return Compiled(**kept)


def _compile(lowered: jax.stages.Lowered, readable: bool) -> dict[str, Any]:
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return {"error": str(error)}  # as certain, and as long in the making, as a program
  memory = compiled.memory_analysis()
  assert memory is not None
  return {
    "text": _text_of(compiled) if readable else None,
    "memory": {
      "arguments": memory.argument_size_in_bytes,
      "outputs": memory.output_size_in_bytes,
      "aliased": memory.alias_size_in_bytes,
      "temporaries": memory.temp_size_in_bytes,
      "code": memory.generated_code_size_in_bytes,
    },
  }


def _text_of(compiled: jax.stages.Compiled) -> str | None:
  try:
    return compiled.as_text()
  except jax.errors.JaxRuntimeError:
    return None


def _write(file: pathlib.Path, content: bytes) -> None:
  """Writes a file at once: others may look for it, and its writer may be killed."""
  file.parent.mkdir(parents=True, exist_ok=True)
  part = file.with_suffix(f".{os.getpid()}.part")
  part.write_bytes(content)
  part.replace(file)


def _key(text: str, devices: list[Any]) -> str:
  """Returns a name of a program for a set of devices, and of the compiler with its flags."""
  text = re.sub(r"loc\(.*?\)|#loc.*", "", text)
  places = [
    (d.device_kind, d.id, d.process_index, getattr(d, "coords", None), getattr(d, "slice_index", 0)) for d in devices
  ]
  for_tpus = devices[0].platform == "tpu"
  version = importlib.metadata.version("libtpu") if for_tpus else compiler_version()
  compiler = str(version), jax.__version__, *os.environ.get("LIBTPU_INIT_ARGS", "").split()
  return hashlib.sha256("\0".join((text, str(places), *compiler)).encode()).hexdigest()[:32]
