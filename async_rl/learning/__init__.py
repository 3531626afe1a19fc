"""Batch assembly, objectives, and the learner step."""

from async_rl.learning._batch import BatchShape
from async_rl.learning._batch import pack
from async_rl.learning._gae import GAE
from async_rl.learning._learner import Learner
from async_rl.learning._learner_metrics import METRICS
from async_rl.learning._objective import ADVANTAGES
from async_rl.learning._objective import AGGREGATIONS
from async_rl.learning._objective import OBJECTIVES
from async_rl.learning._objective import PUBLISHED_AGGREGATIONS
from async_rl.learning._objective import BatchQuantities
from async_rl.learning._objective import Objective
from async_rl.learning._objective import likelihood_objective
from async_rl.learning._objective import objective
from async_rl.learning._pair_learner import PairLearner
from async_rl.learning._rlhf_objective import KL
from async_rl.learning._rlhf_objective import Method
from async_rl.learning._rlhf_objective import rlhf_objective
