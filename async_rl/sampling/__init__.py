"""The slot engine: continuous batching with log-probabilities and versions on every token."""

from async_rl.sampling._config import SamplerConfig
from async_rl.sampling._engine import Counters
from async_rl.sampling._engine import Engine
from async_rl.sampling._records import Snapshot
from async_rl.sampling._sample import sample
from async_rl.sampling._weights import prepare_weights
