"""Runs of benchmarks in processes of their own, each on some of the machine's devices."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Sequence


def run_on_devices(
  command: Sequence[str], devices: Sequence[int], cache: pathlib.Path, *, forced: bool, **variables: str
) -> None:
  """Runs a command in a process that finds these devices alone.

  Args:
    command: the command and its arguments.
    devices: the numbers of the GPUs, among those that CUDA_VISIBLE_DEVICES leaves to this process.
    cache: the folder of the compiled programs that several processes share.
    forced: whether the process is given as many forced CPU devices instead.
    **variables: further variables of its environment.

  Raises:
    ValueError: if CUDA_VISIBLE_DEVICES leaves too few devices.
    RuntimeError: if it fails; the message ends with the last that it wrote.
  """
  # Small programs are kept, too, as a run does in a folder of its own.
  kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  environment = os.environ | kept | variables
  if forced:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={len(devices)}"
    environment["XLA_FLAGS"] = flags
  else:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    needed = max(devices) + 1
    names = [*map(str, range(needed))] if visible is None else [name for name in visible.split(",") if name]
    if needed > len(names):
      raise ValueError(f"CUDA_VISIBLE_DEVICES={visible} must name {needed} devices or more, got {len(names)}.")
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in devices)
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
