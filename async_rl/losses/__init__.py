"""Losses for off-policy reinforcement learning of language models: pure functions of arrays. Imports jax only.

The order of use in a learner step: `log_ratios` and advantages over the whole batch, a policy loss per micro-batch,
`aggregate` it to a numerator and a denominator, and one `divide_or_zero` at the end.
"""

from async_rl.losses._advantages import grpo_advantages as grpo_advantages
from async_rl.losses._advantages import reinforce_advantages as reinforce_advantages
from async_rl.losses._advantages import rloo_advantages as rloo_advantages
from async_rl.losses._advantages import zero_variance_fraction as zero_variance_fraction
from async_rl.losses._aggregation import Aggregation as Aggregation
from async_rl.losses._aggregation import aggregate as aggregate
from async_rl.losses._aggregation import divide_or_zero as divide_or_zero
from async_rl.losses._clipped import ppo_clip as ppo_clip
from async_rl.losses._policy import PolicyLoss as PolicyLoss
from async_rl.losses._policy import PolicyLossFn as PolicyLossFn
from async_rl.losses._policy import reinforce as reinforce
from async_rl.losses._policy import sequence_tis as sequence_tis
from async_rl.losses._policy import token_tis as token_tis
from async_rl.losses._ratios import LOG_CLAMP as LOG_CLAMP
from async_rl.losses._ratios import clamped_exp as clamped_exp
from async_rl.losses._ratios import log_ratios as log_ratios
from async_rl.losses._ratios import sequence_log_weights as sequence_log_weights
