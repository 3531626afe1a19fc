"""The benchmark of a decode step's attention: its first two kernels compute the same, and the others their parts."""

import jax
import numpy as np

from experiments.benchmarks import decode_attention
from experiments.benchmarks.decode_speed import SMOKE


def test_both_forms_of_the_prompts_are_near_float32():
  case = decode_attention.Case(slots=16, prompt=32, own=32, filled=20, layers=1)
  kernels = decode_attention.make_kernels(SMOKE, case, "xla")
  position = 2 * SMOKE.num_kv_heads * SMOKE.head_dim * 2
  assert kernels[0].read == 16 * (32 + 20) * position
  assert kernels[1].read == (16 * 20 + 2 * 32) * position
  for largest, mean in decode_attention.errors(kernels, 32 + 20):
    assert 0 < mean < 1e-3
    assert largest < 1e-2
  for kernel in kernels:
    assert jax.eval_shape(kernel.attend, kernel.queries, kernel.layers[0]).shape == kernel.queries.shape
  own, as_tokens = (np.asarray(jax.jit(k.attend)(k.queries, k.layers[0]), np.float32) for k in kernels[2:4])
  np.testing.assert_allclose(as_tokens, own, atol=1e-2)
