"""Groups of all processes of a run, which travel as the bytes of an archive."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from async_rl import tasks
from async_rl.recording._archive import from_archive
from async_rl.recording._archive import to_archive
from async_rl.rollout._completion_arrays import groups_from_arrays
from async_rl.rollout._completion_arrays import groups_to_arrays
from async_rl.rollout._conversations import ScoredGroup
from async_rl.runtime._hosts import Hosts
from async_rl.runtime._watch import LOST_STATUS
from async_rl.runtime._watch import REMEDY
from async_rl.runtime._watch import HostError
from async_rl.types import Group
from async_rl.types import Prompt


def gather_groups(
  hosts: Hosts, own: list[Group], checksums: Mapping[int, int], prompts: Sequence[Prompt] | Mapping[int, Prompt]
) -> list[Group]:
  """Returns the groups of all processes, ordered by ticket.

  Args:
    hosts: the processes.
    own: the groups of this process, ordered by ticket.
    checksums: those of the weights that drew tokens in this process lately, by version; see `Ledger.weights`.
    prompts: the prompts by id.

  Raises:
    HostError: in all processes, if weights of one version had different checksums in two of them.
  """
  if hosts.count == 1:
    return own
  tree = {"groups": groups_to_arrays(own), "checksums": {str(v): checksum for v, checksum in checksums.items()}}
  archives = [from_archive(archive) for archive in hosts.gather(to_archive(tree))]
  _check_weights([archive["checksums"] for archive in archives])
  groups = [group for archive in archives for group in groups_from_arrays(archive["groups"], prompts)]
  return sorted(groups, key=_ticket)


def gather_scored(
  hosts: Hosts, own: list[ScoredGroup], proxies: list[float], prompts: Sequence[Prompt]
) -> tuple[list[ScoredGroup], list[float]]:
  """Returns the scored groups of all processes, ordered by ticket, and the values of their samples, likewise.

  Args:
    hosts: the processes.
    own: the groups of this process, ordered by ticket.
    proxies: one more value of each sample, or none at all.
    prompts: the prompts of the groups.
  """
  if hosts.count == 1:
    return own, proxies
  by_id = {prompt.id: prompt for prompt in prompts}
  values = [[result.value for result in group.results] for group in own]
  groups = [
    Group(g.request, g.completions, np.array(v), tuple(k for k, r in enumerate(g.results) if r.failed))
    for g, v in zip(own, values, strict=True)
  ]
  left = iter(proxies)
  tree = {
    "groups": groups_to_arrays(groups),
    "values": values,
    "reasons": [[result.reason for result in group.results] for group in own],
    "proxies": [list(itertools.islice(left, len(group.results))) for group in own],
  }
  scored = []
  for archive in map(from_archive, hosts.gather(to_archive(tree))):
    columns = [archive[name] for name in ("values", "reasons", "proxies")]
    for group, of_group, reasons, proxy in zip(groups_from_arrays(archive["groups"], by_id), *columns, strict=True):
      results = [
        tasks.RewardResult(value, k in group.failed, reason)
        for k, (value, reason) in enumerate(zip(of_group, reasons, strict=True))
      ]
      scored.append((ScoredGroup(group.request, group.completions, tuple(results)), proxy))
  scored.sort(key=_ticket_of_scored)
  return [group for group, _ in scored], [value for _, of_group in scored for value in of_group]


def _check_weights(checksums: Sequence[Mapping[str, int]]) -> None:
  """Checks that the weights of each version had one checksum in all processes that drew with them."""
  for version in sorted({version for of_process in checksums for version in of_process}, key=int):
    processes: dict[int, list[str]] = {}
    for index, of_process in enumerate(checksums):
      if version in of_process:
        processes.setdefault(of_process[version], []).append(str(index))
    if len(processes) > 1:
      found = ", ".join(f"{checksum:08x} in process {' and '.join(of)}" for checksum, of in processes.items())
      raise HostError(
        f"the processes sampled with different weights of step {version} (checksums {found}), so that the memory or a "
        f"copy of one is damaged; {REMEDY}",
        LOST_STATUS,
      )


def _ticket(group: Group) -> int:
  return group.request.ticket


def _ticket_of_scored(item: tuple[ScoredGroup, list[float]]) -> int:
  return item[0].request.ticket
