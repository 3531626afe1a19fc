"""Defines the map of GAC: thresholds, and what the paper leaves open, on top of several corrections.

All choices of `stabilizers.control_alignment` are one program, as all methods of the sweep are: `control_alignment`
here computes the projection of every choice, which costs a few passes over the gradient, and runs the optimizer once.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from async_rl import stabilizers


class Choice(NamedTuple):
  """What the paper leaves open, as `stabilizers.control_alignment` takes it."""

  kappa: str = "cap"
  previous: str = "raw"
  refresh_on_skip: bool = True


#: Every choice; the first one is the library's default.
CHOICES = tuple(
  itertools.starmap(Choice, itertools.product(("cap", "remove", "match"), ("raw", "projected"), (True, False)))
)
LOWS, HIGHS = (0.05, 0.1, 0.2), (0.2, 0.4, 0.8)
#: The thresholds at which every choice is tried: those that project most and skip most, and a pair in the middle.
TRIED = ((0.05, 0.2), (0.1, 0.4))
#: The corrections that GAC is put on.
BASES = ("no correction", "seq TIS", "TOPR")


class State(NamedTuple):
  alignment: optax.OptState  # of `stabilizers.control_alignment`
  inner: optax.OptState


def control_alignment(
  inner: optax.GradientTransformationExtraArgs, low: Any, high: Any, choice: int | jax.Array
) -> optax.GradientTransformationExtraArgs:
  """Returns `stabilizers.control_alignment` of *inner* with thresholds and the index of a choice that may be traced."""
  every = [stabilizers.control_alignment(optax.identity(), low, high, **x._asdict()) for x in CHOICES]

  def init(params: optax.Params) -> State:
    return State(every[0].init(params), inner.init(params))

  def update(
    updates: optax.Updates, state: State, params: optax.Params | None = None, **extra: Any
  ) -> tuple[optax.Updates, State]:
    update_fns = [x.update for x in every]
    chosen = update_fns[choice] if isinstance(choice, int) else functools.partial(jax.lax.switch, choice, update_fns)
    projected, alignment = chosen(updates, state.alignment)
    stepped = inner.update(projected, state.inner, params, **extra)
    kept = (optax.tree.zeros_like(updates), state.inner)
    skipped = alignment.alignment_regime == stabilizers.AlignmentRegime.SKIPPED
    updates, new = jax.tree.map(lambda x, y: jnp.where(skipped, x, y), kept, stepped)
    return updates, State(alignment, new)

  return optax.GradientTransformationExtraArgs(init, update)


def _text(threshold: float) -> str:
  return f"{threshold:g}".removeprefix("0")


def name(base: str, low: float, high: float, choice: int = 0) -> str:
  """Returns the name of a method of the map.

  >>> name("TOPR", 0.05, 0.2, 3)
  'TOPR + GAC .05/.2, projected, frozen'
  """
  changed = [value if isinstance(value, str) else "frozen" for value in CHOICES[choice] if value not in Choice()]
  return ", ".join([f"{base} + GAC {_text(low)}/{_text(high)}", *changed])


def at_random(method: str) -> str:
  """Returns the name of the control of a method of the map: it skips as many steps, at random, and projects none."""
  return f"{method}, at random"


def thresholds(base: str) -> dict[str, dict[str, Any]]:
  """Returns the knobs of GAC on a correction by name, for all thresholds and the default choice."""
  return {name(base, low, high): {"align_low": low, "align_high": high} for low in LOWS for high in HIGHS}


def choices(base: str) -> dict[str, dict[str, Any]]:
  """Returns the knobs of GAC on a correction by name, for every other choice at the thresholds of `TRIED`."""
  return {
    name(base, low, high, i): {"align_low": low, "align_high": high, "alignment": i}
    for low, high in TRIED
    for i in range(1, len(CHOICES))
  }
