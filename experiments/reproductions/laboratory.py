"""Trains a toy at any lag, correction, learning rate and stabilizer, many runs in seconds; for notebooks.

    lab = Laboratory(runs=6)
    curves = lab([method("topr", lag=32, rate=0.01), method("reinforce", lag=32, rate=0.01)])
    curves["accuracy"]    # [2, 30]: every 10 updates

The toy is a task of words on top of the sweep's training (`_lag_sweep_run.Training`): the same ring of old weights, the
same losses, baselines and stabilizers. All knobs are traced, so one compiled program makes every run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from async_rl.rollout import read_schedule
from experiments.reproductions import _lag_sweep_knobs as sweep_knobs
from experiments.reproductions import _lag_sweep_losses as sweep_losses
from experiments.reproductions import _lag_sweep_methods as methods
from experiments.reproductions import _lag_sweep_run as training
from experiments.reproductions._lag_sweep_tasks import Problems

Array = jax.Array

#: Names of the corrections.
CORRECTIONS = tuple(sweep_losses.LOSSES)
#: The knobs of each stabilizer.
STABILIZERS: dict[str, dict[str, Any]] = {
  "none": {},
  "scale_by_ess": methods.ESS,
  "control_alignment": methods.GAC,
  "both": methods.ESS | methods.GAC,
}


def method(
  correction: str, stabilizer: str = "none", *, lag: int | Sequence[int] | np.ndarray = 0, rate: float, seed: int = 0
) -> sweep_knobs.Knobs:
  """Returns the knobs of a run.

  Args:
    correction: a name of `CORRECTIONS`.
    stabilizer: a name of `STABILIZERS`.
    lag: the lag, in updates: one number, or one for every update.
    rate: the learning rate.
    seed: the seed of everything random.
  """
  loss, lags = CORRECTIONS.index(correction), np.asarray(lag)
  return sweep_knobs.Knobs(seed=seed, lag=lags, rate=rate, loss=loss, **STABILIZERS[stabilizer])


@dataclasses.dataclass(frozen=True)
class Toy:
  """The sizes of the toy: words of letters, and of its runs as `_lag_sweep_tasks.Setting` has them.

  Attributes:
    letters: the number of letters of the alphabet.
    length: the number of letters of a word.
    features: the number of random features of what a letter follows.
    hidden: the number of hidden units.
    warm_updates: the number of supervised updates that a run starts from.
  """

  letters: int = 6
  length: int = 6
  features: int = 16
  hidden: int = 32
  warm_updates: int = 20
  groups: int = 8
  samples: int = 8
  steps: int = 300
  probe_every: int = 10
  probe_prompts: int = 256

  @property
  def end(self) -> int:
    """Returns a token that never occurs: all words have the same length."""
    return -1


class WordTraining(training.Training):
  """Trainings on words, of which the prompt is the first two letters.

  A letter is right if it follows a rule of the two letters before it; reward and accuracy are the share of right ones.
  The policy is a network of one hidden layer on fixed random features of the position and of the two letters before, so
  that what it learns about one letter moves the others.
  """

  def __init__(self, toy: Toy, max_lag: int = training.MAX_LAG, exact_norms: bool = False):
    super().__init__(toy, exact_norms, max_lag)
    self.toy = toy
    shape = (toy.length, toy.letters, toy.letters, toy.features)
    self.inputs = jax.random.normal(jax.random.key(9), shape)  # by position, last letter and the one before

  @property
  def problems(self) -> Problems:
    """Returns the prompts, int32 [letters², 2], with no solutions."""
    prompts = jnp.array(list(itertools.product(range(self.toy.letters), repeat=2)))
    return Problems(prompts, jnp.zeros((0,), jnp.int32))

  def init(self, key: Array) -> Array:
    one, other = jax.random.split(key)
    inner = jax.random.normal(one, (self.toy.features, self.toy.hidden)) / self.toy.features**0.5
    outer = jax.random.normal(other, (self.toy.hidden, self.toy.letters)) / 20
    weights = jnp.concatenate([inner.ravel(), outer.ravel()])
    last, before = jnp.meshgrid(jnp.arange(self.toy.letters), jnp.arange(self.toy.letters), indexing="ij")
    right = jax.nn.one_hot(self._right(last, before), self.toy.letters)
    optimizer = optax.adam(0.03)

    def update(carry, _):
      weights, opt_state = carry
      gradient = jax.grad(lambda weights: -jnp.mean(jnp.sum(right[None] * self.table(weights), axis=-1)))(weights)
      updates, opt_state = optimizer.update(gradient, opt_state)
      return (optax.apply_updates(weights, updates), opt_state), None

    (weights, _), _ = jax.lax.scan(update, (weights, optimizer.init(weights)), length=self.toy.warm_updates)
    return weights

  def warm_start(self, key: Array, train: Problems, test: Problems) -> tuple[Array, Array, Array]:
    """Returns `init`, the supervised updates that it took, and its accuracy, as the sweep asks for them."""
    del train
    weights = self.init(key)
    accuracy = self.accuracy(weights, test.prompts, 4096, jax.random.fold_in(key, 1))
    return weights, jnp.int32(self.toy.warm_updates), accuracy

  def table(self, weights: Array) -> Array:
    """Returns the log-probabilities of every letter by position and letters before, [length, V, V, V]."""
    inner, outer = jnp.split(weights, [self.toy.features * self.toy.hidden])
    hidden = jnp.tanh(self.inputs @ inner.reshape(self.toy.features, -1))
    return jax.nn.log_softmax(hidden @ outer.reshape(self.toy.hidden, -1))

  def draw(self, weights: Array, prompts: Array, samples: int, key: Array) -> training.Drawn:
    before, last = jnp.repeat(prompts, samples, axis=0).T

    def draw_letter(carry, inputs):
      last, before = carry
      table, key = inputs
      logits = table[last, before]
      drawn = jax.random.categorical(key, logits)
      return (drawn, last), (drawn, logits)

    keys = jax.random.split(key, self.toy.length)
    tokens, distributions = jax.lax.scan(draw_letter, (last, before), (self.table(weights), keys))[1]
    return training.Drawn(tokens.T, distributions.swapaxes(0, 1), jnp.ones(tokens.T.shape, bool))

  def distributions(self, weights: Array, prompts: Array, completions: Array) -> Array:
    last, before = self._before(prompts, completions)
    return self.table(weights)[jnp.arange(self.toy.length)[None], last, before]

  def reward(self, prompts: Array, completions: Array) -> Array:
    last, before = self._before(prompts, completions)
    return jnp.mean(completions == self._right(last, before), axis=1, dtype=jnp.float32)

  def _right(self, last: Array, before: Array) -> Array:
    """Returns the right letter after two others."""
    return (last + 2 * before + 1) % self.toy.letters

  def _before(self, prompts: Array, completions: Array) -> tuple[Array, Array]:
    """Returns the letter before each letter of the words, and the one before that, [B, length] both."""
    letters = jnp.concatenate([prompts, completions], axis=1)
    return letters[:, 1:-1], letters[:, :-2]


class Laboratory:
  """Runs of the toy, all by one compiled program on the first device.

  Args:
    runs: the number of runs that are vectorized.
    max_lag: the longest lag.
    **changes: fields of the toy to replace, such as `steps`.

  Attributes:
    toy: the toy's sizes.
  """

  def __init__(self, runs: int, *, max_lag: int = 64, **changes: Any):
    self.toy, self.max_lag = Toy(**changes), max_lag
    words = WordTraining(self.toy, max_lag)
    mesh = jax.make_mesh((1,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    self._program = words.compile(runs, mesh, words.problems, words.problems)
    self._init = jax.jit(lambda seeds: jax.vmap(words.init)(jax.vmap(jax.random.key)(seeds)))

  def __call__(self, runs: Sequence[sweep_knobs.Knobs]) -> dict[str, np.ndarray]:
    """Trains the runs and returns their curves by name, [len(runs), steps / probe_every] each.

    Raises:
      ValueError: if a lag is longer than the longest one.
    """
    lowest, highest = min(int(np.min(run.lag)) for run in runs), max(int(np.max(run.lag)) for run in runs)
    if not 0 <= lowest <= highest <= self.max_lag:
      raise ValueError(f"*lag* must be 0 to max_lag={self.max_lag}, got lags of {lowest} to {highest}.")
    chunks = []
    for first in range(0, len(runs), self._program.runs):
      chunk = list(runs[first : first + self._program.runs])
      weights = np.asarray(self._init(jnp.array([run.seed for run in chunk])))
      chunks.append(self._program(chunk, weights))
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def lags_of_schedule(path: str | os.PathLike[str]) -> list[list[int]]:
  """Returns the lags of the groups that each step of a recorded run trained, from the weights that began them.

  Args:
    path: the `schedule.jsonl` of a run.
  """
  return list(_lags(read_schedule(path)))


def _lags(events: Iterable[Any]) -> Iterator[list[int]]:
  version, begun = 0, {}
  for kind, *details in events:
    if kind == "weights":
      version = details[0]
    elif kind == "submit":
      begun[details[0]] = version
    elif kind == "train":
      yield [details[0] - begun.pop(ticket) for ticket in details[1]]
