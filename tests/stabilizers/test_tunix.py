"""The stabilizers inside Tunix's GRPO learner, on Tunix's own toy model. Runs where `google-tunix` is installed."""

import jax
import numpy as np
import optax
import pytest

from async_rl import losses
from async_rl import stabilizers

pytest.importorskip("tunix", reason="needs google-tunix")

from flax import nnx
from tunix.rl import algo_core
from tunix.rl import common
from tunix.rl import function_registry
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


#: The log-weights of every micro-batch, as the loss saw them.
SEEN = []


@function_registry.register_policy_loss_fn("grpo_with_ess")
def grpo_with_ess(model, train_example, algo_config, pad_id, eos_id, **kwargs):
  """Tunix's loss, with the sums that `scale_by_ess_probe` needs."""
  loss, aux = algo_core.grpo_loss_fn(model, train_example, algo_config, pad_id, eos_id, **kwargs)
  graph, state = nnx.split(model)
  prompts, completions = train_example.prompt_ids, train_example.completion_ids
  logprobs = common.compute_per_token_logps(graph, state, prompts, completions, pad_id, eos_id)
  mask = train_example.completion_mask.astype(bool)
  log_weights = losses.sequence_log_weights(losses.log_ratios(logprobs, train_example.old_per_token_logps, mask))
  jax.debug.callback(lambda x: SEEN.append(np.array(x)), log_weights)
  return stabilizers.attach_ess_probe(loss, model.ess_probe[...], log_weights), aux


def train(optimizer, micro_batch=2, *, probe=False, **options):
  """A few GRPO steps on the toy transformer, with a probe in the actor if asked.

  Returns whether they changed the actor's parameters, the optimizer's state, and the parameters.
  """
  vocabulary = test_common.MockVocab()
  config = test_common.ModelConfig(num_layers=1, vocab_size=vocabulary.GetPieceSize())
  make_model = lambda: test_common.ToyTransformer(config=config, rngs=nnx.Rngs(0))
  actor = make_model()
  if probe:
    actor.ess_probe = nnx.Param(stabilizers.ess_probe())
    options = {"num_iterations": 2, "policy_loss_fn": "grpo_with_ess"} | options
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
    algo_config=grpo_learner.GRPOConfig(num_generations=2, **options),
  )
  learner.train([{"prompts": np.array(PROMPTS[i % 2 * 2 :][:2])} for i in range(STEPS)])
  trainer = cluster.actor_trainer
  after = nnx.to_pure_dict(nnx.state(trainer.model, nnx.Param))
  changed = any(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.any(x != y)), before, after)))
  return changed, nnx.as_pure(trainer.optimizer.opt_state), after


def test_alignment_control_needs_no_change_to_the_learner():
  changed, state, _ = train(stabilizers.control_alignment(optax.adamw(1e-3), low=0.0, high=0.1))
  assert changed
  assert float(optax.tree.get(state, "alignment_norm")) > 0.0
  skips = int(optax.tree.get(state, "skip_count"))
  assert skips + int(optax.tree.get(state, "count")) == STEPS  # Adam has counted the other steps only


def test_telemetry_sees_accumulated_gradients():
  optimizer = optax.chain(stabilizers.track_norm(), stabilizers.track_cosine(), optax.adamw(1e-3))
  changed, state, _ = train(optimizer, micro_batch=1)
  assert changed
  assert int(optax.tree.get(state, "grad_norm_count")) == STEPS
  assert float(optax.tree.get(state, "grad_cosine")) != 0.0


def test_ess_scaling_without_log_weights_is_refused():
  """Tunix hands no extra arguments to the optimizer, and that must not go unnoticed."""
  with pytest.raises(TypeError, match="log_weights"):
    train(optax.chain(optax.adamw(1e-3), stabilizers.scale_by_ess()))


@pytest.mark.parametrize("micro_batch", [2, 1])
def test_the_probe_carries_the_ratio_of_the_whole_batch_into_the_optimizer(micro_batch):
  """The second update on a batch is off-policy, and Tunix's own gradient accumulation is part of the way."""
  SEEN.clear()
  optimizer = stabilizers.scale_by_ess_probe(optax.adamw(3e-2), power=1.0)
  changed, state, params = train(optimizer, micro_batch, probe=True)
  assert changed
  last = np.concatenate(SEEN[-2 // micro_batch :])
  assert last.shape == (4,)  # two prompts with two completions each
  assert np.std(last) > 1e-3
  wanted = float(stabilizers.ess_ratio(last))
  assert float(optax.tree.get(state, "ess_ratio")) == pytest.approx(wanted, rel=1e-4)
  assert float(optax.tree.get(state, "ess_scale")) == pytest.approx(wanted, rel=1e-4)
  assert wanted < 1 - 1e-6
  assert int(optax.tree.get(state, "ess_undefined_count")) == 0
  np.testing.assert_array_equal(params["ess_probe"], np.zeros(3))


def test_a_probe_that_scales_nothing_changes_nothing():
  plain = train(optax.adamw(1e-3), num_iterations=2)[2]
  probed = train(stabilizers.scale_by_ess_probe(optax.adamw(1e-3), power=0.0), probe=True)[2]
  probed.pop("ess_probe")
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), probed, plain)


def test_without_its_probe_the_model_is_what_it_was():
  """For exports and for a sampler of one's own: the parameters without the probe have the names of the model alone."""
  config = test_common.ModelConfig(num_layers=1, vocab_size=8)
  model = test_common.ToyTransformer(config=config, rngs=nnx.Rngs(0))
  names = {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  model.ess_probe = nnx.Param(stabilizers.ess_probe())
  exported = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.PathContains("ess_probe"))))
  assert {path for path, _ in nnx.to_flat_state(exported)} == names
