"""Losses for off-policy reinforcement learning of language models: pure functions of arrays. Imports jax only.

The order of use in a learner step: `log_ratios` and advantages over the whole batch, a policy loss per micro-batch,
`aggregate` it to a numerator and a denominator, and one `divide_or_zero` at the end.
"""

from async_rl._arrays import ess_ratio
from async_rl._arrays import tree_squared_norm
from async_rl.losses._actor_critic import gae
from async_rl.losses._actor_critic import value_loss
from async_rl.losses._advantages import grpo_advantages
from async_rl.losses._advantages import importance_mean_advantages
from async_rl.losses._advantages import informative_rows
from async_rl.losses._advantages import opo_advantages
from async_rl.losses._advantages import reinforce_advantages
from async_rl.losses._advantages import rloo_advantages
from async_rl.losses._advantages import zero_variance_fraction
from async_rl.losses._aggregation import Aggregation
from async_rl.losses._aggregation import aggregate
from async_rl.losses._aggregation import divide_or_zero
from async_rl.losses._clipped import gspo
from async_rl.losses._clipped import ppo_clip
from async_rl.losses._clipped import proximal_rloo
from async_rl.losses._decoupled import a3po
from async_rl.losses._decoupled import decoupled_ppo
from async_rl.losses._decoupled import interpolated_proximal
from async_rl.losses._kl import KLEstimator
from async_rl.losses._kl import kl_estimate
from async_rl.losses._kl import kl_loss
from async_rl.losses._opob import OpobGradient
from async_rl.losses._opob import opob_advantages
from async_rl.losses._opob import opob_gradient
from async_rl.losses._opob import squared_norms_by_length
from async_rl.losses._opob import squared_norms_by_logits
from async_rl.losses._policy import PolicyLoss
from async_rl.losses._policy import PolicyLossFn
from async_rl.losses._policy import cispo
from async_rl.losses._policy import reinforce
from async_rl.losses._policy import sequence_tis
from async_rl.losses._policy import token_tis
from async_rl.losses._policy import topr
from async_rl.losses._preference import PreferencePairs
from async_rl.losses._preference import best_of_n
from async_rl.losses._preference import best_rows
from async_rl.losses._preference import dpo_loss
from async_rl.losses._preference import ipo_loss
from async_rl.losses._preference import preference_advantages
from async_rl.losses._preference import preference_pairs
from async_rl.losses._ratios import LOG_CLAMP
from async_rl.losses._ratios import clamped_exp
from async_rl.losses._ratios import log_ratios
from async_rl.losses._ratios import mean_log_ratios
from async_rl.losses._ratios import sequence_log_weights
from async_rl.losses._registry import ADVANTAGES
from async_rl.losses._registry import CORRECTIONS
from async_rl.losses._registry import needs
from async_rl.losses._rejection import geometric_mask
from async_rl.losses._rejection import icepop
from async_rl.losses._rejection import m2po as m2po
from async_rl.losses._rejection import opsm
from async_rl.losses._rejection import restrict
from async_rl.losses._rejection import second_moment_threshold
from async_rl.losses._rejection import sequence_mask
from async_rl.losses._rewards import kl_penalized_rewards
from async_rl.losses._rewards import missing_end_rewards
from async_rl.losses._rewards import overlong_penalty
from async_rl.losses._rewards import token_rewards
from async_rl.losses._statistics import ess_statistics
