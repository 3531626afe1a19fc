"""What a run is made of: meshes, weight store, rollout buffer, actors, the loop, checkpoints, metrics, ledger."""

from async_rl.runtime._buffer import Closed as Closed
from async_rl.runtime._buffer import EndOfData as EndOfData
from async_rl.runtime._buffer import RolloutBuffer as RolloutBuffer
from async_rl.runtime._checkpoint import Checkpointer as Checkpointer
from async_rl.runtime._checkpoint import CheckpointError as CheckpointError
from async_rl.runtime._ledger import Ledger as Ledger
from async_rl.runtime._mesh import Meshes as Meshes
from async_rl.runtime._mesh import check_rows as check_rows
from async_rl.runtime._mesh import make_mesh as make_mesh
from async_rl.runtime._mesh import make_meshes as make_meshes
from async_rl.runtime._mesh import replicated as replicated
from async_rl.runtime._mesh import row_sharding as row_sharding
from async_rl.runtime._records import completions_from_arrays as completions_from_arrays
from async_rl.runtime._records import completions_to_arrays as completions_to_arrays
from async_rl.runtime._records import drawn_tokens as drawn_tokens
from async_rl.runtime._run_folder import RunFolder as RunFolder
from async_rl.runtime._run_folder import RunFolderError as RunFolderError
from async_rl.runtime._schedule import LagDistribution as LagDistribution
from async_rl.runtime._schedule import ScheduleRecorder as ScheduleRecorder
from async_rl.runtime._schedule import read_schedule as read_schedule
from async_rl.runtime._weights import WeightStore as WeightStore
