"""Groups and completions as a few flat numpy arrays, the form in which a checkpoint keeps them.

Ragged token arrays are concatenated, with their lengths beside them. Prompts are kept as ids: the task, which has
random access, gives them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.types import FAILED
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request

_FINISHES = (STOP, LENGTH, FAILED)
_TOKEN_FIELDS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "mask": np.bool_}

Arrays = dict[str, np.ndarray]


def completions_to_arrays(completions: Iterable[Completion]) -> Arrays:
  """Returns the completions as arrays: one entry per completion, or per token for the fields of tokens."""
  items = list(completions)
  arrays: Arrays = {
    "ticket": np.asarray([c.ticket for c in items], np.int64),
    "sample": np.asarray([c.sample for c in items], np.int32),
    "finish": np.asarray([_FINISHES.index(c.finish) for c in items], np.int8),
    "length": np.asarray([len(c.tokens) for c in items], np.int64),
  }
  for field, dtype in _TOKEN_FIELDS.items():
    arrays[field] = _concatenate([getattr(c, field) for c in items], dtype)
  return arrays


def completions_from_arrays(arrays: Arrays) -> list[Completion]:
  """Inverse of `completions_to_arrays`."""
  columns = {field: _split(arrays[field], arrays["length"]) for field in _TOKEN_FIELDS}
  return [
    Completion(
      ticket=int(arrays["ticket"][i]),
      sample=int(arrays["sample"][i]),
      finish=_FINISHES[arrays["finish"][i]],
      **{field: column[i] for field, column in columns.items()},
    )
    for i in range(len(arrays["ticket"]))
  ]


def groups_to_arrays(groups: Iterable[Group]) -> dict[str, Any]:
  """Returns the groups as arrays, their prompts by id."""
  items = list(groups)
  return {
    "ticket": np.asarray([g.request.ticket for g in items], np.int64),
    "prompt": np.asarray([g.request.prompt.id for g in items], np.int64),
    "prompt_length": np.asarray([len(g.request.tokens) for g in items], np.int64),
    "prompt_tokens": _concatenate([g.request.tokens for g in items], np.int32),
    "samples": np.asarray([len(g.completions) for g in items], np.int64),
    "rewards": _concatenate([g.rewards for g in items], np.float32),
    "failed": _concatenate([np.isin(np.arange(len(g.completions)), g.failed) for g in items], np.bool_),
    "completions": completions_to_arrays(c for g in items for c in g.completions),
  }


def groups_from_arrays(arrays: dict[str, Any], prompts: Sequence[Prompt] | Mapping[int, Prompt]) -> list[Group]:
  """Inverse of `groups_to_arrays`; `prompts[i]` is the task's prompt with id `i`."""
  prompt_tokens = _split(arrays["prompt_tokens"], arrays["prompt_length"])
  rewards, failed = (_split(arrays[field], arrays["samples"]) for field in ("rewards", "failed"))
  completions = completions_from_arrays(arrays["completions"])
  groups, start = [], 0
  for i, ticket in enumerate(arrays["ticket"]):
    stop = start + int(arrays["samples"][i])
    request = Request(int(ticket), prompt_tokens[i], prompts[int(arrays["prompt"][i])])
    samples = tuple(np.flatnonzero(failed[i]).tolist())
    groups.append(Group(request, tuple(completions[start:stop]), rewards[i], samples))
    start = stop
  return groups


def drawn_tokens(group: Group) -> int:
  """Number of tokens of the group that the policy drew: the unit of the ledger."""
  return sum(int(np.count_nonzero(c.mask)) for c in group.completions)


def failed_tokens(group: Group) -> int:
  """Number of drawn tokens that are not trained because the reward of their sample failed."""
  return sum(int(np.count_nonzero(group.completions[k].mask)) for k in group.failed)


def _concatenate(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
  return np.concatenate([np.asarray(p, dtype) for p in pieces]) if pieces else np.zeros(0, dtype)


def _split(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
  return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
