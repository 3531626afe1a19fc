"""The start and the end of a run's processes: they are found, connected, compared, and end together."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import NoReturn

import jax

import async_rl
from async_rl.recording._run_folder import differences
from async_rl.runtime._compilation_cache import compilation_cache
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._hosts import JoinedHosts
from async_rl.runtime._options import Devices
from async_rl.runtime._signals import StopSignal
from async_rl.runtime._watch import HostError
from async_rl.runtime._watch import Watch

#: Seconds after which JAX itself takes a silent process for dead, and ends the others.
_HEARTBEAT_SECONDS = 45
#: Seconds for which a process that ends without `leave` waits for the others.
_SHUTDOWN_SECONDS = 20
#: Environments in which JAX finds the processes of a job; a pod of Kubernetes alone says nothing of a job.
_ENVIRONMENTS = ("gketpu", "gcetpu", "slurm", "ompi")


@contextlib.contextmanager
def join_hosts(devices: Devices) -> Iterator[Hosts]:
  """Connects this process with the others of its run, and ends them together.

  Call it before anything else of JAX. It also turns the compilation cache on, unless `devices` says otherwise. The
  processes are those that `devices` names, else those that the environment names, on TPUs and under Slurm or Open MPI;
  where there is only one, nothing happens.

  Args:
    devices: the options that may name the coordinator, the number of processes and this process.

  Yields:
    The processes.

  Raises:
    HostError: if another process failed or was lost inside of the context.
  """
  with compilation_cache(devices.compilation_cache), _joined(devices) as hosts:
    yield hosts


@contextlib.contextmanager
def _joined(devices: Devices) -> Iterator[Hosts]:
  """Does what `join_hosts` says but for the cache."""
  if not jax.distributed.is_initialized() and not _initialize(devices):
    yield Hosts()
    return
  stop = StopSignal()
  watch = Watch(stop)
  try:
    hosts = JoinedHosts(stop, watch)
    yield hosts
    hosts.barrier()
  except BaseException as error:
    cause = watch.find_cause(error)
    watch.announce(error)
    watch.close(failed=True)
    if cause is None or cause is error:
      raise
    raise cause from error
  watch.close(failed=False)
  jax.distributed.shutdown()


def leave(status: int) -> NoReturn:
  """Ends this process with an exit status.

  One of several processes that fails ends at once: JAX would wait for the others, which may be gone.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  if jax.distributed.is_initialized():
    os._exit(status)
  sys.exit(status)


def check_same(hosts: Hosts, started_with: Mapping[str, Any]) -> None:
  """Refuses processes that were started with other options or other code than the first one.

  Args:
    hosts: the processes.
    started_with: the options of this process: a JSON-like mapping.

  Raises:
    HostError: in all processes; the message names the process and the differences.
  """
  if hosts.count == 1:
    return
  mine = {**started_with, "jax": jax.__version__, "code of async_rl": _source_hash()}
  first, *others = map(json.loads, hosts.gather(json.dumps(mine).encode()))
  for index, other in enumerate(others, start=1):
    if changes := list(differences(first, other)):
      raise HostError(
        f"process {index} was not started like process 0 ({'; '.join(changes)}): start all with the same options and "
        "the same code",
        status=2,
      )


def _initialize(devices: Devices) -> bool:
  """Connects the processes; returns False if there is only this one."""
  found: dict[str, Any]
  if devices.num_processes is not None:
    found = {
      "coordinator_address": devices.coordinator,
      "num_processes": devices.num_processes,
      "process_id": devices.process_id,
      "cluster_detection_method": "deactivate",
    }
    count = devices.num_processes
  else:
    name, count = _find_environment()
    found = {"cluster_detection_method": name}
  if count == 1:
    return False
  if platforms := getattr(jax.config, "jax_platforms", None):  # processes exchange over CPU devices
    jax.config.update("jax_platforms", ",".join(dict.fromkeys([*platforms.split(","), "cpu"])))
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
  jax.distributed.initialize(
    heartbeat_timeout_seconds=_HEARTBEAT_SECONDS, shutdown_timeout_seconds=_SHUTDOWN_SECONDS, **found
  )
  return True


def _find_environment() -> tuple[str, int]:
  """Returns the name of the environment in which JAX finds several processes, and their number; ("", 1) for none."""
  from jax._src.clusters import ClusterEnv  # JAX has no public name for the question

  for kind in ClusterEnv._cluster_types:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      if kind.name in _ENVIRONMENTS and kind.is_env_present():
        return kind.name, kind.get_process_count()
  return "", 1


@functools.cache
def _source_hash() -> str:
  """Returns a digest of the package's source files."""
  folder = pathlib.Path(async_rl.__file__).parent
  digest = hashlib.sha256()
  for file in sorted(folder.rglob("*.py")):
    digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
  return digest.hexdigest()[:16]
