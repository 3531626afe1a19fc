"""What a run writes: its folder, checkpoints, metrics, progress and report."""

from async_rl.recording._checkpoint import Checkpointer
from async_rl.recording._checkpoint import CheckpointError
from async_rl.recording._checkpoint import DamagedCheckpointError
from async_rl.recording._metrics import MetricsBuffer
from async_rl.recording._metrics import MetricsWriter
from async_rl.recording._metrics import check_wandb
from async_rl.recording._metrics import read_metrics
from async_rl.recording._metrics import staleness_histogram
from async_rl.recording._progress import Progress
from async_rl.recording._run_folder import RunFolder
from async_rl.recording._run_folder import RunFolderError
from async_rl.recording._run_report import compare_runs
from async_rl.recording._run_report import report_run
from async_rl.recording._run_report import tabulate_final_values
from async_rl.recording._run_report import write_report
