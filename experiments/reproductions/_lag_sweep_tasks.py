"""Puts the sweep's tasks on the device: token arrays of their problems, and exact rewards as functions of tokens."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from async_rl import models
from async_rl import tasks
from experiments.reproductions._lag_sweep_sorting import Sorting

Array = jax.Array

#: The number of ways to write a problem's solution that the warm start draws from.
VARIANTS = 4


class Problems(NamedTuple):
  """Problems of a split; every prompt has Q tokens and every solution C, the end token included.

  Attributes:
    prompts: the prompts, int32 [P, Q].
    solutions: the solutions, int32 [P, VARIANTS, C].
  """

  prompts: Array
  solutions: Array


@dataclasses.dataclass(frozen=True)
class Setting:
  """A task with the sizes that its runs have; hashable.

  Attributes:
    task: the task, `tasks.Sums`, `tasks.CountdownSteps` or `Sorting`.
    model: the architecture; its vocabulary is the task's symbols, then the end token, then padding.
    groups: the number of prompts of an update.
    samples: the number of completions of a prompt.
    steps: the number of updates of a run.
    probe_every: the updates between two measurements of the current policy's accuracy, and the curves' resolution.
    probe_prompts: the number of held-out prompts of such a measurement, one completion each.
    warm_accuracy: the accuracy at which the supervised warm start ends.
    warm_every: the supervised updates between two evaluations of it.
  """

  task: Any
  model: models.ModelConfig
  groups: int = 32
  samples: int = 8
  steps: int = 400
  probe_every: int = 10
  probe_prompts: int = 512
  warm_accuracy: float = 0.2
  warm_every: int = 10

  @property
  def completion_tokens(self) -> int:
    return _RULES[type(self.task)].tokens(self.task.numbers)

  @property
  def end(self) -> int:
    """Returns the id of the end token."""
    return len(symbols(self.task))

  def policy(self, dtype: str) -> models.Policy:
    return models.Policy(self.model, dtype=dtype, attention="xla")


def _model(symbols: int, d_model: int, num_layers: int) -> models.ModelConfig:
  vocab = symbols + 1
  return models.ModelConfig(
    vocab_size=-(-vocab // 8) * 8, vocab_limit=vocab, d_model=d_model, num_layers=num_layers, num_heads=4,
    num_kv_heads=4, head_dim=d_model // 4, d_ff=3 * d_model,
  )  # fmt: skip


SETTINGS = {
  "ch4": Setting(tasks.Sums(numbers=4), _model(13, 128, 3)),
  "cd4": Setting(tasks.CountdownSteps(numbers=4), _model(107, 128, 3)),
  "ch3": Setting(tasks.Sums(numbers=3), _model(13, 64, 2), groups=16, steps=200),
  "ch4wide": Setting(tasks.Sums(numbers=4), _model(13, 256, 3)),
  "sort16": Setting(Sorting(numbers=16), _model(11, 128, 3)),
  "sort10": Setting(Sorting(numbers=10), _model(11, 64, 2), groups=16, steps=200),
}

#: Changes that make a setting run anywhere in seconds; it learns nothing.
TINY: dict[str, Any] = {
  "model": _model(13, 16, 1), "groups": 2, "samples": 4, "steps": 8, "probe_every": 2, "probe_prompts": 8,
  "warm_accuracy": 0.0, "warm_every": 2,
}  # fmt: skip


def symbols(task: Any) -> list[str]:
  """Returns the symbols of the task's text in the order of their token ids."""
  return list(task.corpus) if task.model_type == "char" else task.corpus.split(" ")


def encode(task: Any, text: str) -> list[int]:
  ids = {symbol: i for i, symbol in enumerate(symbols(task))}
  return [ids[symbol] for symbol in (text if task.model_type == "char" else text.split(" "))]


def decode(task: Any, tokens: Any) -> str:
  """Returns the text of token ids, without end tokens and padding."""
  names = symbols(task)
  return ("" if task.model_type == "char" else " ").join(names[i] for i in tokens if i < len(names))


def problems(setting: Setting, folder: pathlib.Path, data_dir: str | None = None) -> tuple[Problems, Problems]:
  """Returns the train and test problems, kept as tokens in *folder*: a machine that has the file needs no TFDS."""
  file = folder / f"problems_{setting.task.name}.npz"
  if not file.exists():
    task = setting.task
    if not isinstance(task, Sorting):
      task = dataclasses.replace(task, data_dir=data_dir)
    rng, arrays = np.random.default_rng(0), {}
    for split in ("train", "test"):
      prompts = list(task.prompts(split))
      solutions = [[[*encode(task, task.solution(p, rng)), setting.end] for _ in range(VARIANTS)] for p in prompts]
      arrays[f"{split}_prompts"] = np.array([encode(task, str(p.text)) for p in prompts], np.int8)
      arrays[f"{split}_solutions"] = np.array(solutions, np.int8)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
  with np.load(file) as stored:
    train, test = (
      Problems(*(jnp.asarray(stored[f"{split}_{part}"], jnp.int32) for part in Problems._fields))
      for split in ("train", "test")
    )
    return train, test


def reward_fn(setting: Setting) -> Callable[[Array, Array], Array]:
  """Returns the task's `reward` as a function of tokens: prompts [B, Q], completions [B, C] -> float32 [B].

  What follows an end token in a completion is ignored. A completion without an end token earns nothing.
  """
  right = _RULES[type(setting.task)].right
  return lambda prompts, tokens: right(setting.task, prompts, tokens).astype(jnp.float32)


def _sums_right(task: tasks.Sums, prompts: Array, tokens: Array) -> Array:
  """`12+34+56=` is answered by `34+012=046;56+046=102` and the end token. An early end is a wrong character."""
  form = [*encode(task, ";".join(["00+000=000"] * (task.numbers - 1))), len(symbols(task))]
  template = np.array(form, np.int32)[None, :]
  formed = jnp.all(jnp.where(template == 0, tokens < 10, tokens == template), axis=1)
  digits = prompts.reshape(-1, task.numbers, 3)
  total = jnp.sum(10 * digits[:, :, 0] + digits[:, :, 1], axis=1)
  return formed & (100 * tokens[:, -4] + 10 * tokens[:, -3] + tokens[:, -2] == total)


def _sorting_right(task: Sorting, prompts: Array, tokens: Array) -> Array:
  """`5208=` is answered by `0258` and the end token."""
  in_order = jnp.all(tokens[:, :-1] == jnp.sort(prompts[:, : task.numbers], axis=1), axis=1)
  return in_order & (tokens[:, -1] == len(symbols(task)))


def _countdown_right(task: tasks.CountdownSteps, prompts: Array, tokens: Array) -> Array:
  """`3 7 12 20 = 45 :` is answered by steps like `20 - 7 = 13`, joined by `;`, and the end token."""
  plus, minus, times, over, equals, semicolon = (encode(task, symbol)[0] for symbol in "+-*/=;")
  values = task.largest_value + 1  # the ids below are the numbers themselves
  left = jnp.sum(jax.nn.one_hot(prompts[:, : task.numbers], values, dtype=jnp.int32), axis=1)
  right = jnp.ones(tokens.shape[0], bool)
  for step in range(task.numbers - 1):
    first, operator, second, equal, result, separator = (tokens[:, 6 * step + i] for i in range(6))
    last = step == task.numbers - 2
    right &= (first < values) & (second < values) & (result < values)
    right &= (equal == equals) & (separator == (len(symbols(task)) if last else semicolon))
    quotient = first // jnp.maximum(second, 1)
    divides = (second > 0) & (quotient * second == first)
    right &= jnp.select(
      [operator == plus, operator == minus, operator == times, operator == over],
      [first + second == result, first - second == result, first * second == result, divides & (quotient == result)],
      False,
    )
    left -= jax.nn.one_hot(first, values, dtype=jnp.int32) + jax.nn.one_hot(second, values, dtype=jnp.int32)
    right &= jnp.all(left >= 0, axis=1)
    left += jax.nn.one_hot(result, values, dtype=jnp.int32)
  return right & (tokens[:, -2] == prompts[:, task.numbers + 1])


class _Rule(NamedTuple):
  """The tokens of a completion by the number of numbers, the end token included; and which completions are right."""

  tokens: Callable[[int], int]
  right: Callable[[Any, Array, Array], Array]


_RULES: dict[type, _Rule] = {
  tasks.Sums: _Rule(lambda numbers: 11 * (numbers - 1), _sums_right),
  tasks.CountdownSteps: _Rule(lambda numbers: 6 * (numbers - 1), _countdown_right),
  Sorting: _Rule(lambda numbers: numbers + 1, _sorting_right),
}
