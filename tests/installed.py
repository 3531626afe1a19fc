"""A stranger's training loop; test_install.py runs it where async_rl is installed beside its requirements alone."""

import importlib.util

import jax
import jax.numpy as jnp
import optax

import async_rl

HIDDEN = ("experiments", "flax", "orbax", "tokenizers", "tqdm", "tyro")
BEHAVIOR = jnp.log(jnp.full((2, 1), 1 / 3))
MASK = jnp.ones((2, 1), bool)
ADVANTAGES = jnp.array([[1.0], [-1.0]])  # of the actions 0 and 2

losses, stabilizers = async_rl.losses, async_rl.stabilizers
optimizer = optax.chain(stabilizers.track_norm(), optax.sgd(0.1), stabilizers.scale_by_ess())


@jax.jit
def update(logits, state):
  def loss(logits):
    logprobs = jax.nn.log_softmax(logits)[jnp.array([[0], [2]])]
    log_weights = losses.sequence_log_weights(losses.log_ratios(logprobs, BEHAVIOR, MASK))
    per_token = losses.token_tis(logprobs, BEHAVIOR, ADVANTAGES, MASK).loss
    return losses.divide_or_zero(*losses.aggregate(per_token, MASK, "token_mean")), log_weights

  gradient, log_weights = jax.grad(loss, has_aux=True)(logits)
  updates, state = optimizer.update(gradient, state, logits, log_weights=log_weights)
  return optax.apply_updates(logits, updates), state


def main():
  assert [name for name in HIDDEN if importlib.util.find_spec(name)] == []
  logits = jnp.zeros(3)
  state = optimizer.init(logits)
  for _ in range(3):
    logits, state = update(logits, state)
  assert logits[0] > 0.05, logits
  assert logits[2] < -0.05, logits
  print(async_rl.__version__, async_rl.__file__)
  print(async_rl.runtime)  # raises: it needs what is not installed here


if __name__ == "__main__":
  main()
