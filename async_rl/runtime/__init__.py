"""What a run is made of: meshes, weight store, rollout buffer, actor, the loop, checkpoints, metrics, ledger.

And what may come before it: supervised training and a reward model.
"""

from async_rl.runtime._actor import Actor as Actor
from async_rl.runtime._buffer import Closed as Closed
from async_rl.runtime._buffer import EndOfData as EndOfData
from async_rl.runtime._buffer import RolloutBuffer as RolloutBuffer
from async_rl.runtime._checkpoint import Checkpointer as Checkpointer
from async_rl.runtime._checkpoint import CheckpointError as CheckpointError
from async_rl.runtime._conversations import Conversations as Conversations
from async_rl.runtime._conversations import Scored as Scored
from async_rl.runtime._evaluation import complete as complete
from async_rl.runtime._evaluation import evaluate as evaluate
from async_rl.runtime._evaluation import mean_and_interval as mean_and_interval
from async_rl.runtime._experiment import Experiment as Experiment
from async_rl.runtime._kept import restore_or_make as restore_or_make
from async_rl.runtime._ledger import Ledger as Ledger
from async_rl.runtime._mesh import Meshes as Meshes
from async_rl.runtime._mesh import make_mesh as make_mesh
from async_rl.runtime._mesh import make_meshes as make_meshes
from async_rl.runtime._mesh import replicated as replicated
from async_rl.runtime._metrics import MetricsBuffer as MetricsBuffer
from async_rl.runtime._metrics import MetricsWriter as MetricsWriter
from async_rl.runtime._metrics import read_metrics as read_metrics
from async_rl.runtime._metrics import staleness_histogram as staleness_histogram
from async_rl.runtime._parts import Parts as Parts
from async_rl.runtime._progress import Progress as Progress
from async_rl.runtime._records import completions_from_arrays as completions_from_arrays
from async_rl.runtime._records import completions_to_arrays as completions_to_arrays
from async_rl.runtime._records import drawn_tokens as drawn_tokens
from async_rl.runtime._report import compare_runs as compare_runs
from async_rl.runtime._report import write_report as write_report
from async_rl.runtime._reward_model import abstract_reward_model as abstract_reward_model
from async_rl.runtime._reward_model import make_scorer as make_scorer
from async_rl.runtime._reward_model import pair_accuracy as pair_accuracy
from async_rl.runtime._reward_model import train_reward_model as train_reward_model
from async_rl.runtime._run import Interrupted as Interrupted
from async_rl.runtime._run import Summary as Summary
from async_rl.runtime._run import train as train
from async_rl.runtime._run_folder import RunFolder as RunFolder
from async_rl.runtime._run_folder import RunFolderError as RunFolderError
from async_rl.runtime._schedule import LagDistribution as LagDistribution
from async_rl.runtime._schedule import ScheduleRecorder as ScheduleRecorder
from async_rl.runtime._schedule import read_schedule as read_schedule
from async_rl.runtime._scorer import RewardModelScorer as RewardModelScorer
from async_rl.runtime._scorer import TextLimits as TextLimits
from async_rl.runtime._supervised import train_supervised as train_supervised
from async_rl.runtime._weights import WeightStore as WeightStore
