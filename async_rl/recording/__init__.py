"""What a run writes: its folder, checkpoints, metrics, progress and report."""

from async_rl.recording._checkpoint import Checkpointer as Checkpointer
from async_rl.recording._checkpoint import CheckpointError as CheckpointError
from async_rl.recording._checkpoint import DamagedCheckpointError as DamagedCheckpointError
from async_rl.recording._metrics import MetricsBuffer as MetricsBuffer
from async_rl.recording._metrics import MetricsWriter as MetricsWriter
from async_rl.recording._metrics import check_wandb as check_wandb
from async_rl.recording._metrics import read_metrics as read_metrics
from async_rl.recording._metrics import staleness_histogram as staleness_histogram
from async_rl.recording._progress import Progress as Progress
from async_rl.recording._report import compare_runs as compare_runs
from async_rl.recording._report import write_report as write_report
from async_rl.recording._run_folder import RunFolder as RunFolder
from async_rl.recording._run_folder import RunFolderError as RunFolderError
