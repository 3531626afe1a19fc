"""The options of configs that start from pretrained weights."""

import jax
import optax
from tiny_weights import GSM8K
from tiny_weights import tiny_weights

from experiments import configs


def test_first_moments_may_be_kept_in_bfloat16(tmp_path):
  """AdamW's state of a parameter is then 6 bytes in place of 8; the second moment stays in float32."""
  config = configs.load("gsm8k")
  sizes = {}
  for dtype in ("float32", "bfloat16"):
    options = config.options(
      weights=str(tiny_weights(tmp_path)), gsm8k_folder=str(GSM8K), chat=False, first_moment_dtype=dtype
    )
    experiment = config.experiment(options)
    params = jax.eval_shape(experiment.policy.init, jax.random.key(0))
    state = jax.eval_shape(experiment.optimizer.init, params)
    adam = optax.tree.get(state, "ScaleByAdamState")
    assert {x.dtype.name for x in jax.tree.leaves(adam.nu)} == {"float32"}
    sizes[dtype] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((adam.mu, adam.nu)))
  assert sizes["bfloat16"] == 0.75 * sizes["float32"]
