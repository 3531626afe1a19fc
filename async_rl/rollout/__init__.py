"""What travels between sampler and learner: prompts, conversations, rollout buffer, weight store, scorers, schedule."""

from async_rl._monitor import Closed
from async_rl.rollout._actor import Actor
from async_rl.rollout._buffer import EndOfData
from async_rl.rollout._buffer import RolloutBuffer
from async_rl.rollout._completion_arrays import completions_from_arrays
from async_rl.rollout._completion_arrays import completions_to_arrays
from async_rl.rollout._completion_arrays import drawn_tokens
from async_rl.rollout._conversations import Conversations
from async_rl.rollout._conversations import ScoredGroup
from async_rl.rollout._ledger import Ledger
from async_rl.rollout._mesh import Meshes
from async_rl.rollout._mesh import make_mesh
from async_rl.rollout._mesh import make_meshes
from async_rl.rollout._mesh import replicated
from async_rl.rollout._prompts import UNTRAINED_TICKETS
from async_rl.rollout._prompts import PromptEncoder
from async_rl.rollout._prompts import PromptStream
from async_rl.rollout._schedule import LAG_KINDS
from async_rl.rollout._schedule import LagDistribution
from async_rl.rollout._schedule import ScheduleRecorder
from async_rl.rollout._schedule import read_schedule
from async_rl.rollout._scorer import RewardModelScorer
from async_rl.rollout._scorer import TextLimits
from async_rl.rollout._weight_link import WeightLink
from async_rl.rollout._weight_push import WeightPush
from async_rl.rollout._weight_store import WeightStore
