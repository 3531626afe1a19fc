"""Runs whole trainings as one function of their knobs, vectorized over runs and split over devices.

The lag is made by drawing every batch with old weights: a ring of the last `MAX_LAG + 1` parameter vectors, read `lag`
updates back. So every batch is fresh, any schedule of lags is possible, and the drawing weights may be changed
(averaged, extrapolated) before they draw.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl import sampling
from async_rl import stabilizers
from experiments.reproductions import _lag_sweep_knobs as sweep_knobs
from experiments.reproductions import _lag_sweep_losses as sweep_losses
from experiments.reproductions import _lag_sweep_tasks as problems

Array = jax.Array

MAX_LAG = 128
#: Supervised updates that a warm start may take at most.
MAX_WARM_UPDATES = 5000
#: The curves that a sweep keeps, each a mean over `Setting.probe_every` updates, except the current policy's accuracy.
CURVES = ("accuracy", "reward", "ess", "scale", "cosine", "norm", "skipped", "entropy", "kl", "clipped", "ended")


class Drawn(NamedTuple):
  """Completions.

  Attributes:
    tokens: their token ids, int32 [B, C].
    distributions: the log-probabilities of every token where each was drawn, float32 [B, C, V].
    mask: which tokens belong to the text, bool [B, C].
  """

  tokens: Array
  distributions: Array
  mask: Array

  @property
  def logprobs(self) -> Array:
    """Returns the log-probabilities that the tokens were drawn with, float32 [B, C]."""
    return _at(self.distributions, self.tokens)

  @property
  def entropy(self) -> Array:
    """Returns the entropies of the distributions that the tokens were drawn from, float32 [B, C]."""
    return _entropy(self.distributions)


def _at(distributions: Array, tokens: Array) -> Array:
  return jnp.take_along_axis(distributions, tokens[..., None], axis=-1)[..., 0]


def _entropy(distributions: Array) -> Array:
  return -jnp.sum(jnp.exp(distributions) * distributions, axis=-1)


def _statistics(distributions: Array, tokens: Array) -> models.TokenStats:
  """Returns the statistics of tokens [B, C] under log-probabilities [B, C, V]; the gradient flows to `logprobs`."""
  fixed = jax.lax.stop_gradient(distributions)
  sum_squares = jnp.sum(jnp.square(jnp.exp(fixed)), axis=-1)
  return models.TokenStats(_at(distributions, tokens), _entropy(fixed), sum_squares)


class Carry(NamedTuple):
  """State of a run; weights are vectors [P]."""

  weights: Array
  average: Array  # moving average of the weights
  opt_state: optax.OptState
  ring: Array  # [MAX_LAG + 1, P], the weights that draw


def _aligned(length: int) -> int:
  """Rounds a length up to a multiple of 8, which tensor cores prefer."""
  return -(-length // 8) * 8


class Sizes(Protocol):
  """What `Training` asks of a setting; `problems.Setting` says what each is."""

  @property
  def groups(self) -> int: ...
  @property
  def samples(self) -> int: ...
  @property
  def steps(self) -> int: ...
  @property
  def probe_every(self) -> int: ...
  @property
  def probe_prompts(self) -> int: ...
  @property
  def end(self) -> int: ...


class Training:
  """Whole trainings of a policy whose weights are one vector [P]; a subclass has the policy and its task.

  Args:
    setting: the sizes of a run.
    exact_norms: whether OPOB gets the exact gradient norm of every trajectory, instead of the estimate at the logits.
    max_lag: the longest lag; the ring is longer by one.
  """

  def __init__(self, setting: Sizes, exact_norms: bool = False, max_lag: int = MAX_LAG):
    self.sizes, self.exact_norms, self.slots = setting, exact_norms, max_lag + 1
    self.groups = jnp.repeat(jnp.arange(setting.groups), setting.samples)

  def init(self, key: Array) -> Array:
    """Returns random weights as a vector [P]."""
    raise NotImplementedError

  def draw(self, weights: Array, prompts: Array, samples: int, key: Array) -> Drawn:
    """Draws *samples* completions of each prompt [Q, T], at temperature 1."""
    raise NotImplementedError

  def distributions(self, weights: Array, prompts: Array, completions: Array) -> Array:
    """Returns the log-probabilities of every token along completions [B, C] after prompts [B, Q], float32 [B, C, V]."""
    raise NotImplementedError

  def score(self, weights: Array, prompts: Array, completions: Array) -> models.TokenStats:
    """Scores completions [B, C] after their prompts [B, Q]: log-probabilities, entropies and squared norms."""
    return _statistics(self.distributions(weights, prompts, completions), completions)

  def reward(self, prompts: Array, completions: Array) -> Array:
    """Returns the rewards [B] of completions [B, C] of their prompts [B, Q]."""
    raise NotImplementedError

  def accuracy(self, weights: Array, prompts: Array, count: int, key: Array) -> Array:
    """Returns the mean reward of one completion each of *count* of the prompts."""
    chosen = prompts[jax.random.randint(key, (count,), 0, prompts.shape[0])]
    return jnp.mean(self.reward(chosen, self.draw(weights, chosen, 1, key).tokens))

  def run(
    self, knobs: sweep_knobs.Knobs, weights: Array, train: problems.Problems, test: problems.Problems
  ) -> dict[str, Array]:
    """Trains from *weights* and returns the curves, float32 [steps / probe_every] each."""
    setting, key = self.sizes, jax.random.key(knobs.seed)
    optimizer, lags = sweep_knobs.optimizer(knobs, setting.steps), jnp.broadcast_to(knobs.lag, (setting.steps,))
    start = Carry(weights, weights, optimizer.init(weights), jnp.zeros((self.slots, weights.size), weights.dtype))

    def update(carry: Carry, version: Array) -> tuple[Carry, dict[str, Array]]:
      average = knobs.average * carry.average + (1.0 - knobs.average) * carry.weights
      ring = carry.ring.at[version % self.slots].set(average)
      lag = jnp.minimum(lags[version], version // knobs.ramp)
      old = ring[(version - lag) % self.slots]
      step = old - ring[jnp.maximum(version - lag - 1, 0) % self.slots]
      reach = knobs.ahead * knobs.b1 * (1.0 - knobs.b1**lag) / (1.0 - knobs.b1)
      rows, drawing, skipping = jax.random.split(jax.random.fold_in(key, version), 3)
      rows = jax.random.randint(rows, (setting.groups,), 0, train.prompts.shape[0])
      drawn = self.draw(old + reach * step, train.prompts[rows], setting.samples, drawing)
      prompts = jnp.repeat(train.prompts[rows], setting.samples, axis=0)
      gradient, log_weights, metrics = self.gradient(knobs, carry.weights, prompts, drawn, lag)
      extra = {"log_weights": log_weights, "mean_lag": lag.astype(jnp.float32)}
      updates, opt_state = optimizer.update(gradient, carry.opt_state, carry.weights, **extra)
      skip = jax.random.uniform(skipping) < knobs.skip
      kept = (carry.weights, carry.opt_state)
      stepped = (optax.apply_updates(carry.weights, updates), opt_state)
      new, opt_state = jax.tree.map(lambda x, y: jnp.where(skip, x, y), kept, stepped)
      read = functools.partial(optax.tree.get, opt_state)
      metrics |= {
        "ess": stabilizers.ess_ratio(log_weights),
        "scale": read("ess_scale") * read("servo_scale") * read("lag_scale"),
        "cosine": read("alignment_cosine"),
        "norm": optax.tree.norm(gradient),
        "skipped": (skip | (read("alignment_regime") == stabilizers.AlignmentRegime.SKIPPED)).astype(jnp.float32),
      }
      return Carry(new, average, opt_state, ring), metrics

    def block(carry: Carry, first: Array) -> tuple[Carry, dict[str, Array]]:
      carry, metrics = jax.lax.scan(update, carry, first + jnp.arange(setting.probe_every))
      probe = jax.random.fold_in(key, -1 - first)
      means = {name: jnp.mean(values) for name, values in metrics.items()}
      return carry, means | {"accuracy": self.accuracy(carry.weights, test.prompts, setting.probe_prompts, probe)}

    return jax.lax.scan(block, start, jnp.arange(0, setting.steps, setting.probe_every))[1]

  def gradient(
    self, knobs: sweep_knobs.Knobs, weights: Array, prompts: Array, drawn: Drawn, lag: Array
  ) -> tuple[Array, Array, dict[str, Array]]:
    """Returns the gradient [P] on a batch, its sequences' raw log-weights [B], and metrics."""
    rewards, mask = self.reward(prompts, drawn.tokens), drawn.mask

    def score(weights):
      distributions = self.distributions(weights, prompts, drawn.tokens)
      stats = _statistics(distributions, drawn.tokens)
      return (stats.logprobs, distributions), stats

    (logprobs, distributions), pull, stats = jax.vjp(score, weights, has_aux=True)
    lags = jnp.broadcast_to(lag, mask.shape)
    batch = learning.BatchQuantities(rewards, self.groups, mask, drawn.logprobs, lags, stats)
    norms = self.squared_norms(weights, prompts, drawn) if self.exact_norms else batch.squared_logit_norms
    batch = batch._replace(squared_norms=norms)
    advantages = sweep_knobs.advantages(knobs, batch)
    known = batch._replace(stats=stats._replace(entropy=drawn.entropy))  # of the policy that drew, as ESTR has it
    coefficients = sweep_losses.coefficients(knobs.loss, logprobs, advantages, known)
    centering = sweep_losses.centering(knobs.centering, distributions, drawn.distributions, advantages, batch)
    (gradient,) = pull((coefficients, centering))

    def token_mean(x):
      return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask)

    kl = losses.kl_estimate(batch.behavior, logprobs, mask, estimator="k3")
    metrics = {
      "ratio": jnp.max(losses.clamped_exp(batch.log_ratios)),
      "reward": jnp.mean(rewards),
      "entropy": token_mean(stats.entropy),
      "kl": jnp.sum(kl) / mask.shape[0],
      "clipped": token_mean((coefficients == 0) & (advantages != 0)),
      "ended": jnp.mean(~mask[:, -1] | (drawn.tokens[:, -1] == self.sizes.end)),
    }
    return gradient, batch.log_weights, metrics

  def squared_norms(self, weights: Array, prompts: Array, drawn: Drawn) -> Array:
    """Returns ‖∇ log π(τ_i)‖² of every sequence, exactly, [B]."""

    def one(row):
      prompt, tokens, mask = (x[None] for x in row)

      def logprob(weights):
        return jnp.sum(jnp.where(mask, self.score(weights, prompt, tokens).logprobs, 0.0))

      return losses.tree_squared_norm(jax.grad(logprob)(weights))

    return jax.lax.map(one, (prompts, drawn.tokens, drawn.mask), batch_size=self.sizes.samples)

  def compile(self, runs: int, mesh: Mesh, train: problems.Problems, test: problems.Problems) -> Program:
    """Compiles *runs* runs at once, each with its own initial weights, split over the mesh's only axis."""
    split = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())
    many = jax.shard_map(
      jax.vmap(self.run, in_axes=(0, 0, None, None)),
      mesh=mesh,
      in_specs=(split.spec, split.spec, whole.spec, whole.spec),
      out_specs=split.spec,
      check_vma=False,
    )

    def abstract(tree: Any, sharding: NamedSharding) -> Any:
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding), tree)

    weights = jax.eval_shape(jax.vmap(self.init), jax.random.split(jax.random.key(0), runs))
    knobs = sweep_knobs.stack([sweep_knobs.Knobs()] * runs, self.sizes.steps)
    specs = (abstract(knobs, split), abstract(weights, split), abstract(train, whole), abstract(test, whole))
    return Program(jax.jit(many).lower(*specs).compile(), runs, self.sizes.steps, mesh, train, test)


class Runner(Training):
  """The trainings of a transformer on one of the sweep's tasks.

  Args:
    setting: the task and its sizes.
    dtype: the dtype of activations and of matrices in products; weights are kept in float32.
    exact_norms: whether OPOB gets the exact gradient norm of every trajectory, instead of the estimate at the logits.
    max_lag: the longest lag; the ring is longer by one.
  """

  def __init__(
    self, setting: problems.Setting, dtype: str = "bfloat16", exact_norms: bool = False, max_lag: int = MAX_LAG
  ):
    super().__init__(setting, exact_norms, max_lag)
    self.setting, self.policy = setting, setting.policy(dtype)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.policy.abstract())
    self.unravel = ravel_pytree(models.unstack_layers(zeros))[1]

  def init(self, key: Array) -> Array:
    return ravel_pytree(models.unstack_layers(self.policy.init(key)))[0]

  def draw(self, weights: Array, prompts: Array, samples: int, key: Array) -> Drawn:
    params = sampling.prepare_weights(self.policy, self.unravel(weights))
    count, length = prompts.shape
    ones, positions = jnp.ones_like(prompts), jnp.broadcast_to(jnp.arange(length), prompts.shape)
    hidden, cache = self.policy.prefill(params, prompts, ones, positions)
    spread = functools.partial(jnp.repeat, repeats=samples, axis=0)
    room = [(0, 0), (0, 0), (0, _aligned(length + self.setting.completion_tokens - 1) - length), (0, 0)]
    cache = jax.tree.map(lambda x: jnp.pad(spread(x), room), cache)

    def token(logits, alive, i):
      drawn = jax.random.categorical(jax.random.fold_in(key, i), logits)
      return drawn, jax.nn.log_softmax(logits), alive, alive & (drawn != self.setting.end)

    def step(carry, i):
      logits, alive, cache = carry
      drawn, distribution, written, alive = token(logits, alive, i)
      hidden, cache = self.policy.decode(params, drawn, jnp.full_like(drawn, length + i), cache)
      return (self.policy.logits(params, hidden), alive, cache), (drawn, distribution, written)

    start = (spread(self.policy.logits(params, hidden[:, -1])), jnp.ones(count * samples, bool), cache)
    last = self.setting.completion_tokens - 1
    (logits, alive, _), rows = jax.lax.scan(step, start, jnp.arange(last))
    final = token(logits, alive, last)[:3]
    return Drawn(*(jnp.concatenate([x, y[None]]).swapaxes(0, 1) for x, y in zip(rows, final, strict=True)))

  def distributions(self, weights: Array, prompts: Array, completions: Array) -> Array:
    before, length = prompts.shape[1], prompts.shape[1] + completions.shape[1] - 1
    tokens = jnp.concatenate([prompts, completions[:, :-1]], axis=1)
    tokens = jnp.pad(tokens, [(0, 0), (0, _aligned(length) - length)])  # the future, which nothing looks at
    ones, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    params = self.unravel(weights)
    hidden = self.policy.hidden(params, tokens, ones, positions)[:, before - 1 : length]
    return jax.nn.log_softmax(self.policy.logits(params, hidden))

  def reward(self, prompts: Array, completions: Array) -> Array:
    return problems.reward_fn(self.setting)(prompts, completions)

  def warm_start(self, key: Array, train: problems.Problems, test: problems.Problems) -> tuple[Array, Array, Array]:
    """Returns supervised weights of the wanted accuracy, the updates they took, and a second measurement of it."""
    setting, optimizer = self.setting, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))

    def update(carry, i):
      weights, opt_state = carry
      rows, variant = jax.random.split(jax.random.fold_in(key, i))
      rows = jax.random.randint(rows, (64,), 0, train.prompts.shape[0])
      variant = jax.random.randint(variant, (64,), 0, problems.VARIANTS)
      completions = train.solutions[rows, variant]

      def loss(weights):
        return -jnp.mean(self.score(weights, train.prompts[rows], completions).logprobs)

      updates, opt_state = optimizer.update(jax.grad(loss)(weights), opt_state)
      return (optax.apply_updates(weights, updates), opt_state), None

    def train_and_evaluate(carry):
      state, i, _ = carry
      state, _ = jax.lax.scan(update, state, i + jnp.arange(setting.warm_every))
      i += setting.warm_every
      return state, i, self.accuracy(state[0], test.prompts, setting.probe_prompts, jax.random.fold_in(key, -i))

    def is_unfinished(carry):
      _, updates, accuracy = carry
      return (accuracy < setting.warm_accuracy) & (updates < MAX_WARM_UPDATES)

    weights = self.init(key)
    start = ((weights, optimizer.init(weights)), jnp.int32(0), jnp.float32(-1))
    (weights, _), updates, _ = jax.lax.while_loop(is_unfinished, train_and_evaluate, start)
    return weights, updates, self.accuracy(weights, test.prompts, test.prompts.shape[0], key)


class Program:
  """Runs that were compiled together."""

  def __init__(self, compiled, runs: int, steps: int, mesh: Mesh, *data: problems.Problems):
    self.runs, self.steps = runs, steps
    self._compiled = compiled
    self._split = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    self._data = jax.device_put(data, NamedSharding(mesh, PartitionSpec()))

  def describe(self) -> str:
    """Returns the number of runs and the device memory that they take, as a phrase."""
    memory = self._compiled.memory_analysis()
    return f"{self.runs} runs, {memory.temp_size_in_bytes / 2**30:.1f} GiB of temporaries a device"

  def __call__(self, knobs: list[sweep_knobs.Knobs], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the curves, [len(knobs), steps / probe_every] each, of at most `runs` runs from their weights [., P]."""
    rows = np.minimum(np.arange(self.runs), len(knobs) - 1)  # the last run fills the places that are left
    inputs = jax.device_put((sweep_knobs.stack([knobs[i] for i in rows], self.steps), weights[rows]), self._split)
    curves = jax.device_get(self._compiled(*inputs, *self._data))
    return {name: values[: len(knobs)] for name, values in curves.items()}
