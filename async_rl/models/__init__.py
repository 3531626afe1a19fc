"""The policy: architecture, scoring, cached decode, sharding, public weights, tokenizers."""

from async_rl.models._attention import cache_attention
from async_rl.models._attention import self_attention
from async_rl.models._config import ModelConfig
from async_rl.models._config import RopeScaling
from async_rl.models._gguf import GGUFCheckpoint
from async_rl.models._gguf import packaged_gguf
from async_rl.models._head import TokenStats
from async_rl.models._head import score
from async_rl.models._head import token_stats
from async_rl.models._load import Checkpoint
from async_rl.models._load import load_params
from async_rl.models._load import open_checkpoint
from async_rl.models._policy import Cache
from async_rl.models._policy import Params
from async_rl.models._policy import Policy
from async_rl.models._policy import sampler_params
from async_rl.models._policy import unstack_layers
from async_rl.models._sharding import RULES
from async_rl.models._sharding import param_shardings
from async_rl.models._sharding import param_specs
