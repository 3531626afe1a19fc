"""The states of the processes of a run in a checkpoint, one file each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from async_rl.recording._archive import from_archive


class HostHandler(ocp.CheckpointHandler):
  """Keeps one numpy archive per process."""

  def save(self, directory: Any, args: HostSave) -> None:
    for process, archive in args.archives.items():
      _host_file(directory, process).write_bytes(archive)

  def restore(self, directory: Any, args: Any = None) -> list[dict[str, Any]]:
    del args
    processes = len(list(directory.glob("process_*.npz")))
    return [from_archive(_host_file(directory, i).read_bytes()) for i in range(processes)]


@ocp.args.register_with_handler(HostHandler, for_save=True)
@dataclasses.dataclass
class HostSave(ocp.args.CheckpointArgs):
  """What to save: archives, from `to_archive`, by the number of the process."""

  archives: Mapping[int, bytes]


@ocp.args.register_with_handler(HostHandler, for_restore=True)
@dataclasses.dataclass
class HostRestore(ocp.args.CheckpointArgs):
  """Restores the states of all processes, in their order."""


def _host_file(directory: Any, process: int) -> Any:
  return directory / f"process_{process}.npz"
