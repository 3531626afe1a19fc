"""One jitted optimizer step over a packed batch: loss, gradient, stabilizers, metrics."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from typing import get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from async_rl import losses
from async_rl import models
from async_rl import stabilizers
from async_rl._validation import check_choice
from async_rl.learning._batch import BatchShape
from async_rl.learning._copied_score import CopiedScore
from async_rl.learning._learner_metrics import LAG_EDGES
from async_rl.learning._learner_metrics import Collected
from async_rl.learning._learner_metrics import batch_metrics
from async_rl.learning._learner_metrics import optimizer_metrics
from async_rl.learning._learner_metrics import value_metrics
from async_rl.learning._learning_rate import scheduled_rates
from async_rl.learning._loss_scale import pull_back
from async_rl.learning._norms import ExactNorms
from async_rl.learning._norms import packed_squared_norms
from async_rl.learning._norms import resolve_exact_norms
from async_rl.learning._norms import squared_gradient_norms
from async_rl.learning._objective import BatchQuantities
from async_rl.learning._objective import Objective
from async_rl.learning._placement import PlacedModel
from async_rl.learning._placement import all_params
from async_rl.learning._placement import collect
from async_rl.learning._placement import micro_batch
from async_rl.learning._placement import split_state
from async_rl.types import Batch
from async_rl.types import TrainState

Array = jax.Array


class Learner(PlacedModel):
  """Builds the state and the step of one training run.

  The step sums numerators and denominators over the micro-batches and divides once, so the gradient does not depend
  on how the batch was split. Batch-wide statistics go to the optimizer as extra arguments: `log_weights`
  (float32 [B], raw sequence log-weights), `log_weights_mask` (bool [B], sequences with trained tokens), `on_policy`
  (bool [], no token is stale) and `mean_lag` (float32 [], over trained tokens).

  The step computes what the objective needs and nothing else: a scoring pass over the whole batch, the reference
  policy's log-probabilities, exact gradient norms (see `Objective`). A frozen reference policy is given by
  `set_reference`, before the first step; it then scores each batch once, for the metrics too. It shares all frozen
  parameters with the policy.

  Args:
    policy: the architecture; its `remat` applies here.
    optimizer: an optax transformation, stabilizers included.
    objective: the loss, the advantages and the aggregation.
    shape: the static batch shape.
    mesh: the learner mesh, with axes ("data", "fsdp", "tensor").
    temperature: the temperature of the sampler's softmax.
    head_chunk: the number of a device's tokens whose logits are formed at a time; `None` for `models.head_chunk`'s.
    max_lag: the largest lag of a token, which bounds the buckets of the metrics by lag; `None`: any. At 0 there are no
      such metrics.
    exact_norms: how exact gradient norms are computed where the objective needs them: "packed" for all sequences of a
      micro-batch at a time, "single" for one sequence at a time, "auto" for what takes fewer operations, see
      `resolve_exact_norms`.

  Attributes:
    policy: the policy, on the mesh.

  Raises:
    ValueError: if the mesh does not divide the rows of a micro-batch, or *exact_norms* is none of these.
  """

  def __init__(
    self,
    policy: models.Policy,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    shape: BatchShape,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    head_chunk: int | None = None,
    max_lag: int | None = None,
    exact_norms: str = "auto",
  ):
    check_choice("exact_norms", exact_norms, get_args(ExactNorms))
    self.policy = dataclasses.replace(policy, mesh=mesh, max_segments=shape.max_segments)
    self._exact_norms = resolve_exact_norms(exact_norms, self.policy, shape, head_chunk or models.HEAD_CHUNK)
    head_chunk = head_chunk or models.head_chunk(self.policy)
    self.objective = objective
    if objective.gae is not None:
      self._critic_rate = objective.gae.value_rate
    super().__init__(self.policy, optimizer, shape, mesh)
    self._temperature, self._head_chunk = temperature, head_chunk
    self._score = functools.partial(models.score, temperature=temperature, chunk=head_chunk)
    shardings = all_params(self.state_shardings)
    self._copied_score = CopiedScore(self.policy, shardings, temperature=temperature, chunk=head_chunk)
    self._reference: models.Params | None = None
    self._lag_edges = tuple(edge for edge in LAG_EDGES if max_lag is None or edge <= max_lag)
    self._step = jax.jit(self._train, donate_argnums=0, out_shardings=(self.state_shardings, self._replicated))
    self._score_batch = jax.jit(lambda params, batch: self._score_all(params, batch).logprobs)

  def set_reference(self, params: models.Params) -> None:
    """Makes a copy of `params`, of which only those that are trained matter, the frozen reference policy.

    It is kept in the compute dtype, see `models.as_used`.
    """
    shardings = models.split_trainable(self.state_shardings.params)[0]
    placed = jax.device_put(models.split_trainable(params)[0], shardings)
    make = functools.partial(models.as_used, dtype=self.policy.dtype)
    self._reference = jax.jit(make, out_shardings=shardings)(placed)

  def score_reference(self, params: models.Params, batch: Batch) -> Array:
    """Log-probabilities of a batch under the reference policy, float32 [B, C].

    Args:
      params: of the policy, for what it shares with the reference.
      batch: of any shape that the mesh divides, with no more sequences in a row than this learner's.
    """
    if self._reference is None:
      raise ValueError("The learner has no reference policy; give it one with set_reference.")
    return self._score_batch(_with_frozen(params, self._reference), self.put(batch))

  def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step; `state` is donated. The metrics stay on the device, float32 [] each.

    A step whose gradient or update is not finite changes neither parameters nor optimizer state, whatever the optimizer
    is; its metric `update/skipped` is 1.

    Raises:
      ValueError: if the objective needs a reference policy that was not set.
    """
    if self.objective.needs_reference and self._reference is None:
      raise ValueError("The objective needs a reference policy; give the learner one with set_reference.")
    return self._step(state, batch, self._reference)

  def sampler_params(self, state: TrainState) -> models.Params:
    """The weights to draw with: the parameters, or ahead of them if the optimizer has a `lead_by_momentum`."""
    if not stabilizers.has_lead(state.opt_state):
      return state.params
    leading = stabilizers.leading_params(split_state(state)[0], state.opt_state)
    return {part: leading.get(part, tree) for part, tree in state.params.items()}

  def trace_step(self, reference: bool = False) -> jax.stages.Traced:
    """Traces the step from shapes alone, for a mesh of devices that need not be there.

    Args:
      reference: whether a reference policy was set.
    """
    return self._step.trace(self.abstract(), self._abstract_batch(), self.abstract_reference() if reference else None)

  def compile_step(self) -> None:
    """Compiles the step, as its first call does otherwise."""
    self.trace_step(reference=self._reference is not None).lower().compile()

  def trace_score(self) -> jax.stages.Traced:
    """Traces the scoring of a whole batch, likewise."""
    return self._score_batch.trace(self.abstract().params, self._abstract_batch())

  def abstract_reference(self) -> models.Params:
    """Returns the shapes, dtypes and shardings of a reference policy's trained parameters."""
    trained = models.split_trainable(self.policy.abstract())[0]
    used = jax.eval_shape(functools.partial(models.as_used, dtype=self.policy.dtype), trained)
    return models.with_shardings(used, models.split_trainable(self.state_shardings.params)[0])

  def compilations(self) -> int:
    """How many programs the step has been compiled to; 1 after the first call, and it should stay so."""
    return self._step._cache_size()  # type: ignore[attr-defined]

  def _abstract_batch(self) -> Batch:
    return models.with_shardings(self.shape.abstract(), self.batch_shardings)

  # What is jitted.

  def _completed(self, key: Array, params: models.Params) -> TrainState:
    if self.policy.lora is not None and "adapters" not in params:
      params = params | {"adapters": models.init_adapters(self.policy.lora, params, key)}
    return super()._completed(key, params)

  def _new_critic(self) -> models.Params | None:
    return None if self.objective.gae is None else models.init_value_head(self.policy.config.d_model)

  def _train(
    self, state: TrainState, batch: Batch, reference_params: models.Params | None = None
  ) -> tuple[TrainState, dict[str, Array]]:
    quantities = self._quantities(state, batch, reference_params)
    advantages, returns = self.objective.make_targets(quantities)
    grads, denominator, loss, collected = self._accumulate(
      state, batch, advantages, returns, self.objective.loss_options(quantities)
    )
    grads = jax.tree.map(lambda g: losses.divide_or_zero(g, denominator), grads)
    log_ratios = losses.log_ratios(collected.logprobs, batch.logprobs, batch.mask)
    new_state, applied = self._apply(
      state,
      grads,
      log_weights=losses.sequence_log_weights(log_ratios),
      log_weights_mask=jnp.any(batch.mask, axis=1),
      on_policy=jnp.max(quantities.lag) == 0,
      mean_lag=losses.divide_or_zero(jnp.sum(quantities.lag), jnp.sum(batch.mask)),
    )
    metrics = {
      "loss": losses.divide_or_zero(loss, denominator),
      **applied,
      **batch_metrics(batch, collected, quantities.lag, advantages, quantities.reference, self._lag_edges),
      **({} if returns is None else value_metrics(quantities.values, returns, batch.mask)),
      **optimizer_metrics(new_state.opt_state, scheduled_rates(self.optimizer, state.opt_state)),
    }
    return new_state, metrics

  def _quantities(self, state: TrainState, batch: Batch, reference_params: models.Params | None) -> BatchQuantities:
    """Everything that the objective and the metrics need of the whole batch; the rest is `None`."""
    params, needed = state.params, self.objective
    stats = self._score_all(all_params(state), batch) if needed.needs_scores else None
    reference = norms = None
    if reference_params is not None:
      reference = self._score_all(_with_frozen(params, reference_params), batch).logprobs
    if needed.needs_exact_norms:
      norms = self._squared_norms(params, batch)
    return BatchQuantities(
      rewards=batch.rewards,
      groups=batch.groups,
      mask=batch.mask,
      behavior=batch.logprobs,
      lag=jnp.where(batch.mask, state.version - batch.versions, 0),
      stats=stats,
      reference=reference,
      squared_norms=norms,
    )

  def _squared_norms(self, params: models.Params, batch: Batch) -> Array:
    if self._exact_norms == "packed":
      return packed_squared_norms(
        self.policy, params, batch, self.shape, temperature=self._temperature, chunk=self._head_chunk
      )
    policy = dataclasses.replace(self.policy, max_segments=None)  # their rows have padding on both sides
    score = functools.partial(self._score, policy)
    return squared_gradient_norms(score, params, batch, self.shape.sequence_tokens, self._row_devices)

  def _accumulate(
    self, state: TrainState, batch: Batch, advantages: Array, returns: Array | None, options: dict[str, Array]
  ):
    """Sums of gradient, denominator and loss over the micro-batches in use, and the per-token results."""
    trainable, frozen = split_state(state)
    copies, frozen = map(self._copied_score.copy, (trainable, frozen))

    def part_loss(logprobs, values, entropy, mask):
      logprobs = jnp.where(mask, logprobs, 0.0)
      needed = options | self.objective.own_options(options, entropy)
      out = self.objective.loss(logprobs, batch.logprobs, advantages, mask, **needed)
      loss = out.loss if returns is None else out.loss + self.objective.value_loss(values, returns, mask)
      return *self.objective.aggregate(loss, mask), logprobs, out.clipped, out.keep

    def numerator_of(scores, entropy, mask):
      (logprobs, values), entropy = jax.tree.map(lambda x: self._planes.enter(x, batch), (scores, entropy))
      mask = self._planes.mask(mask, batch)
      numerator, denominator, logprobs, clipped, keep = jax.vmap(part_loss)(logprobs, values, entropy, mask)
      return jnp.sum(numerator), (numerator, denominator, mask, Collected(logprobs, entropy, clipped, keep))

    def body(m, carry):
      grads, total, loss, collected = carry
      rows, mask = micro_batch(batch, m)
      scored = self._planes.scored(mask, batch)
      stats, pull = jax.vjp(lambda copies: self._copied_score({**frozen, **copies}, rows, scored), copies)
      by_scores = jax.grad(numerator_of, has_aux=True)
      cotangents, (numerator, denominator, mask, new) = by_scores((stats.logprobs, stats.values), stats.entropy, mask)
      nothing = jnp.zeros_like(stats.entropy)
      (g,) = pull_back(lambda x: pull(models.TokenStats(x[0], nothing, nothing, x[1])), cotangents, self.policy.dtype)
      grads = self._copied_score.add(grads, g)
      collected = jax.tree.map(lambda old, x: jnp.where(mask, x, old), collected, new)
      return grads, total + denominator, loss + numerator, collected

    zeros, false = jnp.zeros(batch.mask.shape, jnp.float32), jnp.zeros(batch.mask.shape, bool)
    sums = (jnp.float32(0), jnp.float32(0), Collected(zeros, zeros, false, false))
    start = (self._copied_score.zeros(trainable), *self._planes.start(sums))
    grads, *sums = jax.lax.fori_loop(0, batch.used, body, start)
    return self._copied_score.total(grads), *self._planes.total(sums)

  def _score_all(self, params: Any, batch: Batch) -> models.TokenStats:
    """`TokenStats` of the whole batch in the loss plane, without gradient."""
    zeros = jnp.zeros(batch.mask.shape, jnp.float32)
    start = models.TokenStats(zeros, zeros, zeros, zeros if models.VALUE_HEAD in params else None)
    return collect(functools.partial(self._score, self.policy, params), batch, start, self._planes)


def _with_frozen(params: models.Params, trainable: models.Params) -> models.Params:
  """`trainable` in the place of what is trained of `params`."""
  return {**models.split_trainable(params)[1], **trainable}
