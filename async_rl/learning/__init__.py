"""Batch assembly, the learner step, and the methods of RLHF as what it takes."""

from async_rl.learning._batch import BatchShape as BatchShape
from async_rl.learning._batch import pack as pack
from async_rl.learning._learner import SEQUENCE_MEAN as SEQUENCE_MEAN
from async_rl.learning._learner import AdvantageInputs as AdvantageInputs
from async_rl.learning._learner import Learner as Learner
from async_rl.learning._learner import LossInputs as LossInputs
from async_rl.learning._rlhf import KL as KL
from async_rl.learning._rlhf import RLHF as RLHF
from async_rl.learning._rlhf import Method as Method
