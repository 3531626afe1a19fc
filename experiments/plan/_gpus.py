"""GPUs that are not at hand: programs are traced as they would run there, and compiled where JAX's CUDA plugin is."""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

#: What JAX asks cuDNN for where it is installed; only lowering depends on the number.
_CUDNN_VERSION = 91_400

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
#: What XLA's compiler asks of a GPU of the Hopper generation, but for its memory. From NVIDIA's data sheet of the H100
#: (SXM) and from the table of compute capability 9.0 in the CUDA programming guide.
_HOPPER = {
  "threads_per_block_limit": 1024,
  "threads_per_warp": 32,
  "threads_per_core_limit": 2048,
  "thread_dim_limit_x": 1024,
  "thread_dim_limit_y": 1024,
  "thread_dim_limit_z": 64,
  "block_dim_limit_x": 2**31 - 1,
  "block_dim_limit_y": 65535,
  "block_dim_limit_z": 65535,
  "registers_per_core_limit": 65536,
  "registers_per_block_limit": 65536,
  "shared_memory_per_block": 48 * 2**10,
  "shared_memory_per_block_optin": 227 * 2**10,
  "shared_memory_per_core": 228 * 2**10,
  "l2_cache_size": 50 * 2**20,
  "core_count": 132,
  "fpus_per_core": 128,
  "clock_rate_ghz": 1.98,
  "cuda_compute_capability": "{ major: 9 feature_extension: ACCELERATED_FEATURES }",
  "runtime_version": '"13.0.0"',
  "driver_version": '"13.0.0"',
  "device_vendor": '"NVIDIA Corporation"',
}


def compiler_version() -> str | None:
  """Returns name and version of JAX's CUDA plugin, which compiles for GPUs that are not there; `None` without one."""
  for name in _PLUGINS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      return f"{name} {importlib.metadata.version(name)}"
  return None


def described(kind: str, count: int, hbm: float, bandwidth: float) -> list[Any]:
  """Returns GPUs of one host that programs can be compiled for, as `compiler_version` tells.

  Args:
    kind: the name that JAX gives them.
    count: their number.
    hbm: the bytes of their memory.
    bandwidth: the bytes per second to and from it.

  Raises:
    ImportError: if JAX did not load its plugin.
  """
  from jax.experimental import topologies

  fields = _HOPPER | {"device_memory_size": int(hbm), "memory_bandwidth": int(bandwidth), "name": f'"{kind}"'}
  info = " ".join(f"{name}: {value}" for name, value in fields.items())
  target = f'platform_name: "CUDA" device_description_str: "{kind}" dnn_version_info {{ major: 9 minor: 10 }}'
  target += f" gpu_device_info {{ {info} }}"
  shape = f"1x1x{count}"  # slices, hosts and the GPUs of a host
  try:
    return list(topologies.get_topology_desc("", "cuda", topology=shape, target_config=target).devices)
  except NotImplementedError as error:
    raise ImportError(
      f"JAX did not load {compiler_version()}: reinstall jax[cuda13]=={jax.__version__}, or do without "
      "(--no-compile); where there is no GPU, set JAX_PLATFORMS=cpu, so that JAX asks for none."
    ) from error


class StandIn:
  """Stands for a GPU in a mesh: programs that are traced for it are those of a GPU.

  Attributes:
    id: its number.
    device_kind: the name that JAX gives it.
    platform: that of GPUs.
    compute_capability: Hopper's.
    process_index: 0, the one host.
    client: that of this process's devices.
  """

  platform = "gpu"
  compute_capability = "9.0"
  process_index = 0

  def __init__(self, number: int, kind: str):
    self.id = number
    self.device_kind = kind
    self.client = jax.devices()[0].client

  def __repr__(self) -> str:
    return f"{self.device_kind} {self.id}, not there"


@contextlib.contextmanager
def cudnn_as_there() -> Iterator[None]:
  """Lets JAX trace cuDNN's attention on machines without it: tracing asks for its version, and for the GPU at hand."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  versions = types.SimpleNamespace(cudnn_get_version=lambda: _CUDNN_VERSION)
  with (
    mock.patch.object(cudnn, "cuda_versions", versions),
    mock.patch.object(cudnn, "check_compute_capability", lambda capability: float(capability) <= 9.0),
    mock.patch.object(cudnn, "is_cuda_compute_capability_equal", lambda capability: capability == "9.0"),
  ):
    yield
