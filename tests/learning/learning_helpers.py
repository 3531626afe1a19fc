"""A tiny policy, random groups and learners of them, shared by the tests of this folder."""

import dataclasses
import functools

import jax
import numpy as np
import optax

from async_rl import learning
from async_rl import models
from async_rl import rollout
from async_rl import stabilizers
from async_rl.types import LENGTH
from async_rl.types import STOP
from async_rl.types import Completion
from async_rl.types import Group
from async_rl.types import Prompt
from async_rl.types import Request

CONFIG = models.ModelConfig(
  vocab_size=32, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64, qk_norm=True
)
POLICY = models.Policy(CONFIG, dtype="float32", attention="xla")


class Bigram(models.Policy):
  """Leaves the layers out, where only what is made of log-probabilities matters: programs take half the time."""

  def hidden(self, params, tokens, segments, positions, taps=None):
    del segments, positions, taps  # exact norms are of the unembedding alone
    ends = self._ends(params)
    return ends.final_norm(ends.encode(tokens, self.mesh)).astype(self.dtype)


BIGRAM = Bigram(dataclasses.replace(CONFIG, num_layers=1), dtype="float32", attention="xla")
LORA = models.LoRA(rank=2, alpha=3.0)
LONGEST = 19  # tokens of the longest sequence of `make_groups`, prompt and completion
ADAPTED = dataclasses.replace(POLICY, lora=LORA)


@functools.cache
def params_of(policy, seed=0):
  """The first parameters of a policy, on the host."""
  return jax.device_get(jax.jit(policy.init)(jax.random.key(seed)))


def base():
  """The parameters of `POLICY`, without adapters."""
  return params_of(POLICY)


def start(learner):
  """The state that `learner.init` makes, whose program is large and the same for most learners."""
  return learner.init(jax.random.key(0), params_of(dataclasses.replace(learner.policy, mesh=None)))


def make_groups(seed=0, groups=4, samples=4, prompt=(1, 8), completion=(1, 12), vocab=32):
  """Random groups of ragged lengths."""
  rng = np.random.default_rng(seed)
  made = []
  for g in range(groups):
    prompt_tokens = rng.integers(0, vocab, rng.integers(*prompt)).astype(np.int32)
    completions = []
    for k in range(samples):
      size = int(rng.integers(*completion))
      completions.append(
        Completion(
          ticket=g,
          sample=k,
          tokens=rng.integers(0, vocab, size).astype(np.int32),
          logprobs=-3 * rng.random(size).astype(np.float32),
          versions=rng.integers(0, 3, size).astype(np.int32),
          mask=rng.random(size) < 0.9,
          finish=STOP if rng.random() < 0.7 else LENGTH,
        )
      )
    request = Request(g, prompt_tokens, Prompt(g, "", None))
    made.append(Group(request, tuple(completions), rng.random(samples).astype(np.float32)))
  return made


def make_mesh(data=1, fsdp=1, tensor=1):
  return rollout.make_mesh(jax.devices()[: data * fsdp * tensor], fsdp=fsdp, tensor=tensor)


def stabilized(optimizer):
  """Every stabilizer, and no skips."""
  return stabilizers.control_alignment(
    optax.chain(optax.clip_by_global_norm(1.0), optimizer, stabilizers.scale_by_ess()), high=2.0
  )


def make_learner(shape, mesh=None, optimizer=None, policy=POLICY, objective=None, max_lag=0, **options):
  """A learner; without metrics by lag unless `max_lag` is given."""
  return learning.Learner(
    policy,
    optimizer or stabilized(optax.sgd(0.1)),  # Adam's first steps are signs, and signs amplify rounding
    objective or learning.objective("sequence_tis", advantages="grpo"),
    shape,
    mesh or make_mesh(),
    max_lag=max_lag,
    **options,
  )


def shape_of(rows=4, row_tokens=20, **options):
  return learning.BatchShape(sequences=16, row_tokens=row_tokens, rows=rows, completion_tokens=12, **options)


def run(learner, groups, steps=2):
  state = start(learner)
  for _ in range(steps):
    state, metrics = learner.step(state, learner.put(learning.pack(groups, learner.shape)))
  return jax.device_get(state.params), {k: float(v) for k, v in metrics.items()}


def assert_same(a, b, tolerance=1e-5):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, float(np.abs(y).max())))
