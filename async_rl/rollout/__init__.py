"""What travels between sampler and learner: prompts, conversations, rollout buffer, weight store, scorers, schedule."""

from async_rl._monitor import Closed as Closed
from async_rl.rollout._actor import Actor as Actor
from async_rl.rollout._buffer import EndOfData as EndOfData
from async_rl.rollout._buffer import RolloutBuffer as RolloutBuffer
from async_rl.rollout._completion_arrays import completions_from_arrays as completions_from_arrays
from async_rl.rollout._completion_arrays import completions_to_arrays as completions_to_arrays
from async_rl.rollout._completion_arrays import drawn_tokens as drawn_tokens
from async_rl.rollout._conversations import Conversations as Conversations
from async_rl.rollout._conversations import ScoredGroup as ScoredGroup
from async_rl.rollout._ledger import Ledger as Ledger
from async_rl.rollout._mesh import Meshes as Meshes
from async_rl.rollout._mesh import make_mesh as make_mesh
from async_rl.rollout._mesh import make_meshes as make_meshes
from async_rl.rollout._mesh import replicated as replicated
from async_rl.rollout._prompts import UNTRAINED_TICKETS as UNTRAINED_TICKETS
from async_rl.rollout._prompts import PromptEncoder as PromptEncoder
from async_rl.rollout._prompts import PromptStream as PromptStream
from async_rl.rollout._schedule import LagDistribution as LagDistribution
from async_rl.rollout._schedule import ScheduleRecorder as ScheduleRecorder
from async_rl.rollout._schedule import read_schedule as read_schedule
from async_rl.rollout._scorer import RewardModelScorer as RewardModelScorer
from async_rl.rollout._scorer import TextLimits as TextLimits
from async_rl.rollout._weight_store import WeightStore as WeightStore
