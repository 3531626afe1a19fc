"""Losses for off-policy reinforcement learning of language models: pure functions of arrays. Imports jax only.

The order of use in a learner step: `log_ratios` and advantages over the whole batch, a policy loss per micro-batch,
`aggregate` it to a numerator and a denominator, and one `divide_or_zero` at the end.
"""

from async_rl.losses._actor_critic import gae as gae
from async_rl.losses._actor_critic import value_loss as value_loss
from async_rl.losses._advantages import grpo_advantages as grpo_advantages
from async_rl.losses._advantages import importance_mean_advantages as importance_mean_advantages
from async_rl.losses._advantages import informative_rows as informative_rows
from async_rl.losses._advantages import opo_advantages as opo_advantages
from async_rl.losses._advantages import reinforce_advantages as reinforce_advantages
from async_rl.losses._advantages import rloo_advantages as rloo_advantages
from async_rl.losses._advantages import zero_variance_fraction as zero_variance_fraction
from async_rl.losses._aggregation import Aggregation as Aggregation
from async_rl.losses._aggregation import aggregate as aggregate
from async_rl.losses._aggregation import divide_or_zero as divide_or_zero
from async_rl.losses._clipped import gspo as gspo
from async_rl.losses._clipped import ppo_clip as ppo_clip
from async_rl.losses._clipped import proximal_rloo as proximal_rloo
from async_rl.losses._decoupled import a3po as a3po
from async_rl.losses._decoupled import decoupled_ppo as decoupled_ppo
from async_rl.losses._decoupled import interpolated_proximal as interpolated_proximal
from async_rl.losses._kl import KLEstimator as KLEstimator
from async_rl.losses._kl import kl_estimate as kl_estimate
from async_rl.losses._kl import kl_loss as kl_loss
from async_rl.losses._opob import OpobGradient as OpobGradient
from async_rl.losses._opob import opob_advantages as opob_advantages
from async_rl.losses._opob import opob_gradient as opob_gradient
from async_rl.losses._opob import squared_norms_by_length as squared_norms_by_length
from async_rl.losses._opob import squared_norms_by_logits as squared_norms_by_logits
from async_rl.losses._opob import tree_squared_norm as tree_squared_norm
from async_rl.losses._policy import PolicyLoss as PolicyLoss
from async_rl.losses._policy import PolicyLossFn as PolicyLossFn
from async_rl.losses._policy import cispo as cispo
from async_rl.losses._policy import reinforce as reinforce
from async_rl.losses._policy import sequence_tis as sequence_tis
from async_rl.losses._policy import token_tis as token_tis
from async_rl.losses._policy import topr as topr
from async_rl.losses._preference import PreferencePairs as PreferencePairs
from async_rl.losses._preference import best_of_n as best_of_n
from async_rl.losses._preference import best_rows as best_rows
from async_rl.losses._preference import dpo_loss as dpo_loss
from async_rl.losses._preference import ipo_loss as ipo_loss
from async_rl.losses._preference import preference_pairs as preference_pairs
from async_rl.losses._ratios import LOG_CLAMP as LOG_CLAMP
from async_rl.losses._ratios import clamped_exp as clamped_exp
from async_rl.losses._ratios import log_ratios as log_ratios
from async_rl.losses._ratios import mean_log_ratios as mean_log_ratios
from async_rl.losses._ratios import sequence_log_weights as sequence_log_weights
from async_rl.losses._registry import ADVANTAGES as ADVANTAGES
from async_rl.losses._registry import CORRECTIONS as CORRECTIONS
from async_rl.losses._registry import needs as needs
from async_rl.losses._rejection import geometric_mask as geometric_mask
from async_rl.losses._rejection import icepop as icepop
from async_rl.losses._rejection import m2po as m2po
from async_rl.losses._rejection import opsm as opsm
from async_rl.losses._rejection import restrict as restrict
from async_rl.losses._rejection import second_moment_threshold as second_moment_threshold
from async_rl.losses._rejection import sequence_mask as sequence_mask
from async_rl.losses._rewards import kl_penalised_rewards as kl_penalised_rewards
from async_rl.losses._rewards import missing_end_rewards as missing_end_rewards
from async_rl.losses._rewards import overlong_penalty as overlong_penalty
from async_rl.losses._rewards import token_rewards as token_rewards
from async_rl.losses._statistics import ess_ratio as ess_ratio
from async_rl.losses._statistics import ess_statistics as ess_statistics
