"""The objective of a learner: a loss, advantages and an aggregation, with what they need of a batch.

Losses and advantages are functions with the signatures of `async_rl.losses`. What one needs beyond its positional
arguments it names as a required keyword argument, and the learner makes exactly that::

    def loss(logprobs, behavior, advantages, mask, *, lag, proximal): ...
    def advantages(rewards, groups, num_groups, *, log_weights): ...

Names are those of `BatchQuantities` and of `losses.STATISTICS`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from async_rl import losses
from async_rl import models
from async_rl._validation import check_choice
from async_rl.learning._gae import GAE
from async_rl.learning._gae import check_unused
from async_rl.learning._loss_options import check_options
from async_rl.learning._loss_options import split_options

Array = jax.Array
Aggregate = Callable[[Array, Array], tuple[Array, Array]]

#: Named means of a per-token loss. `sum` sums over the tokens of a sequence and averages over sequences.
AGGREGATIONS: Mapping[str, Aggregate] = types.MappingProxyType(
  {
    "sequence_mean": functools.partial(losses.aggregate, method="sequence_mean"),
    "token_mean": functools.partial(losses.aggregate, method="token_mean"),
    "sum": functools.partial(losses.aggregate, method="constant", max_length=1),
  }
)

#: The aggregation a correction was published with, where that is not `sequence_mean`.
PUBLISHED_AGGREGATIONS: Mapping[str, str] = types.MappingProxyType(
  dict.fromkeys(("cispo", "dapo", "estr", "m2po", "m2po_signed"), "token_mean") | {"topr": "sum"}
)

#: Names that `objective` takes.
OBJECTIVES = tuple(losses.CORRECTIONS)
#: Names of advantages that `objective` takes.
ADVANTAGES = (*losses.ADVANTAGES, "gae")


class BatchQuantities(NamedTuple):
  """The quantities of a whole batch that losses and advantages can ask for by name.

  [B] arrays have one entry per sequence, [B, C] arrays one per completion token; their entries outside of `mask` are
  finite and meaningless. No gradient flows through them. The properties are derived from `stats`.

  Attributes:
    rewards: float32 [B].
    groups: int32 [B], the group of each sequence, below B.
    mask: bool [B, C], the tokens to train.
    behavior: float32 [B, C], log mu as recorded by the sampler.
    lag: int32 [B, C], the learner's version minus the version that drew the token.
    stats: the statistics of the tokens under the weights at the start of the step, [B, C]; from a scoring pass.
    reference: float32 [B, C], log-probabilities under the reference policy.
    squared_norms: float32 [B], the exact squared gradient norm of each trajectory's log-probability; from one forward
      and backward pass per trajectory.
  """

  rewards: Array
  groups: Array
  mask: Array
  behavior: Array
  lag: Array
  stats: models.TokenStats | None = None
  reference: Array | None = None
  squared_norms: Array | None = None

  @property
  def lengths(self) -> Array:
    """The number of trained tokens, float32 [B]."""
    return losses.squared_norms_by_length(self.mask)

  @property
  def proximal(self) -> Array:
    """log pi under the weights at the start of the step, float32 [B, C]."""
    return self._scored().logprobs

  @property
  def entropy(self) -> Array:
    """The entropy of each token's distribution under the weights at the start of the step, float32 [B, C].

    It stands in for the entropy under the weights that drew the token, which is not recorded; at a small lag they are
    close. `losses.estr` asks for it.
    """
    return self._scored().entropy

  @property
  def values(self) -> Array:
    """The value of the text before each token by the value head at the start of the step, float32 [B, C]."""
    values = self._scored().values
    if values is None:
      raise ValueError("The batch was scored without a value head: stats.values=None; add one to the parameters.")
    return values

  @property
  def log_ratios(self) -> Array:
    """Raw log-ratios log pi - log mu at the start of the step, float32 [B, C], 0 where masked."""
    return losses.log_ratios(self.proximal, self.behavior, self.mask)

  @property
  def log_weights(self) -> Array:
    """Raw sequence log-weights at the start of the step, float32 [B]."""
    return losses.sequence_log_weights(self.log_ratios)

  @property
  def squared_logit_norms(self) -> Array:
    """The squared norm of each trajectory's gradient at the logits, float32 [B]: an estimate of `squared_norms`."""
    stats = self._scored()
    return losses.squared_norms_by_logits(stats.logprobs, stats.sum_squares, self.mask)

  def _scored(self) -> models.TokenStats:
    if self.stats is None:
      raise ValueError("The batch was not scored: stats=None; pass the statistics of its tokens.")
    return self.stats


#: Names that need a scoring pass.
_SCORED = frozenset({"stats", "proximal", "entropy", "log_ratios", "log_weights", "squared_logit_norms", "values"})
#: Those of them that a loss can have from the pass that computes it, where there is no other.
_OWN_PASS = frozenset({"entropy"})
_QUANTITIES = frozenset(BatchQuantities._fields) | _SCORED | {"lengths"}


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss, advantages and an aggregation; what they need is read from their signatures.

  Attributes:
    loss: (logprobs, behavior, advantages, mask, *, needs) to `losses.PolicyLoss`, as in `losses.CORRECTIONS`. It sees
      one micro-batch at a time: `mask` is False on the sequences of other ones.
    advantages: (rewards, groups, num_groups, *, needs) to float32 [B] of the whole batch, as in `losses.ADVANTAGES`.
      `num_groups` is an upper bound of the number of groups. `GAE` makes advantages of tokens, [B, C], and adds the
      loss of a value head.
    aggregate: from per-token loss and mask, [B, C] each, to numerator and denominator, as in `AGGREGATIONS`. Tokens
      that a loss rejects are in the mask: they count in the denominator.
    statistics: whole-batch statistics that can be needed by name, such as M2PO's threshold: functions of the raw
      log-ratios at the start of the step and the mask, [B, C] each.
    token_rewards: (rewards, *, needs) to the rewards of tokens, float32 [B, C], for `GAE`; by default a sequence's last
      token has its reward.

  Raises:
    ValueError: if a needed name is neither a quantity of the batch nor a statistic, or there is no `GAE` for what only
      that uses.
  """

  loss: losses.PolicyLossFn
  advantages: Callable[..., Array] | GAE
  aggregate: Aggregate = AGGREGATIONS["sequence_mean"]
  statistics: Mapping[str, Callable[[Array, Array], Array]] = dataclasses.field(
    default_factory=lambda: losses.STATISTICS
  )
  token_rewards: Callable[..., Array] | None = None

  def __post_init__(self):
    if self.gae is None and (self.token_rewards is not None or "values" in self.needs):
      raise ValueError(
        f"*token_rewards* and values go with advantages=GAE(...) only, got advantages={self.advantages!r}."
      )
    for part, function in (("loss", self.loss), ("advantages", self._rewarding)):
      unknown = [name for name in losses.needs(function) if name not in _QUANTITIES | set(self.statistics)]
      if unknown:
        known = ", ".join(sorted(_QUANTITIES | set(self.statistics)))
        raise ValueError(f"*{part}* must only need {known}; got {', '.join(unknown)}.")

  @property
  def gae(self) -> GAE | None:
    """The estimator of advantages that needs a value head, if it is one."""
    return self.advantages if isinstance(self.advantages, GAE) else None

  @property
  def _rewarding(self) -> Callable[..., Array]:
    """What is first made of the rewards: advantages, or rewards of tokens."""
    if isinstance(self.advantages, GAE):
      return self.token_rewards or _final_rewards
    return self.advantages

  @property
  def needs(self) -> frozenset[str]:
    """Names of everything that the loss and the advantages need."""
    return self._needs_of_advantages.union(losses.needs(self.loss))

  @property
  def _needs_of_advantages(self) -> frozenset[str]:
    return frozenset(losses.needs(self._rewarding)) | ({"values"} if self.gae else set())

  @property
  def needs_scores(self) -> bool:
    """Whether the batch is scored under the weights at the start of the step, which is one more forward pass."""
    needed = self._needs_of_advantages.union(set(losses.needs(self.loss)) - _OWN_PASS)
    return bool(needed & (_SCORED | set(self.statistics)))

  @property
  def needs_reference(self) -> bool:
    """Whether a frozen reference policy is needed, and a forward pass of it."""
    return "reference" in self.needs

  @property
  def needs_exact_norms(self) -> bool:
    """Whether each trajectory's exact gradient norm is needed: several times the cost of the step itself."""
    return "squared_norms" in self.needs

  def make_advantages(self, batch: BatchQuantities) -> Array:
    """Returns the advantages of a whole batch, float32 [B], or [B, C] with `GAE`."""
    return self.make_targets(batch)[0]

  def make_targets(self, batch: BatchQuantities) -> tuple[Array, Array | None]:
    """Returns the advantages, and what a value head is trained towards, float32 [B, C]; `None` without one."""
    needed = self._needed(self._rewarding, batch)
    if isinstance(self.advantages, GAE):
      return self.advantages.estimate(self._rewarding(batch.rewards, **needed), batch.values, batch.mask)
    return self.advantages(batch.rewards, batch.groups, batch.rewards.shape[0], **needed), None

  def value_loss(self, values: Array, returns: Array, mask: Array) -> Array:
    """Returns the loss of values per token, float32 [B, C], to be added to the policy's."""
    assert self.gae is not None
    return self.gae.value_coefficient * losses.value_loss(values, values, returns, mask, clip=None)

  def loss_options(self, batch: BatchQuantities) -> dict[str, Array]:
    """Returns the keyword arguments that the loss needs, made from a whole batch.

    The entropy of its tokens is left out if the batch was not scored: then `own_options` has it.
    """
    return self._needed(self.loss, batch, _OWN_PASS if batch.stats is None else frozenset())

  def own_options(self, options: Mapping[str, Array], entropy: Array) -> dict[str, Array]:
    """Returns what `options` lack of the loss's keyword arguments, by the pass that computes it.

    Args:
      options: the result of `loss_options`.
      entropy: of each token's distribution, float32 [B, C]; no gradient flows.
    """
    missing = "entropy" in losses.needs(self.loss) and "entropy" not in options
    return {"entropy": jax.lax.stop_gradient(entropy)} if missing else {}

  def mean(self, loss: Array, mask: Array) -> Array:
    """Returns the aggregated per-token loss of a whole batch, float32 []."""
    return losses.divide_or_zero(*self.aggregate(loss, mask))

  def _needed(
    self, function: Callable[..., Any], batch: BatchQuantities, without: Collection[str] = ()
  ) -> dict[str, Array]:
    needed = {}
    for name in losses.needs(function):
      if name in without:
        continue
      if name in self.statistics:
        needed[name] = self.statistics[name](batch.log_ratios, batch.mask)
      elif (value := getattr(batch, name)) is None:
        raise ValueError(f"The objective needs {name}, got {name}=None; pass it in the batch's quantities.")
      else:
        needed[name] = jax.tree.map(jax.lax.stop_gradient, value)
    return needed


def objective(
  name: str,
  *,
  advantages: str | Callable[..., Array] = "dr_grpo",
  aggregate: str | None = None,
  gae: GAE | None = None,
  **options: Any,
) -> Objective:
  """Returns an objective made of the registries' entries.

  Args:
    name: one of `OBJECTIVES`, which are the names of `losses.CORRECTIONS`; its options may follow as text, as in
      "trm:max_bound=0.5,mean_bound=0.01".
    advantages: a name in `ADVANTAGES`, or a function like those in `losses.ADVANTAGES`.
    aggregate: a name in `AGGREGATIONS`; `None` takes the one that the correction was published with.
    gae: the estimator of advantages="gae"; by default `GAE()`.
    **options: options of the correction such as `cap` or `high`, or of the whole-batch statistic that it needs, such
      as M2PO's `budget`.

  Raises:
    ValueError: if a name or an option is unknown, the correction refuses an option's value, or `gae` has options and
      advantages are of another kind.
    TypeError: if an option is given twice, as text and by name.

  >>> sorted(objective("m2po", budget=0.1).needs)
  ['threshold']
  >>> objective("ppo_clip:low=0.1,high=0.28").loss.keywords
  {'low': 0.1, 'high': 0.28}
  >>> objective("sequence_tis", advantages="opob", cap=4.0).needs_exact_norms
  True
  """
  name, given = split_options(name)
  correction = _look_up(losses.CORRECTIONS, "objective", name)
  if advantages != "gae":
    check_unused(gae, "*advantages*='gae'", advantages)
  estimators = {**losses.ADVANTAGES, "gae": gae or GAE()}
  estimator = _look_up(estimators, "advantages", advantages) if isinstance(advantages, str) else advantages
  aggregation = PUBLISHED_AGGREGATIONS.get(name, "sequence_mean") if aggregate is None else aggregate
  options = dict(**given, **options)
  statistics = dict(losses.STATISTICS)
  needed = [key for key in losses.needs(correction) if key in statistics]
  check_options(name, [correction, *(statistics[key] for key in needed)], options)
  own = dict(options)
  for key in needed:
    accepted = inspect.signature(statistics[key]).parameters
    statistics[key] = functools.partial(statistics[key], **{x: own.pop(x) for x in list(own) if x in accepted})
  loss = functools.partial(correction, **own) if own else correction
  made = Objective(loss, estimator, _look_up(AGGREGATIONS, "aggregate", aggregation), statistics)
  if options:
    _call_on_shapes(made)
  return made


def likelihood_objective() -> Objective:
  """Returns the objective of supervised training: maximum likelihood, averaged over tokens."""
  return Objective(losses.reinforce, _ones, AGGREGATIONS["token_mean"])


def _ones(rewards: Array, groups: Array, num_groups: int) -> Array:
  del groups, num_groups
  return jnp.ones_like(rewards)


def _final_rewards(rewards: Array, *, mask: Array) -> Array:
  return losses.final_rewards(rewards, mask)


def _look_up(registry: Mapping[str, Any], argument: str, name: str) -> Any:
  check_choice(argument, name, registry)
  return registry[name]


def _call_on_shapes(objective: Objective) -> None:
  """Traces the loss and what it needs, so that they refuse bad options before a run begins."""
  zeros = jnp.zeros((1, 1))
  stats = models.TokenStats(zeros, zeros, zeros)
  batch = BatchQuantities(zeros[0], jnp.zeros(1, int), zeros == 0, zeros, zeros.astype(int), stats)
  jax.eval_shape(lambda: objective.loss(zeros, zeros, zeros, batch.mask, **objective.loss_options(batch)))
