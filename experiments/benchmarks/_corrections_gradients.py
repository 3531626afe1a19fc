"""The gradient that every correction and baseline makes of one batch, and how it compares with the on-policy one.

A policy loss depends on the parameters through the log-probabilities of the tokens alone. So one forward pass serves
all methods: each loss is differentiated with respect to the log-probabilities, and the results are pulled back to the
parameters one after the other.
"""

from __future__ import annotations

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from async_rl import learning
from async_rl import losses
from async_rl import models
from async_rl.types import Batch

Array = jax.Array


class Method(NamedTuple):
  """A way to make a gradient of stale samples.

  Attributes:
    correction: a name in `losses.CORRECTIONS`.
    advantages: a name in `losses.ADVANTAGES`.
    target: the aggregation under which REINFORCE on fresh samples follows the same objective, a name in
      `learning.AGGREGATIONS`.
  """

  correction: str
  advantages: str
  target: str

  def objective(self, aggregate: str | None = None) -> learning.Objective:
    """Returns the objective that a learner would train with."""
    return learning.objective(self.correction, advantages=self.advantages, aggregate=aggregate)


def _target(correction: str) -> str:
  """The published aggregation. Proximal RLOO's ratio is that of the sequence: its mean has the gradient of a sum."""
  published = learning.PUBLISHED_AGGREGATIONS.get(correction, "sequence_mean")
  return "sum" if correction == "proximal_rloo" else published


#: Every correction under the mean-reward baseline, aggregated as published.
CORRECTIONS = {name: Method(name, "dr_grpo", _target(name)) for name in losses.CORRECTIONS}

#: Every baseline under truncated sequence weights, whose row among the corrections has the baseline dr_grpo.
BASELINES = {
  f"baseline {name.replace('opob_by_', 'opob by ')}": Method("sequence_tis", name, "sequence_mean")
  for name in losses.ADVANTAGES
  if name != "opob"
}
EXACT_OPOB = "baseline opob exact"

#: All methods, in the order in which they are shown.
NAMES = (*CORRECTIONS, *BASELINES, EXACT_OPOB)

#: The gradients on fresh samples that the others are compared with.
TARGETS = {name: Method("reinforce", "dr_grpo", name) for name in learning.AGGREGATIONS}


def target_of(name: str) -> str:
  """Returns the name in `TARGETS` that the method of this name is compared with."""
  return "sequence_mean" if name == EXACT_OPOB else (CORRECTIONS | BASELINES)[name].target


class Judge:
  """Gradients of whole batches whose sequences all lie in one micro-batch.

  Args:
    policy: the architecture.
    num_groups: groups of a batch.
    temperature: of the sampler's softmax.
  """

  def __init__(self, policy: models.Policy, num_groups: int, temperature: float):
    self._num_groups = num_groups
    self._score = functools.partial(models.score, policy, temperature=temperature)
    targets = {name: method.objective(name) for name, method in TARGETS.items()}
    methods = {name: method.objective() for name, method in (CORRECTIONS | BASELINES).items()}
    self.targets = jax.jit(functools.partial(self._gradients, targets))
    self._methods = jax.jit(functools.partial(self._gradients, methods))
    self.exact_opob = jax.jit(self._exact_opob)
    self.statistics = jax.jit(self._statistics)

  def methods(self, params: Any, batch: Batch, version: int) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """The flattened gradient of every method, and its shares of tokens."""
    gradients, shares = self._methods(params, batch, version)
    return gradients | {EXACT_OPOB: ravel_pytree(self.exact_opob(params, batch).gradient)[0]}, shares

  def _log_probs(self, batch: Batch, params: Any) -> tuple[Array, models.TokenStats]:
    stats = self._score(params, batch.tokens[0], batch.segments[0], batch.positions[0])
    stats = jax.tree.map(lambda x: jnp.where(batch.mask, jnp.take(x.reshape(-1), batch.index), 0.0), stats)
    return stats.logprobs, jax.lax.stop_gradient(stats)

  def _gradients(
    self, objectives: dict[str, learning.Objective], params: Any, batch: Batch, version: int
  ) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    logprobs, pullback, stats = jax.vjp(functools.partial(self._log_probs, batch), params, has_aux=True)
    lag = jnp.where(batch.mask, version - batch.versions, 0)
    quantities = learning.BatchQuantities(batch.rewards, batch.groups, batch.mask, batch.logprobs, lag, stats)
    cotangents, shares = {}, {}
    for name, objective in objectives.items():
      advantages = objective.make_advantages(quantities)
      options = objective.loss_options(quantities)

      def mean_loss(logprobs, objective=objective, advantages=advantages, options=options):
        out = objective.loss(logprobs, batch.logprobs, advantages, batch.mask, **options)
        return objective.mean(out.loss, batch.mask), out.clipped

      cotangents[name], clipped = jax.grad(mean_loss, has_aux=True)(logprobs)
      wanted = batch.mask & (advantages != 0)[:, None]
      shares[name] = {
        "kept": losses.divide_or_zero(jnp.sum(wanted & (cotangents[name] != 0)), jnp.sum(wanted)),
        "clipped": losses.divide_or_zero(jnp.sum(wanted & clipped), jnp.sum(wanted)),
      }
    flat = jax.lax.map(lambda x: ravel_pytree(pullback(x)[0])[0], jnp.stack(list(cotangents.values())))
    return dict(zip(objectives, flat, strict=True)), shares

  def _exact_opob(self, params: Any, batch: Batch) -> losses.OpobGradient:
    """OPOB with exact norms; each sequence is scored in the row that it was packed into."""
    row, column = jnp.divmod(batch.index, batch.tokens.shape[2])
    plane = [x[0][row[:, 0]] for x in (batch.tokens, batch.segments, batch.positions)]

    def log_weight(params, trajectory):
      plane, column, mask, behavior = trajectory
      logprobs = self._score(params, *(x[None] for x in plane)).logprobs[0]
      return jnp.sum(jnp.where(mask, jnp.take(logprobs, column) - behavior, 0.0))

    lengths = losses.squared_norms_by_length(batch.mask)
    out = losses.opob_gradient(
      functools.partial(jax.value_and_grad(log_weight), params),
      (plane, column, batch.mask, batch.logprobs),
      batch.rewards,
      batch.groups,
      self._num_groups,
      scale=losses.divide_or_zero(1.0, lengths),
    )
    sequences = jnp.sum(lengths > 0)
    return out._replace(gradient=jax.tree.map(lambda x: losses.divide_or_zero(x, sequences), out.gradient))

  def _statistics(self, params: Any, batch: Batch) -> dict[str, Array]:
    """ESS of the batch, and how far the policy is from the one that drew it."""
    ratios = losses.log_ratios(self._log_probs(batch, params)[0], batch.logprobs, batch.mask)
    log_weights = losses.sequence_log_weights(ratios)
    return losses.ess_statistics(ratios, batch.mask) | {
      "kl": -jnp.mean(log_weights),
      "largest_log_weight": jnp.max(log_weights),
      "reward": jnp.mean(batch.rewards),
      "length": jnp.mean(jnp.sum(batch.mask, axis=1, dtype=jnp.float32)),
    }


class Mean:
  """A mean of vectors with the noise taken out of its squared length."""

  def __init__(self, vectors: np.ndarray):
    count = len(vectors)
    if count < 2:
      raise ValueError(f"Noise can be estimated from 2 vectors or more, got {count}.")
    self.value = vectors.mean(axis=0)
    squares = np.einsum("np,np->n", vectors, vectors, dtype=np.float64)
    total = float(self.value.astype(np.float64) @ self.value) * count**2
    #: Squared length of the expectation, unbiased: the mean of the inner products of different vectors.
    self.square = (total - squares.sum()) / (count * (count - 1))
    #: Squared distance of one vector from the expectation as a multiple of `square`; NaN where that is all noise.
    self.relative_variance = float(squares.mean() / self.square - 1.0) if self.square > 0 else float("nan")


def compare(gradients: np.ndarray, target: Mean) -> dict[str, float]:
  """A method's gradients of N independent batches, float32 [N, P], against the mean on-policy gradient.

  Returns:
    `cosine`: of one batch's gradient to the target, averaged over the batches, with its standard error.
    `direction`: cosine of the expected gradient to the target, both free of noise: 1 for an unbiased method, and a
      little beyond 1 by chance; NaN where the expected gradient cannot be told from 0. With its jackknife error
      over the N batches; that of the target is not in it.
    `variance`: squared distance from the expected gradient as a multiple of that one's squared length; NaN likewise.
    `norm`: length of the expected gradient, as a multiple of the target's.
  """
  inner = (gradients @ target.value).astype(np.float64)
  single = inner * _inverse_root(np.einsum("np,np->n", gradients, gradients, dtype=np.float64) * target.square)
  mean = Mean(gradients)
  directions = _leave_one_out(gradients, inner, target) if len(gradients) > 2 else np.full(1, np.nan)
  spread = np.sqrt((len(directions) - 1) * np.var(directions))
  return {
    "cosine": float(single.mean()),
    "cosine_error": float(single.std(ddof=1) / np.sqrt(len(single))),
    "direction": float(inner.mean() * _inverse_root(mean.square * target.square)),
    "direction_error": float(spread),
    "variance": mean.relative_variance,
    "norm": float(mean.square * _inverse_root(mean.square * target.square)),
  }


def _inverse_root(x: Any) -> Any:
  """1 / √x, and NaN where x ≤ 0."""
  return np.where(np.asarray(x) > 0, 1.0 / np.sqrt(np.maximum(x, 1e-300)), np.nan)


def _leave_one_out(gradients: np.ndarray, inner: np.ndarray, target: Mean) -> np.ndarray:
  """`direction` without each of the batches in turn."""
  gram = (gradients @ gradients.T).astype(np.float64)
  off = gram - np.diag(np.diag(gram))
  left = len(gradients) - 1
  squares = (off.sum() - 2.0 * off.sum(axis=1)) / (left * (left - 1))
  return (inner.sum() - inner) / left * _inverse_root(squares * target.square)
