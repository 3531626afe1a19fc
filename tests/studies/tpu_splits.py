"""Compiles one program for the chips of every split that TPU slices are given, and shows which splits are refused.

Command: python tests/studies/tpu_splits.py    (needs the package libtpu, and no TPU)
Hardware and time: one CPU core, 3 minutes.
Result: a line per topology and number of generation chips of a host, and of hosts that only generate, "learns and
generates" or "refused"; the exit status is 1 if the compiler refuses a split that `make_meshes` does not, or aborts on
it.

For each split of a slice the learners exchange an array along both axes of a mesh, and so do the generation chips of
the first and of the last host. The compiler may abort, so that every topology is compiled in a process of its own. A
topology with "one host" has all of its chips on one, as the machines with eight v5e or v6e chips have.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLANAR = ("2x2", "2x4 one host", "2x4", "4x4", "4x8", "8x8")
TORI = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
TOPOLOGIES = tuple(f"{kind}:{shape}" for kind in ("v5e", "v6e") for shape in PLANAR) + tuple(
  f"{kind}:{shape}" for kind in ("v4", "v5p") for shape in TORI
)


def compile_splits(topology: str) -> Iterator[tuple[str, str]]:
  """Yields each split of a topology with "…" before it is compiled, and with its outcome afterwards. May abort."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec

  from async_rl.rollout._mesh import make_mesh
  from async_rl.rollout._mesh import split_devices

  def exchange(x):
    return jax.lax.psum(jax.lax.psum_scatter(jax.lax.all_gather(x, "fsdp"), "fsdp"), "data")

  jax.config.update("jax_enable_compilation_cache", False)  # what is for absent devices cannot be read back
  name, _, one_host = topology.partition(" ")
  bounds = {"chips_per_host_bounds": (*map(int, name.partition(":")[2].split("x")), 1)} if one_host else {}
  chips = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds).devices
  hosts = {chip.process_index for chip in chips}
  size = len(chips) // len(hosts)
  splits = [(f"{count} of {size} chips of every host generate", count, None) for count in range(1, size)]
  splits += [(f"{count} hosts generate", None, count) for count in range(1, len(hosts))]
  for label, generation, sampling_hosts in splits:
    split = f"{topology}, {len(hosts)} hosts, {label}"
    yield split, "…"
    try:
      generating = [split_devices(chips, generation, host, sampling_hosts)[0] for host in (min(hosts), max(hosts))]
      learning = split_devices(chips, generation, 0, sampling_hosts)[1]
    except ValueError:
      yield split, "refused"
      continue
    for devices in (learning, *generating):
      mesh = make_mesh(devices, fsdp=2 if len(devices) % 2 == 0 else 1)
      spec = PartitionSpec("data", "fsdp")
      array = jax.ShapeDtypeStruct((len(devices), 2, 128), jnp.float32, sharding=NamedSharding(mesh, spec))
      jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)).lower(
        array
      ).compile()
    yield split, "learns and generates"


def outcomes(topology: str) -> dict[str, str]:
  """Returns the outcome of every split of a topology; what did not compile ends with the compiler's last words."""
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud machine's metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it only compiles, so that others may do so, too
  }
  command = [sys.executable, __file__, "--compile", topology]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  found = dict(line.split("\t") for line in done.stdout.splitlines())
  return found if done.returncode == 0 else found | {topology: done.stderr[-1000:]}


def main() -> int:
  if sys.argv[1:2] == ["--compile"]:
    for split, outcome in compile_splits(sys.argv[2]):
      print(f"{split}\t{outcome}", flush=True)
    return 0
  failed = False
  for topology in sys.argv[1:] or TOPOLOGIES:
    for split, outcome in outcomes(topology).items():
      print(f"{split}: {outcome}", flush=True)
      failed |= outcome not in ("refused", "learns and generates")
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
