"""GPUs that are not at hand, for which programs can be traced as they would run there, but not compiled."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from unittest import mock

import jax

#: What JAX asks cuDNN for where it is installed; only lowering depends on the number.
_CUDNN_VERSION = 91_400


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
