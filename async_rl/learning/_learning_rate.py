"""The learning rate of an optimizer that was given a schedule.

optax keeps a schedule in the closure of its update function, and nothing but a count in its state. So the update
functions of the schedules are looked up in the optimizer, and asked what they make of an update of 1.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

Array = jax.Array

#: Containers of more are no parts of an optimizer.
_MOST = 1000


def scheduled_rates(optimizer: optax.GradientTransformation, opt_state: optax.OptState) -> list[Array]:
  """Returns the rates that an update from this state applies, float32 [] each, in the order of the state.

  There is one for each `optax.scale_by_schedule`, which every optimizer of optax has whose learning rate is a schedule.
  Where the schedule of a state is not found, there are none.
  """
  schedules = list(_find_schedules(optimizer, {}))
  is_state = lambda x: isinstance(x, optax.ScaleByScheduleState)
  states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
  if len(schedules) != len(states):
    return []
  return [jnp.abs(update(jnp.float32(1.0), state)[0]) for update, state in zip(schedules, states, strict=True)]


def _find_schedules(node: Any, seen: dict[int, Any]) -> Iterator[Callable[..., Any]]:
  """Yields the update functions of all `optax.scale_by_schedule` in an optimizer, in the order of their states.

  Args:
    node: the optimizer, or what its update function holds.
    seen: by id what was looked into, which is looked into once: it may hold itself.
  """
  if isinstance(node, optax.GradientTransformation):
    node = node.update
  owner = node.__self__ if isinstance(node, types.MethodType) else node
  if id(owner) in seen:
    return
  seen[id(owner)] = owner  # alive, so that no other gets its id
  children: list[Any] = []
  if isinstance(node, types.FunctionType):
    if node.__module__.startswith("optax.") and node.__qualname__ == "scale_by_schedule.<locals>.update_fn":
      yield node
      return
    children = [cell.cell_contents for cell in node.__closure__ or () if cell != types.CellType()]
  elif isinstance(node, types.MethodType):
    children = list(vars(owner).values())
  elif isinstance(node, Mapping | tuple | list) and len(node) > _MOST:
    return
  elif isinstance(node, Mapping):
    children = [node[key] for key in sorted(node, key=str)]
  elif isinstance(node, tuple | list):
    children = list(node)
  for child in children:
    yield from _find_schedules(child, seen)
