"""Gradients cross the data axis once per step, not once per micro-batch."""

import dataclasses
import math
import re

import jax
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from learning_helpers import ADAPTED
from learning_helpers import POLICY
from learning_helpers import make_groups
from learning_helpers import make_learner
from learning_helpers import make_mesh
from learning_helpers import shape_of

from async_rl import learning
from async_rl import models
from experiments.plan._hlo_costs import count_compiled


def lower_step(learner, **options):
  """The learner's step for a batch of several micro-batches, traced and lowered."""
  batch = models.with_shardings(learning.pack(make_groups(), learner.shape), learner.batch_shardings)
  return learner._step.trace(learner.abstract(), batch, None).lower(**options)


@pytest.mark.parametrize("policy", [POLICY, ADAPTED], ids=["weights", "adapters"])
def test_one_sum_of_all_gradients_crosses_the_data_axis(policy):
  learner = make_learner(shape_of(), make_mesh(data=2, fsdp=2), optax.sgd(0.1), policy)
  crossing = [x for x in count_compiled(lower_step(learner).compile().as_text()).exchanges if x.joins(0, 2)]
  assert not [x for x in crossing if x.loops]
  trained = jax.tree.leaves(models.split_trainable(learner.abstract().params)[0])
  parts = sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in trained)
  planes = 10 * learner.shape.sequences * learner.shape.completion_tokens  # two of numbers, two of booleans
  sums = sum(x.nbytes for x in crossing if not x.loops and x.kind == "all-reduce" and not x.joins(0, 1))
  assert sums == parts + planes + 8  # and a numerator and a denominator


def test_cudnn_attention_is_called_without_copies(monkeypatch):
  """Lowered for GPUs: JAX cannot batch it with a mask for all heads."""
  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 90800)
  policy = dataclasses.replace(POLICY, dtype="bfloat16", attention="cudnn")
  text = lower_step(make_learner(shape_of(), make_mesh(data=2, fsdp=2), policy=policy), lowering_platforms=("cuda",))
  assert len(re.findall(r"custom_call @__cudnn", text.as_text())) >= 2  # forward and backward
