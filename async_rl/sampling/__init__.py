"""The sampler protocol, and the slot engine: continuous batching with log-probabilities and versions on every token."""

from async_rl.sampling._checksum import checksum_weights
from async_rl.sampling._draw import draw_tokens
from async_rl.sampling._draw import sample_key
from async_rl.sampling._draw import token_uniforms
from async_rl.sampling._engine import Engine
from async_rl.sampling._engine_pool import EnginePool
from async_rl.sampling._engine_pool import split_engines
from async_rl.sampling._prepare_weights import prepare_weights
from async_rl.sampling._programs import Programs
from async_rl.sampling._sampler import Counters
from async_rl.sampling._sampler import Sampler
from async_rl.sampling._sampler import SamplerFactory
from async_rl.sampling._sampler import generate
from async_rl.sampling._sampler_config import SamplerConfig
from async_rl.sampling._samples import Sample
from async_rl.sampling._samples import Snapshot
from async_rl.sampling._samples import continue_sample
from async_rl.sampling._samples import pack_samples
from async_rl.sampling._samples import start_samples
from async_rl.sampling._samples import unpack_samples
