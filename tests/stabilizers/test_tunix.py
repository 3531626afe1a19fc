"""The stabilizers inside Tunix's GRPO learner, on Tunix's own toy model. Runs where `google-tunix` is installed."""

import jax
import numpy as np
import optax
import pytest

from async_rl import stabilizers

pytest.importorskip("tunix", reason="needs google-tunix")

from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

pytestmark = pytest.mark.filterwarnings("ignore")  # Tunix's own

STEPS = 4
PROMPTS = ("input string", "hello world", "My name is", "Hello there")


@pytest.fixture(autouse=True)
def _allow_rank_promotion():
  """Tunix's losses rely on it."""
  with jax.numpy_rank_promotion("allow"):
    yield


def train(optimizer, micro_batch=2):
  """A few GRPO steps on the toy transformer.

  Returns whether they changed the actor's parameters, and the optimizer's state.
  """
  vocabulary = test_common.MockVocab()
  config = test_common.ModelConfig(num_layers=1, vocab_size=vocabulary.GetPieceSize())
  make_model = lambda: test_common.ToyTransformer(config=config, rngs=nnx.Rngs(0))
  actor = make_model()
  before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(actor, nnx.Param)))
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  cluster = rl_cluster.RLCluster(
    actor=actor,
    reference=make_model(),
    tokenizer=vocabulary,
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer,
        eval_every_n_steps=1000,
        max_steps=STEPS,
        mini_batch_size=2,
        train_micro_batch_size=micro_batch,
      ),
      rollout_config=base_rollout.RolloutConfig(max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32),
    ),
  )
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=lambda prompts, completions, **_: [float(len(set(text))) for text in completions],
    algo_config=grpo_learner.GRPOConfig(num_generations=2, num_iterations=1),
  )
  learner.train([{"prompts": np.array(PROMPTS[i % 2 * 2 :][:2])} for i in range(STEPS)])
  trainer = cluster.actor_trainer
  after = nnx.to_pure_dict(nnx.state(trainer.model, nnx.Param))
  changed = any(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.any(x != y)), before, after)))
  return changed, nnx.as_pure(trainer.optimizer.opt_state)


def test_alignment_control_needs_no_change_to_the_learner():
  changed, state = train(stabilizers.control_alignment(optax.adamw(1e-3), low=0.0, high=0.1))
  assert changed
  assert float(optax.tree.get(state, "alignment_norm")) > 0.0
  skips = int(optax.tree.get(state, "skip_count"))
  assert skips + int(optax.tree.get(state, "count")) == STEPS  # Adam has counted the other steps only


def test_telemetry_sees_accumulated_gradients():
  optimizer = optax.chain(stabilizers.track_norm(), stabilizers.track_cosine(), optax.adamw(1e-3))
  changed, state = train(optimizer, micro_batch=1)
  assert changed
  assert int(optax.tree.get(state, "grad_norm_count")) == STEPS
  assert float(optax.tree.get(state, "grad_cosine")) != 0.0


def test_ess_scaling_without_log_weights_is_refused():
  """Tunix hands no extra arguments to the optimizer, and that must not go unnoticed."""
  with pytest.raises(TypeError, match="log_weights"):
    train(optax.chain(optax.adamw(1e-3), stabilizers.scale_by_ess()))
