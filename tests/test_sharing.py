"""What tests share: learners of experiments that compute the same, and of no others."""

import functools

import optax
import pytest
from sharing import comparable

from async_rl import learning
from async_rl import stabilizers


def adam(rate=1e-3, **options):
  return stabilizers.control_alignment(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, **options)))


def loss_of(scale, *, shift=0.0):
  def loss(x, power=2, *, shift=shift):
    return scale * x**power + shift

  return loss


@pytest.mark.parametrize(
  ("make", "other"),
  [
    (adam, functools.partial(adam, 1e-2)),
    (functools.partial(adam, b2=0.99), adam),
    (lambda: adam(optax.linear_schedule(0.0, 1e-3, 10)), lambda: adam(optax.linear_schedule(0.0, 1e-2, 10))),
    (lambda: learning.objective("m2po", budget=2.0), lambda: learning.objective("m2po", budget=1.0)),
    (lambda: learning.rlhf_objective("ppo"), lambda: learning.rlhf_objective("ppo", kl="loss")),
    (lambda: loss_of(1.0), lambda: loss_of(2.0)),
    (lambda: loss_of(1.0), lambda: loss_of(1.0, shift=1.0)),
  ],
)
def test_what_is_made_alike_is_the_same_and_nothing_else(make, other):
  assert comparable(make()) == comparable(make())
  assert comparable(make()) != comparable(other())
